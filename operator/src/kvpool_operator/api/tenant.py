"""kvpool.dev/v1alpha1 KVCacheTenant: spec and status. `kubectl explain` prints the text under each field."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from kvpool.config import MAX_READS_FROM
from kvpool_operator.api import fields as f  # noqa: TC001  these are read by pydantic
from kvpool_operator.api.conditions import Condition  # noqa: TC001
from kvpool_operator.api.model import Count, KVCacheObject, LabelSelector, Model, Text, section
from kvpool_operator.api.names import NamespaceName, PoolName, Reader  # noqa: TC001
from kvpool_operator.api.rules import Rule, immutable, with_rules

__all__ = [
    "EVERY_TENANT",
    "MAX_SHOWN",
    "NOT_ITSELF",
    "TENANT_KIND",
    "TENANT_PLURAL",
    "KVCacheTenant",
    "TenantSpec",
    "TenantStatus",
    "tenant_id",
]

TENANT_KIND: Final = "KVCacheTenant"
TENANT_PLURAL: Final = "kvcachetenants"
MAX_SHOWN: Final = 64
EVERY_TENANT: Final = "*"

SOME_MEMBERS: Final = Rule(
    "(has(self.namespaces) && size(self.namespaces) > 0) || has(self.selector)",
    "give the tenant members: namespaces by name, or a selector for their labels",
)
SELECTOR_CHOOSES: Final = Rule(
    "!has(self.selector) || (has(self.selector.matchLabels) && size(self.selector.matchLabels) > 0) || "
    "(has(self.selector.matchExpressions) && size(self.selector.matchExpressions) > 0)",
    "give members.selector at least one label or expression: an empty one would make all namespaces one tenant that "
    "shares its blocks",
)
STAR_STANDS_ALONE: Final = Rule(
    "!has(self.readers) || size(self.readers) < 2 || !('*' in self.readers)",
    "write either '*' alone in sharing.readers, for every KVCacheTenant of the pool, or their names",
)
NOT_ITSELF: Final = Rule(
    "!has(self.spec.sharing) || !has(self.spec.sharing.readers) || !(self.metadata.name in self.spec.sharing.readers)",
    "leave the tenant's own name out of sharing.readers: it finds its own blocks in any case",
)
POOL_STAYS: Final = immutable("the pool of a tenant", "create another KVCacheTenant for the other pool")


def tenant_id(name: str, uid: str) -> str:
    """Return the identity from which a KVCacheTenant's block keys are derived."""
    return f"kvt:{name}:{uid}"


class TenantPoolRef(Model):
    """Reference to a pool in the namespace of the tenant."""

    name: PoolName
    """Name of a KVCachePool in the namespace of this object."""


class Members(Model):
    """Member namespaces of the tenant."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(SOME_MEMBERS, SELECTOR_CHOOSES)}

    namespaces: Annotated[list[NamespaceName], Field(max_length=256)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Member namespaces by name. They do not need to exist yet."""
    selector: LabelSelector | None = None
    """Further member namespaces by label. Users who can label namespaces can add members: choose a label that the
    tenants cannot set."""

    @model_validator(mode="after")
    def _members(self) -> Members:
        SOME_MEMBERS.check(bool(self.namespaces) or self.selector is not None)
        chosen = self.selector is None or bool(self.selector.match_labels or self.selector.match_expressions)
        SELECTOR_CHOOSES.check(chosen)
        return self


class TenantQuota(Model):
    """Quota of the tenant."""

    capacity: f.TenantRoom | None = None
    """Maximum size of the tenant's blocks on each node, all members together, such as 200Gi. Above it, the tenant's own
    blocks are evicted. 0: no quota. If it is omitted, the pool's tenancy.defaultQuota.capacity applies."""
    shared_capacity: f.TenantRoom | None = None
    """Maximum size of the tenant's blocks in a shared directory, all nodes together, such as 2Ti. 0: no quota. If it is
    omitted, the pool's tenancy.defaultQuota.capacity applies. Object stores have no quotas."""


class TenantTtl(Model):
    """Expiry of the tenant's blocks."""

    idle: f.LifeTime | None = None
    """Removes a block that no engine has used for this time, such as 24h. 0s disables idle expiry. If it is omitted,
    the pool's cache.ttl.idle applies. In an object store the pool's value always applies."""
    max_age: f.LifeTime | None = None
    """Removes a block this long after it was created, such as 168h. 0s disables the age limit. If it is omitted, the
    pool's cache.ttl.maxAge applies. In an object store the pool's value always applies."""


