"""The view of one pool: its status and its findings, computed from documents as the operator computes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.rights import missing_rights, of_operator
from kvpool_cli.errors import NotFoundError, UsageError
from kvpool_operator.api.conditions import find
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired import labels, names
from kvpool_operator.diagnosis import OF_CLUSTER, ClusterObjects, PoolFinding, diagnose
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.revision import revisions
from kvpool_operator.k8s import pods as podview
from kvpool_operator.k8s.client import ref
from kvpool_operator.k8s.selectors import matches
from kvpool_operator.observe.active_sidecar import active_sidecars
from kvpool_operator.observe.engine_connections import find_connections
from kvpool_operator.observe.engine_pods import count, find_orphans
from kvpool_operator.observe.snapshot import Snapshot, Webhook
from kvpool_operator.pools.conditions import ReconcileOutcome, evaluate_conditions
from kvpool_operator.pools.status import condition_input, make_status, observed
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.sidecars.status import SidecarStatus
from kvpool_operator.tenants.resolver import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_cli.cluster.documents import Documents
    from kvpool_operator.observe.fingerprints import FingerprintGroup


@dataclass(frozen=True)
class PoolState:
    """One pool as it is now."""

    key: str
    """namespace/name"""
    raw: dict[str, Any]
    snapshot: Snapshot
    status: dict[str, Any]
    """As the operator would write it from these documents; its own, if the spec is invalid."""
    findings: tuple[PoolFinding, ...]
    groups: tuple[FingerprintGroup, ...] = ()
    raw_statuses: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """`/status` of the sidecars by node."""
    missing_rights: tuple[str, ...] = ()
    """Rights without which the pool cannot be evaluated here; status and findings are then the operator's."""


def pool_keys(documents: Documents) -> list[str]:
    """Return all pools as namespace/name."""
    return sorted(f"{p['metadata']['namespace']}/{p['metadata']['name']}" for p in documents.of("pools"))


def choose(documents: Documents, wanted: str = "", namespace: str = "") -> list[str]:
    """Return the pools that `NAME` or `NAMESPACE/NAME` selects; all for an empty one. Raises NotFoundError."""
    keys = pool_keys(documents)
    if not wanted:
        chosen = [key for key in keys if not namespace or key.startswith(f"{namespace}/")]
        if not chosen:
            raise NotFoundError(f"there is no KVCachePool{f' in namespace {namespace}' if namespace else ''}")
        return chosen
    named = [key for key in keys if wanted in (key, key.partition("/")[2])]
    if not named:
        raise NotFoundError(f"there is no KVCachePool {wanted}; there are: {', '.join(keys) or 'none'}")
    here = [key for key in named if key.startswith(f"{namespace}/")]
    if len(named) > 1 and not here:
        raise UsageError(f"several pools are named {wanted}: write one of {', '.join(named)}")
    return (here or named)[:1]


def pool_state(documents: Documents, key: str) -> PoolState:
    """Evaluate one pool."""
    namespace, _, name = key.partition("/")
    raw = next(p for p in documents.of("pools") if p["metadata"]["namespace"] == namespace and _name(p) == name)
    live = raw.get("status") or {}
    try:
        pool = KVCachePool.parse(raw)
    except InvalidPoolError as e:
        finding = make(Code.INVALID_SPEC, f"KVCachePool {key}", str(e))
        return PoolState(key, raw, Snapshot(raw=raw), live, (finding,))
    missing = missing_rights(documents, namespace, name)
    now = datetime.fromtimestamp(documents.read_at, UTC)
    raw_by_address, snapshot = _snapshot(documents, pool, raw, now)
    outcome = _outcome(pool, live, documents, snapshot)
    subject = condition_input(pool, snapshot, outcome)
    verdicts = evaluate_conditions(subject)
    seen = observed(subject, verdicts, _cluster(documents, pool, raw))
    if missing:  # what was not read must not look like what is not there
        findings = of_operator(live, diagnose(seen, OF_CLUSTER), key, missing)
        return PoolState(key, raw, snapshot, live, findings, missing_rights=missing)
    findings = diagnose(seen)
    status = make_status(pool, snapshot, outcome, str(live.get("poolID") or ""), _rfc3339(now))
    by_node = {s.node: raw_by_address[s.address] for s in snapshot.sidecars if s.address in raw_by_address}
    return PoolState(key, raw, snapshot, status, findings, subject.fingerprint_groups, by_node)


