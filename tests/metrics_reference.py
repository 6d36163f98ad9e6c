"""Generate docs/reference/metrics.md from the metrics of the programs: `python tests/metrics_reference.py --write`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_operator.runtime.metrics import OperatorMetrics
from kvpool_operator.webhook.metrics import WebhookMetrics
from kvpool_sidecar.observability import metrics as sidecar

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
Row = tuple[str, str, str, str]
"""Name, type, labels with commas between them, meaning."""

_HEAD = """# Metrics

Generated from the code by `make gen`.
Units are seconds and bytes; counters run since the process started.

The chart's `monitoring` values add scraping, alerts and two dashboards: see [Monitoring](../operate/monitoring.md).
With its PodMonitors, every metric of a sidecar also has the labels `namespace`, `pool` and `node`.

No metric names a tenant.
`sidecar.metrics.perTenant: true` of the chart adds the metrics with the label `tenant`.
Its value is a tag that only the pool's secret can map to a namespace.

The hit rate is `kvpool_client_lookup_hit_tokens_total` divided by `kvpool_client_lookup_tokens_total`
([Monitoring](../operate/monitoring.md#hit-rate)).
`kvpool_client_misses_total` counts failed loads instead.
"""


def rows(registry: CollectorRegistry) -> list[Row]:
    """What a registry would show."""
    found = []
    for collector in list(registry._collector_to_names):  # no public way to ask for labels that have no value yet
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            found.append((name, family.type, ", ".join(labels), family.documentation))
    return sorted(found)


def tables() -> dict[str, list[Row]]:
    """By program."""
    return {
        "Sidecars, and the clients in engines, which report to their sidecar (port 7422)": sidecar.reference(),
        "Operator (port 8080)": rows(OperatorMetrics().registry),
        "Webhook (port 8081)": rows(WebhookMetrics().registry),
    }


def labels_of() -> dict[str, set[str]]:
    """Every name that Prometheus would know, with its own labels."""
    found: dict[str, set[str]] = {}
    for table in tables().values():
        for name, kind, labels, _ in table:
            own = {label for label in labels.split(", ") if label}
            if kind == "histogram":
                found[f"{name}_bucket"] = own | {"le"}
                found[f"{name}_sum"] = found[f"{name}_count"] = own
            else:
                found[name] = own
    return found


def label_values() -> list[Row]:
    """Metric, label, value and meaning, for labels whose values the code sets."""
    return sidecar.label_values()


def page() -> str:
    """Return the text of docs/reference/metrics.md."""
    parts = [_HEAD]
    for title, table in tables().items():
        lines = [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in table]
        parts.append(
            "\n".join([f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|", *lines, ""])
        )
    lines = [f"| `{name}` | {label} | `{value}` | {text} |" for name, label, value, text in label_values()]
    head = ["## Label values of the sidecars' metrics\n", "| metric | label | value | meaning |", "|---|---|---|---|"]
    return "\n".join([*parts, "\n".join([*head, *lines, ""])])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/metrics_reference.py --write")
    PAGE.write_text(page())
