"""Grafana dashboards of the chart in compact form; `python charts/dashboards.py --write` generates the JSON files."""

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
    "Cache effect",
    (
        "Hit rate",
        "percentunit",
        [
            (
                f"sum by (namespace, pool) (rate(kvpool_client_lookup_hit_tokens_total{{{_HERE}}}[$__rate_interval])) "
                f"/ sum by (namespace, pool) (rate(kvpool_client_lookup_tokens_total{{{_HERE}}}[$__rate_interval]))",
                "{{namespace}}/{{pool}}",
            )
        ],
        "Tokens that lookups found, divided by tokens that engines requested.",
    ),
    (
        "Hit rate by model",
        "percentunit",
        [
            (
                f"sum by (model) (rate(kvpool_client_lookup_hit_tokens_total{{{_HERE}}}[$__rate_interval])) "
                f"/ sum by (model) (rate(kvpool_client_lookup_tokens_total{{{_HERE}}}[$__rate_interval]))",
                "{{model}}",
            )
        ],
        "The same for each model. other: models above the limit of 32, and engines that report no name.",
    ),
    (
        "Tokens not found by reason",
        "ops",
        [
            (
                f"sum by (reason) (rate(kvpool_client_lookup_miss_tokens_total{{{_HERE}}}[$__rate_interval]))",
                "{{reason}}",
            )
        ],
        "By the reason of the first missing block of each request.",
    ),
    (
        "Blocks found before a prefix broke",
        "ops",
        [(f"sum by (depth) (rate(kvpool_client_broken_lookups_total{{{_HERE}}}[$__rate_interval]))", "{{depth}}")],
        "start: engines that hash differently, or new prompts. Deeper: evicted blocks, or new ends of known prompts.",
    ),
    (
        "Load success rate",
        "percentunit",
        [
            (
                f"sum by (namespace, pool) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval])) / "
                f"(sum by (namespace, pool) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval])) + "
                f"sum by (namespace, pool) (rate(kvpool_client_misses_total{{{_HERE}}}[$__rate_interval])))",
                "{{namespace}}/{{pool}}",
            )
        ],
        "Share of the blocks that engines loaded, of those that they tried to load after a lookup had found them.",
    ),
    (
        "Hits by tier",
        "ops",
        [(f"sum by (tier) (rate(kvpool_client_hit_blocks_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "local: drive of the node. peer: drive of another node. shared: shared tier.",
    ),
    (
        "Failed loads by reason",
        "ops",
        [(f"sum by (reason) (rate(kvpool_client_misses_total{{{_HERE}}}[$__rate_interval]))", "{{reason}}")],
        "Blocks. Each costs no more than a miss.",
    ),
    (
        "Tokens not computed",
        "ops",
        [(f"sum by (tier) (rate(kvpool_client_tokens_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "Tokens per second whose KV cache came from the pool, as counted by the vLLM plug-in.",
    ),
    (
        "Bytes loaded",
        "Bps",
        [(f"sum by (tier) (rate(kvpool_client_bytes_total{{{_HERE}}}[$__rate_interval]))", "{{tier}}")],
        "Payload bytes that engines loaded and verified.",
    ),
    "Latency and queues",
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
        "From the start of a load until its last block of the tier was in the engine's buffer.",
    ),
    (
        "Sidecar responses, p99",
        "s",
        [
            (
                f"histogram_quantile(0.99, sum by (op, le) "
                f"(rate(kvpool_sidecar_request_seconds_bucket{{{_HERE}}}[$__rate_interval])))",
                "{{op}}",
            )
        ],
        "Without the transfer of the payload.",
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
        "Stores run in the background of the engine.",
    ),
    (
        "Queued requests",
        "short",
        [
            (f"sum by (node) (kvpool_sidecar_queued_{what}{{{_HERE}}})", f"{{{{node}}}} {what}")
            for what in ("reads", "writes", "peer_reads")
        ],
        "Requests that wait because the bytes in flight are at their limit.",
    ),
    (
        "Refused requests",
        "ops",
        [(f"sum by (reason) (rate(kvpool_sidecar_refused_total{{{_HERE}}}[$__rate_interval]))", "{{reason}}")],
        "Requests, connections and writes.",
    ),
    "Nodes",
    (
        "Use of the local tier",
        "percentunit",
        [(f"kvpool_sidecar_used_bytes{{{_HERE}}} / (kvpool_sidecar_capacity_bytes{{{_HERE}}} > 0)", "{{node}}")],
        "A cache that has run for a while is full.",
    ),
    (
        "Evicted blocks by cause",
        "ops",
        [(f"sum by (cause) (rate(kvpool_sidecar_evicted_blocks_total{{{_HERE}}}[$__rate_interval]))", "{{cause}}")],
        "capacity, space: evicted to free space. quota: a tenant exceeded its share. expired: maximum age.",
    ),
    (
        "Corrupt blocks and drive errors",
        "short",
        [
            (
                "sum by (node, event) (increase(kvpool_sidecar_drive_events_total"
                f'{{{_HERE},event=~"quarantined|io_error"}}[1h]))',
                "{{node}} {{event}}",
            )
        ],
        "Per hour. No engine received a corrupt block.",
    ),
    (
        "Drive writes per day",
        "short",
        [(f"kvpool_sidecar_drive_writes_per_day{{{_HERE}}}", "{{node}} {{drive}}")],
        "How often the whole size of a drive is written per day. Drives for general use are rated for about 1.",
    ),
    (
        "Dirty bytes",
        "bytes",
        [(f"kvpool_sidecar_shared_dirty_bytes{{{_HERE}}}", "{{node}}")],
        "Not yet copied to the shared tier; lost if the node is lost.",
    ),
    (
        "Open circuit breakers",
        "short",
        [(f"kvpool_sidecar_breaker_open{{{_HERE}}}", "{{node}} {{part}}")],
        "1 while a dependency is not called after repeated failures.",
    ),
    (
        "Blocks missing in the index",
        "short",
        [(f"kvpool_sidecar_blocks{{{_HERE}}} - kvpool_sidecar_index_announced_blocks{{{_HERE}}}", "{{node}}")],
        "Only their own node can find them.",
    ),
    (
        "Peers",
        "short",
        [
            (f"sum by (node) (kvpool_sidecar_peers_{state}{{{_HERE}}})", f"{{{{node}}}} {state}")
            for state in ("reachable", "unreachable")
        ],
        "By the last probe, which reads over a new data connection. Blocks of unreachable peers are recomputed.",
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
        "notInjected: created while no webhook answered. outdated: injected by another version. silent: not connected.",
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
        "Engine pods evicted for injection",
        "short",
        [("sum by (outcome) (increase(kvpool_operator_pod_restarts_total[1h]))", "{{outcome}}")],
        "Per hour, by outcome.",
    ),
    (
        "Finished operations on nodes",
        "short",
        [("sum by (result) (increase(kvpool_sidecar_operations_total[1h]))", "{{result}}")],
        "Per hour: purge, verify, warm and others.",
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
        "Review duration, p99",
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
        "Time until certificates expire",
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