class Sharing(Model):
    """Read access of other tenants to this tenant's blocks."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(STAR_STANDS_ALONE)}

    readers: Annotated[list[Reader], Field(max_length=64)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Names of KVCacheTenants of the same pool that can read this tenant's blocks in addition to their own, or only '*'
    for all of them. A namespace without a KVCacheTenant is never a reader. Access is one-way: this tenant cannot read
    the readers' blocks, and readers cannot write or remove its blocks. Readers receive the tenant's data, can infer its
    prompts from response times, and trust what its pods stored. A tenant reads at most 8 others: the oldest that grant
    it access. A KVCacheTenant that is created later with one of these names gets the access too."""

    @model_validator(mode="after")
    def _readers(self) -> Sharing:
        STAR_STANDS_ALONE.check(len(self.readers) < 2 or EVERY_TENANT not in self.readers)
        return self


class TenantHints(Model):
    """Session hints of the tenant."""

    share: Annotated[int, Field(ge=0, le=100)] = 100
    """Percent of the tenant's bytes on a drive that its sessions may expect to use again, if it is lower than the
    pool's hints.share. 0: its sessions can only report that they have ended."""


class TenantSpec(Model):
    """Namespaces that use a pool as one tenant: they share their blocks with each other only, and share a quota."""

    pool_ref: Annotated[TenantPoolRef, Field(json_schema_extra=with_rules(POOL_STAYS))]
    """Pool of the tenant. Immutable."""
    members: Members
    """Member namespaces of the tenant. They find each other's blocks. A namespace that joins or leaves a tenant no
    longer finds its earlier blocks. A namespace is a member of one tenant per pool: if two claim it, the older one gets
    it. The pool's injection.allowedNamespaces must allow the namespace."""
    quota: TenantQuota = section(TenantQuota)
    """Quota of the tenant."""
    ttl: TenantTtl = section(TenantTtl)
    """Expiry of the tenant's blocks."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Eviction priority on a full node or in a full shared directory: blocks of tenants with the lowest priority are
    evicted first, and among these of the tenant with the highest usage. Namespaces without a KVCacheTenant have
    priority 0. A tenant can lose all of its blocks to one with a higher priority: set a quota for tenants with a high
    priority."""
    hints: TenantHints = section(TenantHints)
    """Session hints of the tenant."""
    sharing: Sharing = section(Sharing)
    """Read access of other tenants to this tenant's blocks. If it is omitted, no other tenant has access."""


class TenantUsage(Model):
    """Usage of the tenant."""

    nodes: Text = "0"
    """Size of the tenant's blocks on all nodes together, such as 1.5Ti."""
    blocks: Count = 0
    """Number of blocks on all nodes together. A block on two nodes counts twice."""
    shared: Text = ""
    """Size in the shared directory at the last count. Empty without a shared directory or before the first count."""
    evicted_over_quota: Count = 0
    """Number of blocks that were evicted because the tenant exceeded its quota, since the sidecars started."""


class TenantStatus(Model):
    """Observed state of the tenant."""

    observed_generation: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """metadata.generation of the spec that this status describes."""
    member_count: Count = 0
    """Number of member namespaces."""
    members: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=MAX_SHOWN)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Names of the member namespaces, at most 64."""
    reads_from: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=MAX_READS_FROM)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """KVCacheTenants whose blocks this tenant can read, in lookup order."""
    readers: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=MAX_SHOWN)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """KVCacheTenants that can read this tenant's blocks, at most 64."""
    tag: Annotated[str, Field(max_length=32)] = ""
    """Name of the tenant in the sidecars' /status and in per-tenant metrics."""
    used: TenantUsage = Field(default_factory=TenantUsage)
    """Usage of the tenant."""
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the tenant."""

    def dump(self) -> dict[str, Any]:
        """Return the status as the API server stores it."""
        return self.model_dump(by_alias=True)


class KVCacheTenant(KVCacheObject):
    """KVCacheTenant object, as the API server stores it."""

    spec: TenantSpec

    @model_validator(mode="after")
    def _not_itself(self) -> KVCacheTenant:
        NOT_ITSELF.check(self.metadata.name not in self.spec.sharing.readers)
        return self

    @property
    def id(self) -> str:
        """Identity from which block keys are derived. A later tenant of the same name has another uid."""
        return tenant_id(self.metadata.name, self.metadata.uid)