def _snapshot(
    documents: Documents, pool: KVCachePool, raw: dict[str, Any], now: datetime
) -> tuple[dict[str, dict[str, Any]], Snapshot]:
    meta = pool.metadata
    mine = labels.selector(pool, "sidecar")
    pods = [p for p in documents.of("pool_pods") if _ours(p, meta.namespace, mine)]
    reports, raw_reports = {}, {}
    for pod in pods:
        answer = documents.statuses.get(f"{meta.namespace}/{_name(pod)}")
        address = podview.address(pod)
        if answer is not None and address:
            raw_reports[address] = answer["status"]
            reports[address] = SidecarStatus.parse(answer["status"], float(answer["received"]))
    sidecars = active_sidecars(pods, reports)
    objects = {ref(o): o for o in documents.of("owned") if _ours(o, meta.namespace, {"kvpool.dev/pool": meta.name})}
    daemonset = next((o for r, o in objects.items() if (r.kind, r.name) == ("DaemonSet", names.sidecar(meta.name))), {})
    engines = count(documents.of("engine_pods"), meta.namespace, meta.name, _image(daemonset), revisions(pool))
    tenants = [t for t in documents.of("tenants") if _belongs(t, meta.namespace, meta.name)]
    allowed = _allowed(pool, documents)
    index = find((raw.get("status") or {}).get("conditions") or [], "IndexReady") or {}
    return raw_reports, Snapshot(
        raw=raw,
        objects=objects,
        allowed_namespaces=allowed,
        external_problem=str(index.get("message")) if index.get("reason") == "InvalidIndexConfig" else "",
        sidecars=sidecars,
        tenants=resolve(tenants, _namespace_labels(documents), allowed),
        engines=engines,
        connections=find_connections(engines.pods, {s.node: s.report for s in sidecars}, now),
        webhook=Webhook(_webhook_problem(documents)),
        rejection=_rejection(daemonset, documents.of("events")),
    )


def _outcome(pool: KVCachePool, live: dict[str, Any], documents: Documents, snapshot: Snapshot) -> ReconcileOutcome:
    ready = find(live.get("conditions") or [], "Ready") or {}
    rejections = (str(ready.get("message")),) if ready.get("reason") == "Rejected" else ()
    digests = {s.report.config for s in snapshot.sidecars if s.report is not None and s.report.config}
    preflight = PreflightResult.from_status(pool.spec.preflight, live.get("preflight") or {})
    digest = digests.pop() if len(digests) == 1 else ""
    return ReconcileOutcome(rejections=rejections, preflight=preflight, config_digest=digest)


def _cluster(documents: Documents, pool: KVCachePool, raw: dict[str, Any]) -> ClusterObjects:
    pools = [(p["metadata"]["namespace"], _name(p)) for p in documents.of("pools")]
    orphans = [(pod.full_name, _wanted(text)) for pod, text in find_orphans(documents.of("engine_pods"), pools)]
    return ClusterObjects(
        workloads=tuple(documents.of("workloads")),
        events=tuple(documents.of("events")),
        limit_ranges=tuple(documents.of("limit_ranges")),
        network_policies=tuple(documents.of("network_policies")),
        nodes=tuple(documents.of("cluster_nodes")),
        pools=tuple(pool_keys(documents)),
        orphans=tuple(orphans),
        operator_problem=_operator_problem(documents, raw),
    )


