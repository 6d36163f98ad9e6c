"""The operator's own numbers, and the server for probes and metrics on the pod's own address."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpool_operator.runtime.pool_metrics import PoolMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


__all__ = ["OperatorMetrics", "serve_admin"]


class OperatorMetrics:
    """Prometheus metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "kvpool_operator_reconcile_total", "Passes over a pool, by result.", ["result"], registry=self.registry
        )
        self.seconds = Histogram(
            "kvpool_operator_reconcile_seconds",
            "Seconds of one pass over a pool.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.queued = Gauge("kvpool_operator_queue_length", "Pools waiting for a pass.", registry=self.registry)
        self.pools = Gauge("kvpool_operator_pools", "KVCachePools in the cluster.", registry=self.registry)
        self.leader = Gauge("kvpool_operator_leader", "1 while this process holds the Lease.", registry=self.registry)
        self.restarts = Counter(
            "kvpool_operator_pod_restarts_total",
            "Evictions of engine pods by the watchdog, by what came of them.",
            ["outcome"],
            registry=self.registry,
        )
        self.deaf = Gauge(
            "kvpool_operator_watch_deaf_seconds",
            "For how long listings have had what the watch did not tell.",
            registry=self.registry,
        )
        self.status = PoolMetrics()
        self.registry.register(self.status)
        self.listed = Gauge(
            "kvpool_operator_last_list_timestamp_seconds", "When the pools were last listed.", registry=self.registry
        )


@contextlib.asynccontextmanager
async def serve_admin(
    address: str, port: int, metrics: OperatorMetrics, healthy: Callable[[], str]
) -> AsyncIterator[None]:
    """/healthz, /readyz and /metrics. `healthy` answers what is wrong, or nothing."""

    async def health(_: web.Request) -> web.Response:
        wrong = healthy()
        return web.Response(status=503 if wrong else 200, text=f"{wrong or 'ok'}\n")

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
