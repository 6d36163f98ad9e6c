"""/metrics: exports the counters of kvpool_sidecar.counters and gauges of /status in the Prometheus text format.

docs/reference/metrics.md is generated from the catalog. Per-tenant series are opt-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvpool.stats import BUCKETS_S, STORE
from kvpool_sidecar.observability.catalog import (
    BREAKER_PARTS,
    COUNTERS,
    EVENT_GAUGES,
    GAUGES,
    HISTOGRAMS,
    LOOKUP_COUNTERS,
    gc_status,
    select,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.observability.catalog.families import Histogram
    from kvpool_sidecar.observability.status import StatusReport

__all__ = ["Metrics", "label_values", "reference"]

_BREAKER = ("kvpool_sidecar_breaker_open", "1 while the circuit breaker of a dependency is open after failures.")
_TENANT_BYTES = (
    "kvpool_sidecar_shared_tenant_bytes",
    "Bytes of a tenant's blocks in the shared tier, by the tag of its blocks. Reported by the node that runs the "
    "garbage collection, and only if per-tenant metrics are enabled.",
)
_HELD_BY_TENANT = (
    (
        "kvpool_sidecar_tenant_landing_bytes",
        "bytes",
        "Memory of a tenant's unfinished writes, by its tag; only if per-tenant metrics are enabled.",
    ),
    (
        "kvpool_sidecar_tenant_held_bytes",
        "held_bytes",
        "Bytes on the drives of removed blocks that a tenant's pods keep open, by its tag; only if per-tenant metrics "
        "are enabled.",
    ),
)

_DRIVES = (
    (
        "kvpool_sidecar_drive_written_bytes_total",
        "counter",
        "written_bytes",
        "Bytes of block files written to a local drive.",
    ),
    (
        "kvpool_sidecar_drive_size_bytes",
        "gauge",
        "size_bytes",
        "Size of the file system of a local tier.",
    ),
    (
        "kvpool_sidecar_drive_writes_per_day",
        "gauge",
        "writes_per_day",
        "How often the drive is written per day, by the blocks of the last 24 hours; of a shorter time, extrapolated.",
    ),
)


class Metrics(Collector):
    """Exporter with a registry of its own, which excludes the metrics of the interpreter and of libraries."""

    def __init__(self, report: StatusReport, *, per_tenant: bool = False) -> None:
        self._report = report
        self._per_tenant = per_tenant
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status, stats = self._report(), self._report.stats
        for gauge in GAUGES:
            yield GaugeMetricFamily(f"kvpool_sidecar_{gauge.name}", gauge.help, value=float(gauge.value(status)))
        if (events := status.get("kv_events")) is not None:
            for one in EVENT_GAUGES:
                yield GaugeMetricFamily(f"kvpool_events_{one.name}", one.help, value=float(events[one.key]))
        breakers = GaugeMetricFamily(*_BREAKER, labels=["part"])
        for part, is_open in status["breakers"].items():
            breakers.add_metric([part], float(is_open))
        yield breakers
        yield from _drives(status["endurance"])
        tenants = GaugeMetricFamily(*_TENANT_BYTES, labels=["tenant"])
        if self._per_tenant and gc_status(status, "holder"):
            for tenant, size in sorted(status["shared"]["sweep"]["tenants"].items()):
                tenants.add_metric([tenant], size)
        yield tenants
        for name, key, text in _HELD_BY_TENANT:
            family = GaugeMetricFamily(name, text, labels=["tenant"])
            for tenant, fields in status["landing"]["tenants"].items() if self._per_tenant else ():
                family.add_metric([tenant], fields[key])
            yield family
        yield from _counters(stats)
        yield from _lookups(status)
        yield from _histograms(stats)


def reference() -> list[tuple[str, str, str, str]]:
    """Return name, type, label (may be empty) and help text of every metric."""
    rows = [(f"kvpool_sidecar_{gauge.name}", "gauge", "", gauge.help) for gauge in GAUGES]
    rows += [(f"kvpool_events_{gauge.name}", "gauge", "", gauge.help) for gauge in EVENT_GAUGES]
    rows.append((_BREAKER[0], "gauge", "part", _BREAKER[1]))
    rows.append((_TENANT_BYTES[0], "gauge", "tenant", _TENANT_BYTES[1]))
    rows += [(name, "gauge", "tenant", text) for name, _, text in _HELD_BY_TENANT]
    rows += [(name, kind, "drive", text) for name, kind, _, text in _DRIVES]
    rows += [(f"{c.name}_total", "counter", c.label, c.help) for c in COUNTERS]
    rows += [(f"{c.name}_total", "counter", c.label, c.help) for c in LOOKUP_COUNTERS]
    rows += [(h.name, "histogram", h.label, h.help) for h in HISTOGRAMS]
    return sorted(rows)


def label_values() -> list[tuple[str, str, str, str]]:
    """Return metric, label, value and meaning of every label value that the code sets."""
    rows = [(_BREAKER[0], "part", value, text) for value, text in BREAKER_PARTS.items()]
    rows += [(f"{c.name}_total", c.label, value, text) for c in COUNTERS for value, text in c.values.items()]
    rows += [(f"{c.name}_total", c.label, value, text) for c in LOOKUP_COUNTERS for value, text in c.values.items()]
    rows += [(name, "drive", "TIER", "Name of the local tier.") for name, *_ in _DRIVES]
    rows += [(h.name, h.label, value, text) for h in HISTOGRAMS for value, text in h.values.items()]
    return sorted(rows)


def _drives(endurance: dict[str, dict[str, float]]) -> Iterator[Metric]:
    for name, kind, key, text in _DRIVES:
        make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        family = make(name.removesuffix("_total"), text, labels=["drive"])
        for drive, values in endurance.items():
            family.add_metric([drive], values[key])
        yield family


def _counters(stats: Stats) -> Iterator[Metric]:
    counts = {source: stats.family(source) for source in {c.source for c in COUNTERS}}
    for counter in COUNTERS:
        metric = CounterMetricFamily(counter.name, counter.help, labels=[counter.label] if counter.label else [])
        for value, n in sorted(select(counter, counts[counter.source]).items()):
            metric.add_metric([value] if counter.label else [], n)
        yield metric


def _lookups(status: dict[str, Any]) -> Iterator[Metric]:
    for counter in LOOKUP_COUNTERS:
        metric = CounterMetricFamily(counter.name, counter.help, labels=[counter.label] if counter.label else [])
        for value, n in sorted(counter.counts(status).items()):
            metric.add_metric([value] if counter.label else [], n)
        yield metric


def _histograms(stats: Stats) -> Iterator[Metric]:
    loads = stats.histograms("client_seconds")
    stores = {STORE: loads.pop(STORE)} if STORE in loads else {}
    sources = (stats.histograms("request_seconds"), loads, stores)
    for histogram, packed in zip(HISTOGRAMS, sources, strict=True):
        yield _histogram(histogram, packed)


def _histogram(histogram: Histogram, packed: dict[str, list[int]]) -> HistogramMetricFamily:
    labels = [histogram.label] if histogram.label else []
    family = HistogramMetricFamily(histogram.name, histogram.help, labels=labels)
    for value, counts in sorted(packed.items()):
        family.add_metric([value] if labels else [], _buckets(counts[:-1]), counts[-1] / 1e6)
    return family


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, as Prometheus expects them."""
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    return [(bound, float(sum(counts[: n + 1]))) for n, bound in enumerate(bounds)]
