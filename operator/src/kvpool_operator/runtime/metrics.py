"""Prometheus metrics of the operator, and the HTTP server for probes and metrics on the pod's IP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpool_operator.runtime.pool_metrics import PoolMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


__all__ = ["EVICTION_OUTCOMES", "OperatorMetrics", "serve_admin"]

EVICTION_OUTCOMES: Final = ("evicted", "held", "gone", "refused", "failed")


class OperatorMetrics:
    """Prometheus metrics of one process. The label `controller` is the reconciled kind in lower case."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.reconciles = Counter(
            "kvpool_operator_reconcile_total",
            "Reconciles, by result: `ok` or the reason of the error.",
            ["controller", "result"],
            registry=registry,
        )
        self.reconcile_time = Histogram(
            "kvpool_operator_reconcile_time_seconds",
            "Duration of a reconcile.",
            ["controller"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.workqueue_depth = Gauge(
            "kvpool_operator_workqueue_depth", "Objects that wait for a reconcile.", ["controller"], registry=registry
        )
        self.pools = Gauge("kvpool_operator_pools", "KVCachePools in the cluster.", registry=registry)
        self.leader = Gauge("kvpool_operator_leader", "1 while this replica holds the Lease.", registry=registry)
        self.restarts = Counter(
            "kvpool_operator_pod_restarts_total",
            "Evictions of engine pods by the injection watchdog, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in EVICTION_OUTCOMES:  # the rate of a series that is not there is no number
            self.restarts.labels(outcome)
        self.orphaned_pods = Gauge(
            "kvpool_operator_orphaned_pods", "Opted-in pods that select a pool that does not exist.", registry=registry
        )
        self.leaves = Counter(
            "kvpool_operator_leaf_certificates_total",
            "Requests of sidecars for certificates, by outcome: issued, refused, busy, unavailable.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("issued", "refused", "busy", "unavailable"):
            self.leaves.labels(outcome)
        self.watch_stale = Gauge(
            "kvpool_operator_watch_stale_seconds",
            "Seconds since the watch of KVCachePools first missed a change that a list shows; 0 while it misses none.",
            registry=registry,
        )
        self.status = PoolMetrics()
        self.registry.register(self.status)
        self.last_list = Gauge(
            "kvpool_operator_last_list_timestamp_seconds", "Time of the last list of KVCachePools.", registry=registry
        )


@contextlib.asynccontextmanager
async def serve_admin(
    address: str, port: int, metrics: OperatorMetrics, health_problem: Callable[[], str]
) -> AsyncIterator[None]:
    """Serve /healthz, /readyz and /metrics. `health_problem` returns an empty string while the process is healthy."""

    async def health(_: web.Request) -> web.Response:
        problem = health_problem()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def show(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", health)
    app.router.add_get("/metrics", show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        yield
    finally:
        await runner.cleanup()
