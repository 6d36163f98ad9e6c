"""A pool with two nodes and two engines as documents of a cluster, and the diagnosis of what is changed in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from op_samples import pool
from op_status_samples import observed

from kvpool_operator.diagnosis import ClusterObjects, PoolFinding, diagnose
from kvpool_operator.observe.engine_connections import find_connections
from kvpool_operator.observe.engine_pods import count
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.conditions import ReconcileOutcome, evaluate_conditions
from kvpool_operator.pools.status import condition_input
from kvpool_operator.pools.status import observed as with_cluster
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.sidecars.status import SidecarStatus
from kvpool_operator.tenants.resolver import resolve

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

NOW = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
UNIX = int(NOW.timestamp())
FIELDS = {"model": "11aa22bb", "kv_dtype": "c1d20f00", "hash_seed": "5feceb66", "sizes.tp_size": "6b86b273"}


def status(node: str, *uids: str) -> Manifest:
    """`/status` of a healthy sidecar whose connected pods are `uids`."""
    window = {"tokensAsked": 100_000, "tokensFound": 80_000, "misses": {"never-stored": 20_000}}
    windows = [{"window": name, **window} for name in ("5m", "1h")]
    pods = [{"uid": uid, "connected": True, "seen": UNIX} for uid in uids]
    fingerprint = {"digest": "4be1", "engine": "vllm 0.33.0", "model": "llama", "bytes": 2**30, "fields": dict(FIELDS)}
    return {
        "node": node,
        "phase": "Serving",
        "ready": True,
        "time": UNIX,
        "uptime_seconds": 7200,
        "capacity_bytes": 10 * 2**30,
        "used_bytes": 2**30,
        "blocks": 32,
        "index": {"connected": True, "announced": 32, "full": False},
        "transport": "TCP",
        "cache": {"windows": windows, "models": [{"model": "llama", "windows": windows}]},
        "hits": {"local": 500, "peer": 300},
        "misses": {},
        "refused": {},
        "drives": {"nvme": "ok"},
        "reachability": {"peers": 1, "reachable": 1, "unreachable": 0, "unverified": 0, "rows": []},
        "fingerprints": [{**fingerprint, "connected": len(uids), "pods": pods, "tested": True}],
        "connected_pods": list(uids),
        "engine_problems": [],
        "tenants": {},
    }


def engine_pod(name: str, node: str, **annotations: str) -> Manifest:
    """A Ready engine pod of team-a that was injected an hour ago."""
    notes = {"kvpool.dev/pool": "kvpool-system/chat", "kvpool.dev/injected": "9f", "kvpool.dev/injected-engine": "vllm"}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T09:00:00Z"}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "uid": f"uid-{name}",
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": notes | annotations,
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [ready]},
    }


@dataclass
class World:
    """Documents, all healthy. A test changes them and calls `findings`."""

    statuses: dict[str, Manifest] = field(
        default_factory=lambda: {"node-0": status("node-0", "uid-x"), "node-1": status("node-1", "uid-y")}
    )
    pods: list[Manifest] = field(default_factory=lambda: [engine_pod("x", "node-0"), engine_pod("y", "node-1")])
    cluster: ClusterObjects = field(default_factory=ClusterObjects)
    snapshot: dict[str, Any] = field(default_factory=dict)
    tenants: list[Manifest] = field(default_factory=list)
    preflight: list[Manifest] = field(default_factory=list)
    silent_nodes: set[str] = field(default_factory=set)
    spec: dict[str, Any] = field(default_factory=dict)

    def set_fingerprint(self, node: str, **fields: str) -> None:
        """Give the engines of a node another fingerprint, whose fields differ in these."""
        fingerprint = self.statuses[node]["fingerprints"][0]
        fingerprint["digest"] = "77ab"
        fingerprint["fields"] = FIELDS | {name.replace("__", "."): digest for name, digest in fields.items()}

    def set_misses(self, node: str, **reasons: int) -> None:
        """Let lookups on a node miss for these reasons: tokens of the 100,000 that were requested."""
        for window in self.statuses[node]["cache"]["windows"]:
            window["misses"] = {reason.replace("_", "-"): n for reason, n in reasons.items()}
            window["tokensFound"] = window["tokensAsked"] - sum(reasons.values())

    def disconnect(self, node: str) -> None:
        """No engine of a node is connected."""
        self.statuses[node] |= {"connected_pods": [], "fingerprints": []}

    def findings(self) -> tuple[PoolFinding, ...]:
        """Diagnose what the documents show."""
        reports = {n: SidecarStatus.parse(raw, UNIX) for n, raw in self.statuses.items() if n not in self.silent_nodes}
        sidecars = tuple(Sidecar(node, True, "", reports.get(node)) for node in self.statuses)
        engines = count(self.pods, "kvpool-system", "chat", "", {})
        connections = find_connections(engines.pods, {s.node: s.report for s in sidecars}, NOW)
        seen = replace(
            observed(nodes=len(sidecars), ready=len(sidecars), updated=len(sidecars), sidecars=sidecars),
            engines=engines,
            connections=connections,
            tenants=resolve(self.tenants, {}, ("*",)),
            **self.snapshot,
        )
        preflight = {"spec": "1", "state": "Done", "nodes": 2, "passed": 2 - len(self.preflight)}
        kept = {**preflight, "failed": len(self.preflight), "findings": self.preflight}
        outcome = ReconcileOutcome(preflight=PreflightResult.from_status("Warn", kept))
        subject = condition_input(pool(**self.spec), seen, outcome)
        return diagnose(with_cluster(subject, evaluate_conditions(subject), self.cluster))
