"""Which namespaces are which tenant of a pool, who may read whose blocks, and what is said of it. Pure.

A namespace is of one tenant: where two claim it the older one has it (of two of one second, the first by name), so that
a tenant that comes later takes nobody's blocks and makes nobody lose theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvpool.config import MAX_READS_FROM, TenantConfig
from kvpool.protocol.keys import tenant_tag
from kvpool_operator.api.conditions import Condition, set_condition
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.quantity import format_bytes, to_bytes
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

_MOST_NAMED: Final = 3
_MOST_TENANTS: Final = 1024


@dataclass(frozen=True)
class ResolvedTenant:
    """One KVCacheTenant of a pool, and what it came to."""

    raw: Manifest
    tenant: KVCacheTenant | None
    """None: its spec cannot be understood, and it has no members."""
    namespaces: tuple[str, ...] = ()
    reason: str = "Accepted"
    """Accepted, or why not all of the spec can be had."""
    message: str = ""
    reads_from: tuple[str, ...] = ()
    """Names of the tenants whose blocks it may read."""
    readers: tuple[str, ...] = ()
    """Names of the tenants that may read its blocks."""

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])


def uses_selectors(tenants: Iterable[Manifest]) -> bool:
    """Does any of them choose its members by labels?"""
    return any(((raw.get("spec") or {}).get("members") or {}).get("selector") for raw in tenants)


def resolve(
    tenants: Sequence[Manifest], labels: Mapping[str, Mapping[str, str]], allowed: Sequence[str]
) -> tuple[ResolvedTenant, ...]:
    """What each KVCacheTenant of one pool comes to.

    `labels`: of each namespace of the cluster. `allowed`: namespaces that the pool serves, or `*`. Those that are being
    deleted have no members any more and are left out.
    """
    living = [raw for raw in tenants if "deletionTimestamp" not in raw["metadata"]]
    taken: dict[str, str] = {}
    settled = []
    for raw in sorted(living, key=lambda r: (str(r["metadata"].get("creationTimestamp")), r["metadata"]["name"])):
        try:
            tenant = KVCacheTenant.parse(raw)
        except InvalidPoolError as e:
            settled.append(
                ResolvedTenant(raw, None, (), "InvalidSpec", f"{e}; it has no members until the spec is right")
            )
            continue
        if len(settled) >= _MOST_TENANTS:
            told = f"a pool has at most {_MOST_TENANTS} tenants: this one has no members"
            settled.append(ResolvedTenant(raw, None, (), "TooManyTenants", told))
            continue
        settled.append(_resolve(raw, tenant, labels, allowed, taken))
        taken.update(dict.fromkeys(settled[-1].namespaces, tenant.metadata.name))
    return _with_grants(settled)


def _resolve(
    raw: Manifest,
    tenant: KVCacheTenant,
    labels: Mapping[str, Mapping[str, str]],
    allowed: Sequence[str],
    taken: Mapping[str, str],
) -> ResolvedTenant:
    members = tenant.spec.members
    wanted = set(members.namespaces)
    if members.selector is not None:
        selector = members.selector.model_dump(by_alias=True)
        wanted |= {name for name, has in labels.items() if matches(selector, has)}
    strangers = [] if "*" in allowed else sorted(wanted - set(allowed))
    conflicts = sorted((wanted & taken.keys()) - set(strangers))
    mine = tuple(sorted(wanted - set(strangers) - set(conflicts)))
    told = []
    if conflicts:
        claimed = [f"{name} (of {taken[name]})" for name in conflicts]
        told.append(f"of another, older tenant already, where they stay: {summarize(claimed, _MOST_NAMED)}")
    if strangers:
        told.append(f"not admitted by the pool's injection.allowedNamespaces: {summarize(strangers, _MOST_NAMED)}")
    reason = "NamespaceConflict" if conflicts else "NamespaceNotAllowed" if strangers else "Accepted"
    return ResolvedTenant(raw, tenant, mine, reason, "; ".join(told))


def _with_grants(settled: Sequence[ResolvedTenant]) -> tuple[ResolvedTenant, ...]:
    """The same, with who may read whom; `settled` has the oldest first, which are read first."""
    known = {one.name for one in settled}
    understood = [one.name for one in settled if one.tenant is not None]
    asked: dict[str, list[str]] = {name: [] for name in known}
    strangers: dict[str, list[str]] = {}
    for one in settled:
        wanted = one.tenant.spec.sharing.readers if one.tenant is not None else []
        named = understood if wanted == [EVERY_TENANT] else sorted(set(wanted))
        strangers[one.name] = [name for name in named if name not in known]
        for reader in named:
            if reader in known and reader != one.name:
                asked[reader].append(one.name)
    readers: dict[str, list[str]] = {name: [] for name in known}
    for name in sorted(understood):
        for owner in asked[name][:MAX_READS_FROM]:
            readers[owner].append(name)
    granted = []
    for one in settled:
        reads = tuple(asked[one.name][:MAX_READS_FROM]) if one.tenant is not None else ()
        its = replace(one, reads_from=reads, readers=tuple(readers[one.name]))
        granted.append(_with_grant_problems(its, strangers[one.name], asked[one.name][MAX_READS_FROM:]))
    return tuple(granted)


def _with_grant_problems(one: ResolvedTenant, strangers: Sequence[str], beyond: Sequence[str]) -> ResolvedTenant:
    """With what could not be had of the grants. `strangers`: readers that there are not; `beyond`: not read by it."""
    told = []
    if strangers:
        told.append(f"no KVCacheTenant of this pool, so they read nothing: {summarize(strangers, _MOST_NAMED)}")
    if beyond and one.tenant is not None:
        told.append(f"it reads at most {MAX_READS_FROM} tenants, and nothing of {summarize(beyond, _MOST_NAMED)}")
    if not told:
        return one
    worst = "ReaderNotFound" if strangers else "TooManyGrants"
    reason = worst if one.reason == "Accepted" else one.reason
    return replace(one, reason=reason, message="; ".join([one.message] * bool(one.message) + told))


def to_configs(settled: Iterable[ResolvedTenant], pool: PoolSpec) -> tuple[TenantConfig, ...]:
    """For `pool.json`; what a tenant leaves out is the pool's."""
    quota, ttl = pool.tenancy.default_quota.capacity, pool.cache.ttl
    settled = tuple(settled)
    ids = {one.name: one.tenant.id for one in settled if one.tenant is not None}
    found = []
    for one in settled:
        if one.tenant is None:
            continue
        spec = one.tenant.spec
        found.append(
            TenantConfig(
                name=one.name,
                id=one.tenant.id,
                namespaces=one.namespaces,
                quota_bytes=to_bytes(_or(spec.quota.capacity, quota)),
                shared_quota_bytes=to_bytes(_or(spec.quota.shared_capacity, quota)),
                idle_ttl_s=-(-to_ms(str(_or(spec.ttl.idle, ttl.idle))) // 1000),
                max_age_s=-(-to_ms(str(_or(spec.ttl.max_age, ttl.max_age))) // 1000),
                priority=spec.priority,
                reads_from=tuple(ids[name] for name in one.reads_from),
            )
        )
    return tuple(sorted(found, key=lambda tenant: tenant.id))


def tenant_status(
    one: ResolvedTenant,
    pool: PoolSpec,
    reports: Sequence[SidecarStatus],
    config_digest: str,
    pool_secret: str,
    now: str,
) -> Manifest:
    """The status of one tenant. `config_digest`: of the configuration in which it is as it is now."""
    tag = tenant_tag(pool_secret.encode(), one.tenant.id).hex() if one.tenant is not None and pool_secret else ""
    uses = [report.tenants[tag] for report in reports if tag in report.tenants]
    shared = max((report.shared_tenants[tag] for report in reports if tag in report.shared_tenants), default=None)
    accepted = one.reason == "Accepted"
    told = one.message or f"{len(one.namespaces)} namespaces are this tenant"
    return _status(
        one.raw,
        [
            Condition(type="Accepted", status="True" if accepted else "False", reason=one.reason, message=told[:1024]),
            _enforced(one, pool, reports, config_digest),
        ],
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
    """The status of a tenant whose pool there is not."""
    told = f"there is no KVCachePool {pool} in this namespace"
    missing = [
        Condition(type=kind, status="False", reason="PoolNotFound", message=told) for kind in ("Accepted", "Enforced")
    ]
    return _status(raw, missing, now)


def _enforced(one: ResolvedTenant, pool: PoolSpec, reports: Sequence[SidecarStatus], digest: str) -> Condition:
    def condition(status: Any, reason: str, message: str) -> Condition:
        return Condition(type="Enforced", status=status, reason=reason, message=message)

    if one.tenant is None:
        return condition("False", one.reason, "it has no members, so there is nothing to enforce")
    if pool.mode == "Paused":
        return condition("Unknown", "Paused", "the pool is paused: what is new here has no effect yet")
    if not reports:
        return condition("Unknown", "StatusUnavailable", "no sidecar has told yet which configuration it runs")
    there = sum(report.config == digest for report in reports)
    if there < len(reports):
        return condition("False", "RollingOut", f"{there} of {len(reports)} nodes keep to this tenant's spec")
    own = one.tenant.spec.quota.shared_capacity or one.tenant.spec.ttl.idle or one.tenant.spec.ttl.max_age
    beside = (
        "; in the object store it has no quota, and the pool's own ttl"
        if own and any(tier.object_store for tier in pool.tiers)
        else ""
    )
    return condition("True", "Applied", f"{there} nodes keep to this tenant's spec{beside}")


def _status(raw: Manifest, conditions: Sequence[Condition], now: str, **fields: Any) -> Manifest:
    generation = int(raw["metadata"].get("generation", 0))
    before = (raw.get("status") or {}).get("conditions")
    found = [c for c in before if isinstance(c, dict)] if isinstance(before, list) else []
    for condition in conditions:
        found = set_condition(found, condition.model_copy(update={"observed_generation": generation}), now)
    kept = [Condition.model_validate(c) for c in found if c["type"] in ("Accepted", "Enforced")]
    return TenantStatus(observed_generation=generation, conditions=kept, **fields).dump()


def _or(own: Any, pools: Any) -> Any:
    return pools if own is None else own
