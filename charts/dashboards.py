"""Grafana dashboards of the chart, in short: `python charts/dashboards.py --write` makes what Grafana reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "kvpool" / "files" / "dashboards"
_HERE = 'namespace=~"$namespace",pool=~"$pool"'
_SOURCE = {"type": "prometheus", "uid": "${source}"}

# title, unit, [(query, legend)], description; a string between them begins a row
POOLS: list[Any] = [
    "What the pool is worth",
    (
        "Hit rate",
        "percentunit",
        [
            (
                f"sum by (namespace, pool) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval])) / "
                f"(sum by (namespace, pool) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval])) + "
                f"sum by (namespace, pool) (rate(kvpool_client_misses_total{{{_HERE}}}[$__rate_interval])))",
                "{{namespace}}/{{pool}}",
            )
        ],
        "Of the blocks that engines asked for, those that they got.",
    ),
    (
        "Hits by tier",
        "ops",
        [(f"sum by (tier) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "local: the node's own drive. peer: another node's. shared: the shared tier.",
    ),
    (
        "Misses by reason",
        "ops",
        [(f"sum by (reason) (rate(kvpool_client_misses_total{{{_HERE}}}[$__rate_interval]))", "{{reason}}")],
        "absent: nobody has the block. Everything else is a failure or an overload, and cost no more than a miss.",
    ),
    (
        "Tokens not computed",
        "ops",
        [(f"sum by (tier) (rate(kvpool_client_tokens_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "Tokens a second whose KV came from the pool, as vLLM's plug-in counts them.",
    ),
    (
        "Bytes loaded",
        "Bps",
        [(f"sum by (tier) (rate(kvpool_client_bytes_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "Payload that engines loaded and verified.",
    ),
    "Waiting",
    (
        "Loads, p50 and p99",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (tier, le) "
                f"(rate(kvpool_client_load_seconds_bucket{{{_HERE}}}[$__rate_interval])))",
                f"{{{{tier}}}} p{p}",
            )
            for q, p in ((0.5, 50), (0.99, 99))
        ],
        "From a load's begin until its last block of that tier was in the engine's buffer.",
    ),
    (
        "Answers of sidecars, p99",
        "s",
        [
            (
                f"histogram_quantile(0.99, sum by (op, le) "
                f"(rate(kvpool_sidecar_request_seconds_bucket{{{_HERE}}}[$__rate_interval])))",
                "{{op}}",
            )
        ],
        "Without the payload, which is read afterwards.",
    ),
    (
        "Stores, p99",
        "s",
        [
            (
                f"histogram_quantile(0.99, sum by (le) "
                f"(rate(kvpool_client_store_seconds_bucket{{{_HERE}}}[$__rate_interval])))",
                "store",
            )
        ],
        "In the background of the engine.",
    ),
    (
        "Waiting for their turn",
        "short",
        [
            (f"sum by (node) (kvpool_sidecar_queued_{what}{{{_HERE}}})", f"{{{{node}}}} {what}")
            for what in ("reads", "writes", "peer_reads")
        ],
        "Requests that wait because the node's drives have enough to do.",
    ),
    (
        "Turned away",
        "ops",
        [(f"sum by (reason) (rate(kvpool_sidecar_refused_total{{{_HERE}}}[$__rate_interval]))", "{{reason}}")],
        "Requests, connections and writes.",
    ),
    "Nodes",
    (
        "Use of the local tier",
        "percentunit",
        [(f"kvpool_sidecar_used_bytes{{{_HERE}}} / (kvpool_sidecar_capacity_bytes{{{_HERE}}} > 0)", "{{node}}")],
        "A cache is full when it has run for a while.",
    ),
    (
        "Blocks that went, by cause",
        "ops",
        [(f"sum by (cause) (rate(kvpool_sidecar_evicted_blocks_total{{{_HERE}}}[$__rate_interval]))", "{{cause}}")],
        "capacity and space: evicted to make room. quota: a tenant had more than its share. expired: by age.",
    ),
    (
        "Corruption and errors of drives",
        "short",
        [
            (
                "sum by (node, event) (increase(kvpool_sidecar_drive_events_total"
                f'{{{_HERE},event=~"quarantined|io_error"}}[1h]))',
                "{{node}} {{event}}",
            )
        ],
        "In an hour. No engine was given a bad block.",
    ),
    (
        "Waiting for the shared tier",
        "bytes",
        [(f"kvpool_sidecar_shared_dirty_bytes{{{_HERE}}}", "{{node}}")],
        "What would be lost with the node.",
    ),
    (
        "Treated as absent",
        "short",
        [(f"kvpool_sidecar_breaker_open{{{_HERE}}}", "{{node}} {{part}}")],
        "1 while a part is not asked after repeated failures.",
    ),
    (
        "Blocks that the index does not know",
        "short",
        [(f"kvpool_sidecar_blocks{{{_HERE}}} - kvpool_sidecar_index_announced_blocks{{{_HERE}}}", "{{node}}")],
        "They are found on their own node only.",
    ),
    (
        "Sent to peers",
        "Bps",
        [(f"sum by (node) (rate(kvpool_sidecar_peer_sent_bytes_total{{{_HERE}}}[$__rate_interval]))", "{{node}}")],
        "Bytes of blocks.",
    ),
]

OPERATOR: list[Any] = [
    "Pools",
    (
        "Conditions",
        "short",
        [(f"kvpool_pool_condition{{{_HERE}}}", "{{namespace}}/{{pool}} {{type}}")],
        "1: True.",
    ),
    (
        "Nodes",
        "short",
        [(f"sum by (namespace, pool, state) (kvpool_pool_nodes{{{_HERE}}})", "{{namespace}}/{{pool}} {{state}}")],
        "",
    ),
    (
        "Engine pods",
        "short",
        [(f"sum by (namespace, pool, state) (kvpool_pool_pods{{{_HERE}}})", "{{namespace}}/{{pool}} {{state}}")],
        "notInjected: created while no webhook answered. outdated: injected by another version.",
    ),
    "Operator",
    (
        "Reconciles",
        "ops",
        [
            (
                "sum by (controller, result) (rate(kvpool_operator_reconcile_total[$__rate_interval]))",
                "{{controller}} {{result}}",
            )
        ],
        "",
    ),
    (
        "Reconcile time",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (le) "
                "(rate(kvpool_operator_reconcile_time_seconds_bucket[$__rate_interval])))",
                f"p{p}",
            )
            for q, p in ((0.5, 50), (0.95, 95))
        ],
        "",
    ),
    (
        "Work queue and pools",
        "short",
        [("sum(kvpool_operator_workqueue_depth)", "waiting"), ("max(kvpool_operator_pools)", "pools")],
        "",
    ),
    (
        "Engine pods made again by the watchdog",
        "short",
        [("sum by (outcome) (increase(kvpool_operator_pod_restarts_total[1h]))", "{{outcome}}")],
        "In an hour, by what came of it.",
    ),
    (
        "Operations on nodes that ended",
        "short",
        [("sum by (result) (increase(kvpool_sidecar_operations_total[1h]))", "{{controller}} {{result}}")],
        "In an hour: purge, verify, warm and the like.",
    ),
    ("Leaders", "short", [("sum(kvpool_operator_leader)", "leaders")], "One."),
    "Webhook",
    (
        "Reviews",
        "ops",
        [("sum by (outcome) (rate(kvpool_webhook_reviews_total[$__rate_interval]))", "{{outcome}}")],
        "",
    ),
    (
        "Time of a review, p99",
        "s",
        [
            (
                "histogram_quantile(0.99, sum by (le) (rate(kvpool_webhook_review_seconds_bucket[$__rate_interval])))",
                "p99",
            )
        ],
        "",
    ),
    (
        "Certificates end in",
        "s",
        [
            ("kvpool_webhook_certificate_expiry_timestamp_seconds - time()", "{{pod}}"),
            (
                "min by (namespace, pool) "
                f"(kvpool_sidecar_peer_certificate_expiry_timestamp_seconds{{{_HERE}}}) - time()",
                "{{pool}} sidecars",
            ),
        ],
        "",
    ),
]


def dashboard(name: str, title: str, panels: list[Any]) -> dict[str, Any]:
    """Grafana's JSON of one dashboard: three panels side by side."""
    made: list[dict[str, Any]] = []
    y = x = 0
    for number, panel in enumerate(panels, 1):
        if isinstance(panel, str):
            y, x = y + (8 if x else 0), 0
            place = {"h": 1, "w": 24, "x": 0, "y": y}
            made.append(
                {"id": number, "type": "row", "title": panel, "gridPos": place, "collapsed": False, "panels": []}
            )
            y += 1
            continue
        heading, unit, queries, text = panel
        targets = [
            {"refId": chr(65 + n), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for n, (query, legend) in enumerate(queries)
        ]
        made.append(
            {
                "id": number,
                "type": "timeseries",
                "title": heading,
                "description": text,
                "datasource": _SOURCE,
                "gridPos": {"h": 8, "w": 8, "x": x, "y": y},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
        x += 8
        if x == 24:
            y, x = y + 8, 0
    return {
        "uid": f"kvpool-{name}",
        "title": title,
        "tags": ["kvpool"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": made,
    }


def _variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": "source", "type": "datasource", "query": "prometheus"}]
    for name, query in (
        ("namespace", "label_values(kvpool_pool_condition, namespace)"),
        ("pool", 'label_values(kvpool_pool_condition{namespace=~"$namespace"}, pool)'),
    ):
        found.append(
            {
                "name": name,
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": name},
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
            }
        )
    return found


def files() -> dict[str, str]:
    """Name of each file and its text."""
    made = {
        "pools": dashboard("pools", "KVPool: pools and nodes", POOLS),
        "operator": dashboard("operator", "KVPool: operator and webhook", OPERATOR),
    }
    return {f"{name}.json": json.dumps(content, indent=1) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python charts/dashboards.py --write")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file_name, text in files().items():
        (FOLDER / file_name).write_text(text)
