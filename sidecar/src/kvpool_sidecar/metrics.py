"""/metrics: the counters of kvpool_sidecar.stats and a few gauges in the words of Prometheus.

======================================== ===================================================================
kvpool_sidecar_requests_total            {op} requests of clients; kvpool_sidecar_request_seconds_total: their time
kvpool_sidecar_lookup_blocks_total       {result} blocks asked for in lookups, and found
kvpool_sidecar_opened_blocks_total       {tier} blocks handed out; `miss`: asked for and not there
kvpool_client_blocks_total               {tier} blocks that clients loaded and verified; kvpool_client_bytes_total
kvpool_client_misses_total               {reason} blocks that clients did not get
kvpool_sidecar_stored_total              {what} blocks and bytes stored
kvpool_sidecar_rejected_total            {reason} written blocks that were not accepted
kvpool_sidecar_refused_total             {reason} requests, connections and writes turned away
kvpool_sidecar_events_total              {event} evicted, quarantined, junk, io_error, writers_given_up
kvpool_sidecar_copies_total              {result} copies to the shared tier
kvpool_sidecar_shared_swept_total        {reason} blocks and files removed from the shared tier, and
                                         kvpool_sidecar_shared_swept_bytes_total
kvpool_sidecar_shared_touches_total      {result} shared blocks whose time of last use was noted
kvpool_sidecar_shared_tenant_bytes       {tenant} bytes in the shared tier, by the tag of the tenant's blocks; told by
                                         the node that sweeps alone
kvpool_sidecar_peer_total                {what} blocks and bytes sent to peers, and asked for in vain
kvpool_sidecar_peer_errors_total         {reason} peers that could not be reached
kvpool_sidecar_prefetch_total            {result} blocks and bytes read ahead after lookups; of these blocks `used` were
                                         loaded and `unused` not; `cached` were in memory already; `late`, `busy`,
                                         `dropped` were passed over
kvpool_sidecar_warm_up_total             {result} blocks and bytes copied from peers after joining; `corrupt`,
                                         `missing`, `refused` were not
kvpool_sidecar_compression_total         {what} blocks compressed, incompressible and decompressed; raw-bytes became
                                         stored-bytes
kvpool_sidecar_operations_total          {result} operations of the operator that ended, as in purge-succeeded
kvpool_sidecar_reports_total             {result} blocks that clients reported corrupt
kvpool_events_total                      {event} published to routers: stored, removed, cleared; batches, and replays
                                         of them; kvpool_events_lost_total: {reason} what was not
kvpool_events_prefix_queries_total       {result} questions of routers; kvpool_events_waiting, _known: see /status
kvpool_sidecar_capacity_bytes ... _index_connected   gauges, see /status
======================================== ===================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from kvpool_sidecar.status import StatusReport

__all__ = ["Metrics"]

_COUNTERS = (
    ("requests", "kvpool_sidecar_requests", "op", "Requests of clients."),
    ("request_seconds", "kvpool_sidecar_request_seconds", "op", "Seconds spent answering them."),
    ("lookup", "kvpool_sidecar_lookup_blocks", "result", "Blocks asked for in lookups, and found."),
    ("served", "kvpool_sidecar_opened_blocks", "tier", "Blocks handed out by tier; miss: asked for and not there."),
    ("client_hits", "kvpool_client_blocks", "tier", "Blocks that clients loaded and verified."),
    ("client_bytes", "kvpool_client_bytes", "tier", "Payload bytes that clients loaded and verified."),
    ("client_misses", "kvpool_client_misses", "reason", "Blocks that clients asked for and did not get."),
    ("stored", "kvpool_sidecar_stored", "what", "Blocks and bytes stored."),
    ("rejected", "kvpool_sidecar_rejected", "reason", "Written blocks that were not accepted."),
    ("operations", "kvpool_sidecar_operations", "result", "Operations of the operator that ended."),
    ("refused", "kvpool_sidecar_refused", "reason", "Requests, connections and writes turned away."),
    ("events", "kvpool_sidecar_events", "event", "Evictions, quarantined blocks, junk, errors of drives."),
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
    ("compression", "kvpool_sidecar_compression", "what", "Blocks and bytes compressed for the shared tier."),
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


_KV_EVENTS = {
    "next": "Number of the next batch of events.",
    "remembered": "Batches that can be replayed.",
    "waiting": "Events and blocks that are still to be published.",
    "known": "Blocks whose names in their engines are known.",
}


class Metrics(Collector):
    """A registry of its own: nothing of the interpreter or of other libraries gets in."""

    def __init__(self, report: StatusReport) -> None:
        self._report = report
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._report()
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(f"kvpool_sidecar_{name}", text, value=float(value(status)))
        for name, n in status.get("kv_events", {}).items():
            yield GaugeMetricFamily(f"kvpool_events_{name}", _KV_EVENTS[name], value=float(n))
        tenants = GaugeMetricFamily(
            "kvpool_sidecar_shared_tenant_bytes", "Bytes of a tenant's blocks in the shared tier.", labels=["tenant"]
        )
        if _sweep(status, "holder"):
            for tenant, size in sorted(status["shared"]["sweep"]["tenants"].items()):
                tenants.add_metric([tenant], size)
        yield tenants
        for family, name, label, text in _COUNTERS:
            metric = CounterMetricFamily(name, text, labels=[label])
            for item, n in sorted(self._report.stats.family(family).items()):
                metric.add_metric([item], n)
            yield metric