def _wanted(text: str) -> str:
    return text.removeprefix("the pool ")


def _operator_problem(documents: Documents, raw: dict[str, Any]) -> str:
    operators = [d for d in documents.of("release") if _component(d) == "operator"]
    if operators and not any((d.get("status") or {}).get("availableReplicas") for d in operators):
        return f"Deployment {_full_name(operators[0])} has no available replica"
    generation, seen = raw["metadata"].get("generation", 0), (raw.get("status") or {}).get("observedGeneration", 0)
    if generation and seen < generation and not operators:
        return "the pool's spec has changed, its status has not, and no Deployment of the operator was found"
    return ""


def _webhook_problem(documents: Documents) -> str:
    """As `observe.observer` finds it. Without a Deployment of the webhook, the API server injects by a policy."""
    deployments = [d for d in documents.of("release") if _component(d) == "webhook"]
    if not deployments:
        return ""
    if not documents.of("webhooks"):
        is_unread = any(note.startswith("mutatingwebhookconfigurations") for note in documents.notes)
        return "" if is_unread else "the webhook is not installed"
    hooks = [h for configuration in documents.of("webhooks") for h in configuration.get("webhooks") or [{}]]
    if not all((h.get("clientConfig") or {}).get("caBundle") for h in hooks):
        return "the webhook has no certificate yet"
    if not any((d.get("status") or {}).get("availableReplicas") for d in deployments):
        return "no replica of the webhook is ready"
    return ""


def _rejection(daemonset: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    status = daemonset.get("status") or {}
    if status.get("currentNumberScheduled", 0) >= status.get("desiredNumberScheduled", 0):
        return ""
    uid = daemonset["metadata"].get("uid")
    about = [
        e for e in events if e.get("reason") == "FailedCreate" and (e.get("involvedObject") or {}).get("uid") == uid
    ]
    newest: dict[str, Any] = max(about, key=lambda e: str(e.get("lastTimestamp") or ""), default={})
    return str(newest.get("message", ""))[:500]


def _allowed(pool: KVCachePool, documents: Documents) -> tuple[str, ...]:
    allowed = pool.spec.injection.allowed_namespaces
    if allowed.from_ == "All":
        return ("*",)
    admitted = {pool.metadata.namespace}
    if allowed.selector is not None:
        if not documents.of("namespaces"):
            return ("*",)  # not readable: nothing is concluded
        selector = allowed.selector.model_dump(by_alias=True)
        admitted |= {name for name, found in _namespace_labels(documents).items() if matches(selector, found)}
    return tuple(sorted(admitted))


def _namespace_labels(documents: Documents) -> dict[str, dict[str, str]]:
    return {_name(n): n["metadata"].get("labels") or {} for n in documents.of("namespaces")}


def _belongs(tenant: dict[str, Any], namespace: str, pool: str) -> bool:
    same = tenant["metadata"].get("namespace") == namespace
    return same and ((tenant.get("spec") or {}).get("poolRef") or {}).get("name") == pool


def _ours(manifest: dict[str, Any], namespace: str, wanted: Mapping[str, str]) -> bool:
    metadata = manifest["metadata"]
    return metadata.get("namespace") == namespace and wanted.items() <= (metadata.get("labels") or {}).items()


def _image(daemonset: dict[str, Any]) -> str:
    containers = (((daemonset.get("spec") or {}).get("template") or {}).get("spec") or {}).get("containers") or []
    return next((str(c.get("image")) for c in containers if c.get("name") == "server"), "")


def _component(manifest: dict[str, Any]) -> str:
    return str((manifest["metadata"].get("labels") or {}).get("app.kubernetes.io/component") or "")


def _full_name(manifest: dict[str, Any]) -> str:
    return f"{manifest['metadata'].get('namespace')}/{_name(manifest)}"


def _name(manifest: dict[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


def _rfc3339(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
