"""kvpool.dev/v1alpha1, KVCacheTenant: what a user writes (`TenantSpec`) and what the operator answers (`TenantStatus`).

The text under each field is what `kubectl explain` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from kvpool.config import MAX_READS_FROM
from kvpool_operator.api import fields as f  # noqa: TC001  these are read by pydantic
from kvpool_operator.api.conditions import Condition  # noqa: TC001
from kvpool_operator.api.rules import Rule, immutable, with_rules
from kvpool_operator.api.v1alpha1 import KVCacheObject, LabelSelector, Model, section
from kvpool_operator.api.v1alpha1_status import Count, Text  # noqa: TC001

__all__ = [
    "EVERY_TENANT",
    "MAX_SHOWN",
    "NOT_ITSELF",
    "TENANT_KIND",
    "TENANT_PLURAL",
    "KVCacheTenant",
    "TenantSpec",
    "TenantStatus",
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
    "give members.selector at least one label or expression: an empty one would make all namespaces one tenant, who "
    "find each other's blocks",
)
STAR_STANDS_ALONE: Final = Rule(
    "!has(self.readers) || size(self.readers) < 2 || !('*' in self.readers)",
    "write either '*' alone in sharing.readers, for every KVCacheTenant of the pool, or their names",
)
NOT_ITSELF: Final = Rule(
    "!has(self.spec.sharing) || !has(self.spec.sharing.readers) || !(self.metadata.name in self.spec.sharing.readers)",
    "leave the tenant's own name out of sharing.readers: it finds its own blocks in any case",
)
POOL_STAYS: Final = immutable("the pool of a tenant", "make another KVCacheTenant for the other pool")


class PoolRef(Model):
    """A pool of the tenant's own namespace."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of a KVCachePool in the namespace of this object."""


class Members(Model):
    """The namespaces that are this tenant."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(SOME_MEMBERS, SELECTOR_CHOOSES)}

    namespaces: Annotated[list[Annotated[str, Field(min_length=1, max_length=63)]], Field(max_length=256)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Namespaces by name; they need not exist yet."""
    selector: LabelSelector | None = None
    """Namespaces by their labels, beside those named. Whoever may label namespaces may make one a member: choose a
    label that the tenants themselves cannot set."""

    @model_validator(mode="after")
    def _members(self) -> Members:
        SOME_MEMBERS.check(bool(self.namespaces) or self.selector is not None)
        chosen = self.selector is None or bool(self.selector.match_labels or self.selector.match_expressions)
        SELECTOR_CHOOSES.check(chosen)
        return self


class TenantQuota(Model):
    """How much the tenant may take."""

    capacity: f.TenantRoom | None = None
    """Room for its blocks on each node, such as 200Gi, all members together. If it stores more it loses blocks of its
    own. 0: no quota. Left out: the pool's tenancy.defaultQuota.capacity."""
    shared_capacity: f.TenantRoom | None = None
    """Room for its blocks in a shared directory, all nodes together. 0: no quota. Left out: the pool's
    tenancy.defaultQuota.capacity. In an object store nobody has a quota."""


class TenantTtl(Model):
    """When the tenant's blocks go although there is room for them."""

    idle: f.LifeTime | None = None
    """A block that no engine asked for during so long goes. 0s: it may stay. Left out: the pool's cache.ttl.idle. In an
    object store the pool's own holds."""
    max_age: f.LifeTime | None = None
    """A block goes so long after it was made. 0s: it may stay. Left out: the pool's cache.ttl.maxAge. In an object
    store the pool's own holds."""


class Sharing(Model):
    """Who else may read the tenant's blocks."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(STAR_STANDS_ALONE)}

    readers: Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=64)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """KVCacheTenants of the same pool by name that find this tenant's blocks beside their own, or '*' alone for all of
    them; a namespace without a KVCacheTenant is never one. One way only: this tenant finds none of theirs, and they
    cannot write or remove any of its blocks. This gives away its bytes, and by time what it has asked; and they trust
    whatever this tenant's pods stored. A tenant reads at most 8 others, the oldest of those that let it. Who gets one
    of these names later gets the grant with it."""

    @model_validator(mode="after")
    def _readers(self) -> Sharing:
        STAR_STANDS_ALONE.check(len(self.readers) < 2 or EVERY_TENANT not in self.readers)
        return self


class TenantSpec(Model):
    """Namespaces that use a pool as one tenant: they find each other's blocks, nobody else's, and share a quota."""

    pool_ref: Annotated[PoolRef, Field(json_schema_extra=with_rules(POOL_STAYS))]
    """The pool. It cannot be changed later."""
    members: Members
    """The namespaces that are this tenant. They find each other's blocks; a namespace that becomes a member, or is one
    no more, finds none of its earlier ones. It is a member of one tenant of a pool: where two claim it, the older one
    has it. The pool's injection.allowedNamespaces must admit it."""
    quota: TenantQuota = section(TenantQuota)
    """How much the tenant may take."""
    ttl: TenantTtl = section(TenantTtl)
    """When its blocks go although there is room for them."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Who makes room on a full node or in a full shared directory: tenants with the lowest number first, of those the
    one that takes the most. Namespaces without a KVCacheTenant have 0. A tenant can lose all of its blocks to one with
    a higher number: give those with a high number a quota."""
    sharing: Sharing = section(Sharing)
    """Who else may read the tenant's blocks. Left out: nobody."""


class TenantUsage(Model):
    """What the tenant's blocks take."""

    nodes: Text = "0"
    """Room on all nodes together, such as 1.5Ti."""
    blocks: Count = 0
    """Blocks on all nodes together; a block on two nodes counts twice."""
    shared: Text = ""
    """Room in the shared directory, as last counted; empty where there is none or nothing was counted yet."""
    evicted_over_quota: Count = 0
    """Blocks that nodes removed because the tenant was over its quota, since their sidecars started."""


class TenantStatus(Model):
    """The tenant as the operator last saw it."""

    observed_generation: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """metadata.generation that this status was judged by."""
    member_count: Count = 0
    """Namespaces that are this tenant now."""
    members: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=MAX_SHOWN)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Their names, at most 64."""
    reads_from: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=MAX_READS_FROM)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """KVCacheTenants whose blocks it may read, as they let it, in the order they are looked at."""
    readers: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=MAX_SHOWN)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """KVCacheTenants that may read its blocks now, at most 64 of them."""
    tag: Annotated[str, Field(max_length=32)] = ""
    """The name under which sidecars account for its blocks, in /status and where metrics tell tenants apart."""
    used: TenantUsage = Field(default_factory=TenantUsage)
    """What its blocks take."""
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Accepted says whether everything that the spec asks for can be had, and what cannot; Enforced whether all nodes
    keep to it."""

    def dump(self) -> dict[str, Any]:
        """As the API server holds it."""
        return self.model_dump(by_alias=True)


class KVCacheTenant(KVCacheObject):
    """One tenant, as the API server holds it."""

    spec: TenantSpec

    @model_validator(mode="after")
    def _not_itself(self) -> KVCacheTenant:
        NOT_ITSELF.check(self.metadata.name not in self.spec.sharing.readers)
        return self

    @property
    def id(self) -> str:
        """What names of its blocks are made with. A namesake that comes later never finds them, for its uid differs."""
        return f"kvt:{self.metadata.name}:{self.metadata.uid}"
