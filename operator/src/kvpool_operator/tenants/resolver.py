"""Resolves KVCacheTenants: which namespaces belong to which tenant, and which tenants read whose blocks. Pure.

A namespace belongs to one tenant. If two claim it, the older one has it (of the same second: the first by name), so
that a new tenant never takes namespaces, and with them blocks, from an existing one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvpool.config import MAX_READS_FROM, TenantConfig
from kvpool.protocol.keys import tenant_tag
from kvpool_operator.api.condition_types import TENANT_CONDITIONS
from kvpool_operator.api.conditions import Condition, Verdict, first_verdict, with_verdicts
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.quantity import format_bytes, to_bytes
from kvpool_operator.api.reasons import Reason
from kvpool_operator.api.tenant import EVERY_TENANT, MAX_SHOWN, KVCacheTenant, TenantStatus, TenantUsage
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.k8s.selectors import matches
from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool_operator.api.v1alpha1 import PoolSpec
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["ResolvedTenant", "orphan_status", "resolve", "tenant_status", "to_configs", "uses_selectors"]

_MAX_NAMED: Final = 3
_MAX_TENANTS: Final = 1024


@dataclass(frozen=True)
class ResolvedTenant:
    """One KVCacheTenant of a pool with its members and grants."""

    raw: Manifest
    tenant: KVCacheTenant | None
    """None if the spec is invalid; then it has no members."""
    namespaces: tuple[str, ...] = ()
    reason: Reason = Reason.ACCEPTED
    """ACCEPTED, or why a part of the spec is not in effect."""
    message: str = ""
    reads_from: tuple[str, ...] = ()
    """Names of the tenants whose blocks this one reads."""
    readers: tuple[str, ...] = ()
    """Names of the tenants that read the blocks of this one."""

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])


def uses_selectors(tenants: Iterable[Manifest]) -> bool:
    """Whether any tenant selects its members by labels."""
    return any(((raw.get("spec") or {}).get("members") or {}).get("selector") for raw in tenants)


def resolve(
    tenants: Sequence[Manifest], labels: Mapping[str, Mapping[str, str]], allowed: Sequence[str]
) -> tuple[ResolvedTenant, ...]:
    """Resolve the KVCacheTenants of one pool; those that are being deleted are left out.

    `labels`: of each namespace of the cluster. `allowed`: namespaces that the pool serves, or `*`.
    """
    living = [raw for raw in tenants if "deletionTimestamp" not in raw["metadata"]]
    claimed: dict[str, str] = {}
    resolved = []
    for raw in sorted(living, key=lambda r: (str(r["metadata"].get("creationTimestamp")), r["metadata"]["name"])):
        try:
            tenant = KVCacheTenant.parse(raw)
        except InvalidPoolError as e:
            message = f"{e}; the tenant has no members until its spec is valid"
            resolved.append(ResolvedTenant(raw, None, (), Reason.INVALID_SPEC, message))
            continue
        if len(resolved) >= _MAX_TENANTS:
            message = f"a pool has at most {_MAX_TENANTS} tenants: this one has no members"
            resolved.append(ResolvedTenant(raw, None, (), Reason.TOO_MANY_TENANTS, message))
            continue
        resolved.append(_resolve(raw, tenant, labels, allowed, claimed))
        claimed.update(dict.fromkeys(resolved[-1].namespaces, tenant.metadata.name))
    return _with_grants(resolved)


def _resolve(
    raw: Manifest,
    tenant: KVCacheTenant,
    labels: Mapping[str, Mapping[str, str]],
    allowed: Sequence[str],
    claimed: Mapping[str, str],
) -> ResolvedTenant:
    """`claimed`: namespaces of older tenants, with the name of the tenant."""
    members = tenant.spec.members
    requested = set(members.namespaces)
    if members.selector is not None:
        selector = members.selector.model_dump(by_alias=True)
        requested |= {name for name, namespace_labels in labels.items() if matches(selector, namespace_labels)}
    not_allowed = [] if "*" in allowed else sorted(requested - set(allowed))
    conflicts = sorted((requested & claimed.keys()) - set(not_allowed))
    namespaces = tuple(sorted(requested - set(not_allowed) - set(conflicts)))
    messages = []
    if conflicts:
        owners = [f"{name} (of {claimed[name]})" for name in conflicts]
        messages.append(f"these namespaces belong to an older tenant: {summarize(owners, _MAX_NAMED)}")
    if not_allowed:
        messages.append(f"not admitted by the pool's injection.allowedNamespaces: {summarize(not_allowed, _MAX_NAMED)}")
    reason = (
        Reason.NAMESPACE_CONFLICT if conflicts else Reason.NAMESPACE_NOT_ALLOWED if not_allowed else Reason.ACCEPTED
    )
    return ResolvedTenant(raw, tenant, namespaces, reason, "; ".join(messages))


def _with_grants(resolved: Sequence[ResolvedTenant]) -> tuple[ResolvedTenant, ...]:
    """Add who reads whose blocks. `resolved` has the oldest tenant first; it is read first."""
    known = {one.name for one in resolved}
    valid = [one.name for one in resolved if one.tenant is not None]
    owners: dict[str, list[str]] = {name: [] for name in known}
    unknown: dict[str, list[str]] = {}
    for one in resolved:
        listed = one.tenant.spec.sharing.readers if one.tenant is not None else []
        readers_of_one = valid if listed == [EVERY_TENANT] else sorted(set(listed))
        unknown[one.name] = [name for name in readers_of_one if name not in known]
        for reader in readers_of_one:
            if reader in known and reader != one.name:
                owners[reader].append(one.name)
    readers: dict[str, list[str]] = {name: [] for name in known}
    for name in sorted(valid):
        for owner in owners[name][:MAX_READS_FROM]:
            readers[owner].append(name)
    granted = []
    for one in resolved:
        reads = tuple(owners[one.name][:MAX_READS_FROM]) if one.tenant is not None else ()
        with_grants = replace(one, reads_from=reads, readers=tuple(readers[one.name]))
        granted.append(_with_grant_problems(with_grants, unknown[one.name], owners[one.name][MAX_READS_FROM:]))
    return tuple(granted)


def _with_grant_problems(one: ResolvedTenant, unknown: Sequence[str], beyond: Sequence[str]) -> ResolvedTenant:
    """Add the problems of grants. `unknown`: readers that do not exist; `beyond`: owners over the limit of `one`."""
    messages = []
    if unknown:
        messages.append(f"these readers are no KVCacheTenants of this pool: {summarize(unknown, _MAX_NAMED)}")
    if beyond and one.tenant is not None:
        messages.append(
            f"a tenant reads from at most {MAX_READS_FROM} others: this one does not read from "
            f"{summarize(beyond, _MAX_NAMED)}"
        )
    if not messages:
        return one
    problem = Reason.READER_NOT_FOUND if unknown else Reason.TOO_MANY_GRANTS
    reason = problem if one.reason is Reason.ACCEPTED else one.reason
    return replace(one, reason=reason, message="; ".join([one.message] * bool(one.message) + messages))


def to_configs(resolved: Iterable[ResolvedTenant], pool: PoolSpec) -> tuple[TenantConfig, ...]:
    """The tenants of pool.json; settings that a tenant leaves out are the pool's."""
    quota, ttl = pool.tenancy.default_quota.capacity, pool.cache.ttl
    resolved = tuple(resolved)
    ids = {one.name: one.tenant.id for one in resolved if one.tenant is not None}
    configs = []
    for one in resolved:
        if one.tenant is None:
            continue
        spec = one.tenant.spec
        configs.append(
            TenantConfig(
                name=one.name,
                id=one.tenant.id,
                namespaces=one.namespaces,
                quota_bytes=to_bytes(_or(spec.quota.capacity, quota)),
                shared_quota_bytes=to_bytes(_or(spec.quota.shared_capacity, quota)),
                idle_ttl_s=-(-to_ms(str(_or(spec.ttl.idle, ttl.idle))) // 1000),
                max_age_s=-(-to_ms(str(_or(spec.ttl.max_age, ttl.max_age))) // 1000),
                priority=spec.priority,
                hints_share_percent=spec.hints.share,
                reads_from=tuple(ids[name] for name in one.reads_from),
            )
        )
    return tuple(sorted(configs, key=lambda tenant: tenant.id))


def tenant_status(
    one: ResolvedTenant,
    pool: PoolSpec,
    reports: Sequence[SidecarStatus],
    config_digest: str,
    pool_secret: str,
    now: str,
) -> Manifest:
    """The status of one tenant. `config_digest`: of the configuration that includes this state of the tenant."""
    tag = tenant_tag(pool_secret.encode(), one.tenant.id).hex() if one.tenant is not None and pool_secret else ""
    uses = [report.tenants[tag] for report in reports if tag in report.tenants]
    shared = max((report.shared_tenants[tag] for report in reports if tag in report.shared_tenants), default=None)
    accepted = one.reason is Reason.ACCEPTED
    message = one.message or f"the tenant has {len(one.namespaces)} namespaces"
    subject = _EnforcedInput(one, pool, reports, config_digest)
    return _status(
        one.raw,
        {
            "Accepted": Verdict("True" if accepted else "False", one.reason, message),
            "Enforced": first_verdict(ENFORCED, subject),
        },
        now,
        member_count=len(one.namespaces),
        members=list(one.namespaces[:MAX_SHOWN]),
        reads_from=list(one.reads_from),
        readers=list(one.readers[:MAX_SHOWN]),
        tag=tag,
        used=TenantUsage(
            nodes=format_bytes(sum(use.used_bytes for use in uses)),
            blocks=sum(use.blocks for use in uses),
            shared="" if shared is None else format_bytes(shared),
            evicted_over_quota=sum(use.over_quota for use in uses),
        ),
    )


def orphan_status(raw: Manifest, pool: str, now: str) -> Manifest:
    """The status of a tenant whose pool does not exist."""
    verdict = Verdict.false(Reason.POOL_NOT_FOUND, f"KVCachePool {pool} does not exist in this namespace")
    return _status(raw, dict.fromkeys(TENANT_CONDITIONS, verdict), now)


@dataclass(frozen=True)
class _EnforcedInput:
    """Everything that the checks of Enforced read."""

    one: ResolvedTenant
    pool: PoolSpec
    reports: Sequence[SidecarStatus]
    config_digest: str

    @property
    def applied(self) -> int:
        """Number of sidecars that run the configuration."""
        return sum(report.config == self.config_digest for report in self.reports)


def no_members(i: _EnforcedInput) -> Verdict | None:
    if i.one.tenant is not None:
        return None
    return Verdict.false(i.one.reason, "the tenant has no members, so there is nothing to enforce")


def pool_paused(i: _EnforcedInput) -> Verdict | None:
    if i.pool.mode != "Paused":
        return None
    return Verdict.unknown(Reason.PAUSED, "the pool is paused: changes have no effect yet")


def status_unavailable(i: _EnforcedInput) -> Verdict | None:
    if i.reports:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported the configuration that it runs")


def rolling_out(i: _EnforcedInput) -> Verdict | None:
    if i.applied == len(i.reports):
        return None
    return Verdict.false(Reason.ROLLING_OUT, f"{i.applied} of {len(i.reports)} nodes apply this tenant's spec")


def applied(i: _EnforcedInput) -> Verdict:
    spec = i.one.tenant.spec if i.one.tenant is not None else None
    has_limits = spec is not None and bool(spec.quota.shared_capacity or spec.ttl.idle or spec.ttl.max_age)
    in_object_store = has_limits and any(tier.object_store for tier in i.pool.tiers)
    caveat = "; in the object store the tenant has no quota, and the pool's ttl applies" if in_object_store else ""
    return Verdict.true(Reason.APPLIED, f"{i.applied} nodes apply this tenant's spec{caveat}")


ENFORCED: Final = (no_members, pool_paused, status_unavailable, rolling_out, applied)


def _status(raw: Manifest, verdicts: Mapping[str, Verdict], now: str, **fields: Any) -> Manifest:
    generation = int(raw["metadata"].get("generation", 0))
    conditions = with_verdicts((raw.get("status") or {}).get("conditions"), verdicts, generation, now)
    known = [Condition.model_validate(c) for c in conditions if c["type"] in TENANT_CONDITIONS]
    return TenantStatus(observed_generation=generation, conditions=known, **fields).dump()


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
