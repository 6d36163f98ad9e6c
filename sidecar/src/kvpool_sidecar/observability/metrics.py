"""/metrics: the counters of kvpool_sidecar.counters and a few gauges in the words of Prometheus.

What there is stands in docs/reference/metrics.md, which is made from these tables. No tenant is told of unless that
is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvpool.stats import BUCKETS_S, STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from kvpool_sidecar.observability.status import StatusReport

__all__ = ["Metrics", "reference"]

_COUNTERS = (
    ("requests", "kvpool_sidecar_requests", "op", "Requests of clients."),
    ("lookup", "kvpool_sidecar_lookup_blocks", "result", "Blocks asked for in lookups, and found."),
    ("served", "kvpool_sidecar_opened_blocks", "tier", "Blocks handed out by tier; miss: asked for and not there."),
    ("client_hits", "kvpool_client_blocks", "tier", "Blocks that clients loaded and verified."),
    ("client_bytes", "kvpool_client_bytes", "tier", "Payload bytes that clients loaded and verified."),
    (
        "client_tokens",
        "kvpool_client_tokens",
        "tier",
        "Tokens that engines need not compute, as vLLM's plug-in counts.",
    ),
    ("client_misses", "kvpool_client_misses", "reason", "Blocks that clients asked for and did not get."),
    ("stored", "kvpool_sidecar_stored", "what", "Blocks and bytes stored."),
    ("rejected", "kvpool_sidecar_rejected", "reason", "Written blocks that were not accepted."),
    ("operations", "kvpool_sidecar_operations", "result", "Operations of the operator that ended."),
    ("refused", "kvpool_sidecar_refused", "reason", "Requests, connections and writes turned away."),
    (
        "evictions",
        "kvpool_sidecar_evicted_blocks",
        "cause",
        "Blocks that went: capacity of the tier, space on its file system, quota of a tenant, expired.",
    ),
    ("events", "kvpool_sidecar_events", "event", "Blocks evicted and quarantined, junk, errors of drives."),
    ("copies", "kvpool_sidecar_copies", "result", "Copies to the shared tier."),
    ("swept", "kvpool_sidecar_shared_swept", "reason", "Blocks and files removed from the shared tier."),
    ("swept_bytes", "kvpool_sidecar_shared_swept_bytes", "reason", "Bytes removed from the shared tier."),
    ("touches", "kvpool_sidecar_shared_touches", "result", "Shared blocks whose time of last use was noted."),
    ("peer_served", "kvpool_sidecar_peer", "what", "Blocks and bytes sent to peers, and asked for in vain."),
    ("peer_errors", "kvpool_sidecar_peer_errors", "reason", "Peers that could not be reached."),
    (
        "prefetch",
        "kvpool_sidecar_prefetch",
        "result",
        "Blocks and bytes read ahead after lookups, and what came of it.",
    ),
    ("warm_up", "kvpool_sidecar_warm_up", "result", "Blocks and bytes copied from peers after joining."),
    ("evacuated", "kvpool_sidecar_evacuated", "result", "Blocks and bytes moved away while the node is drained."),
    ("adopted", "kvpool_sidecar_adopted", "result", "Blocks and bytes taken over from nodes that are drained."),
    ("compression", "kvpool_sidecar_compression", "what", "Blocks and bytes compressed for the shared tier."),
    ("rdma", "kvpool_sidecar_rdma", "result", "Blocks read from peers by RDMA, and why others were not."),
    ("reports", "kvpool_sidecar_reports", "result", "Blocks that clients reported as corrupt."),
    ("kv_events", "kvpool_events", "event", "Events published to routers, batches of them, and replays."),
    ("kv_events_lost", "kvpool_events_lost", "reason", "Blocks and events that routers were not told of."),
    ("prefix_queries", "kvpool_events_prefix_queries", "result", "Questions of routers how far nodes have a prompt."),
)


def _sweep(status: dict[str, Any], what: str) -> float:
    return float(status["shared"].get("sweep", {}).get(what, 0))


_GAUGES: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("ready", "1 if the sidecar serves.", lambda s: s["ready"]),
    ("capacity_bytes", "Most bytes that blocks may take on this node.", lambda s: s["capacity_bytes"]),
    ("used_bytes", "Bytes that blocks take on this node.", lambda s: s["used_bytes"]),
    ("pinned_bytes", "Bytes of pinned blocks, which go last.", lambda s: s["pinned_bytes"]),
    ("blocks", "Blocks on this node.", lambda s: s["blocks"]),
    ("clients", "Open connections of clients.", lambda s: s["clients"]),
    ("pods", "Pods that are served.", lambda s: s["pods"]),
    ("index_connected", "1 if the index answers.", lambda s: s["index"]["connected"]),
    ("index_announced_blocks", "Blocks that the index has been told of.", lambda s: s["index"]["announced"]),
    (
        "peer_certificate_seconds_left",
        "Until this node's certificate runs out.",
        lambda s: s["peers"]["certificate_seconds_left"],
    ),
    ("waiting_reads", "Loads that wait for their turn.", lambda s: s["admission"]["reads"]["waiting"]),
    ("waiting_writes", "Stores that wait for their turn.", lambda s: s["admission"]["writes"]["waiting"]),
    ("waiting_peer_reads", "Blocks for peers that wait for their turn.", lambda s: s["admission"]["peers"]["waiting"]),
    ("granted_read_bytes", "Bytes of the loads under way.", lambda s: s["admission"]["reads"]["granted_bytes"]),
    ("granted_write_bytes", "Bytes of the stores under way.", lambda s: s["admission"]["writes"]["granted_bytes"]),
    ("shared_available", "1 if the shared tier answers.", lambda s: s["shared"]["available"]),
    ("shared_sweep_holder", "1 if this node sweeps the shared tier.", lambda s: _sweep(s, "holder")),
    ("shared_sweep_seconds", "What the last sweep of the shared tier took.", lambda s: _sweep(s, "last_seconds")),
    ("shared_used_bytes", "Bytes that blocks take in the shared tier.", lambda s: _sweep(s, "used_bytes")),
    ("shared_blocks", "Blocks in the shared tier.", lambda s: _sweep(s, "blocks")),
    ("shared_waiting_copies", "Blocks that wait to be copied to the shared tier.", lambda s: s["shared"]["waiting"]),
    ("shared_waiting_bytes", "Their payload, in bytes.", lambda s: s["shared"]["dirty_bytes"]),
)


_HISTOGRAMS = (
    (
        "kvpool_sidecar_request_seconds",
        "op",
        "Seconds from a client's request to the sidecar's answer; the payload is read afterwards.",
    ),
    (
        "kvpool_client_load_seconds",
        "tier",
        "Seconds from a load's begin until its last block of that tier was in the engine's buffer, verified.",
    ),
    ("kvpool_client_store_seconds", "", "Seconds of a store of one or more new blocks, until they were accepted."),
)
_BREAKER = "1 while that part is treated as absent after repeated failures: index, shared."
_TENANT_BYTES = (
    "Bytes of a tenant's blocks in the shared tier, by the tag of its blocks. Told by the node that sweeps, and only "
    "where metrics by tenant are asked for."
)
_KV_EVENTS = {
    "next": "Number of the next batch of events.",
    "remembered": "Batches that can be replayed.",
    "waiting": "Events and blocks that are still to be published.",
    "known": "Blocks whose names in their engines are known.",
}


class Metrics(Collector):
    """A registry of its own: nothing of the interpreter or of other libraries gets in."""

    def __init__(self, report: StatusReport, *, tenant_labels: bool = False) -> None:
        self._report = report
        self._tenant_labels = tenant_labels
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status, stats = self._report(), self._report.stats
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(f"kvpool_sidecar_{name}", text, value=float(value(status)))
        for name, n in status.get("kv_events", {}).items():
            yield GaugeMetricFamily(f"kvpool_events_{name}", _KV_EVENTS[name], value=float(n))
        breakers = GaugeMetricFamily("kvpool_sidecar_breaker_open", _BREAKER, labels=["part"])
        for part, is_open in status["breakers"].items():
            breakers.add_metric([part], float(is_open))
        yield breakers
        tenants = GaugeMetricFamily("kvpool_sidecar_shared_tenant_bytes", _TENANT_BYTES, labels=["tenant"])
        if self._tenant_labels and _sweep(status, "holder"):
            for tenant, size in sorted(status["shared"]["sweep"]["tenants"].items()):
                tenants.add_metric([tenant], size)
        yield tenants
        for family, name, label, text in _COUNTERS:
            metric = CounterMetricFamily(name, text, labels=[label])
            for item, n in sorted(stats.family(family).items()):
                metric.add_metric([item], n)
            yield metric
        loads = stats.histograms("client_seconds")
        stores = {STORE: loads.pop(STORE)} if STORE in loads else {}
        for (name, label, text), found in zip(
            _HISTOGRAMS, (stats.histograms("request_seconds"), loads, stores), strict=True
        ):
            yield _histogram(name, label, text, found)


def reference() -> list[tuple[str, str, str, str]]:
    """Name, type, label (may be empty) and meaning of every metric."""
    found = [(f"kvpool_sidecar_{name}", "gauge", "", text) for name, text, _ in _GAUGES]
    found += [(f"kvpool_events_{name}", "gauge", "", text) for name, text in _KV_EVENTS.items()]
    found.append(("kvpool_sidecar_breaker_open", "gauge", "part", _BREAKER))
    found.append(("kvpool_sidecar_shared_tenant_bytes", "gauge", "tenant", _TENANT_BYTES))
    found += [(f"{name}_total", "counter", label, text) for _, name, label, text in _COUNTERS]
    found += [(name, "histogram", label, text) for name, label, text in _HISTOGRAMS]
    return sorted(found)


def _histogram(name: str, label: str, text: str, found: dict[str, list[int]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=[label] if label else [])
    for item, packed in sorted(found.items()):
        family.add_metric([item] if label else [], _buckets(packed[:-1]), packed[-1] / 1e6)
    return family


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus wants how many took at most so long."""
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    return [(bound, float(sum(counts[: n + 1]))) for n, bound in enumerate(bounds)]
