"""`kvpool-operator run`: one process, from its settings to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from kvpool_operator import watches
from kvpool_operator.api.node import NODE_KIND
from kvpool_operator.api.operation import KIND as OPERATION
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.errors import OperatorError
from kvpool_operator.k8s.leader_election import FencedClient, Lease
from kvpool_operator.k8s.namespace_cache import Namespaces
from kvpool_operator.k8s.rest import open_api_client
from kvpool_operator.nodes.node_cache import NodeCache
from kvpool_operator.nodes.reconciler import NodeReconciler
from kvpool_operator.observe.observer import Observer
from kvpool_operator.operations.reconciler import OperationReconciler
from kvpool_operator.pools.config_push import ConfigPusher
from kvpool_operator.pools.reconciler import PoolDependencies, PoolReconciler
from kvpool_operator.runtime.controller import Controller
from kvpool_operator.runtime.metrics import OperatorMetrics, serve_admin
from kvpool_operator.settings import read_settings
from kvpool_operator.sidecars.admin_client import open_admin_client
from kvpool_operator.sidecars.status_client import open_status_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.settings import OperatorSettings
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["main", "run"]

log = logging.getLogger(__name__)

OPERATION_WORKERS: Final = 4
CACHE_TTL_FRACTION: Final = 0.8
"""Of the time between two looks at a pool that no event brings: each of those asks for everything."""


async def run(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT (0) or until the Lease is lost or a part fails (1)."""
    stop = asyncio.Event()
    _on_signals(stop)
    metrics = OperatorMetrics()
    leading: list[Controller] = []

    def healthy() -> str:
        return leading[0].health_problem if leading else ""

    async with (
        serve_admin(settings.address, settings.admin_port, metrics, healthy),
        open_api_client() as cluster,
        open_status_client() as scraper,
        open_admin_client() as commands,
    ):
        lease = Lease(cluster, settings.namespace, settings.lease, settings.identity, lease_s=settings.lease_s)
        if not await _unless(stop, _until_leading(cluster, lease)):
            return 0
        metrics.leader.set(1)
        try:
            return await _lead(settings, cluster, scraper, commands, lease, metrics, stop, leading)
        finally:
            metrics.leader.set(0)
            await lease.release()


async def _until_leading(cluster: ApiClient, lease: Lease) -> None:
    """Wait for the CRDs, without which nothing can be watched, and for the Lease."""
    told = False
    while True:
        try:
            await cluster.list(KIND)
            await cluster.list(OPERATION)
            await cluster.list(NODE_KIND)
            await cluster.list(TENANT_KIND)
            break
        except OperatorError as e:
            if not told:
                log.warning("waiting for the API and the CRD: %s", e)
                told = True
            await asyncio.sleep(2)
    await lease.acquire()


async def _lead(
    settings: OperatorSettings,
    cluster: ApiClient,
    scraper: StatusClient,
    commands: SidecarAdminClient,
    lease: Lease,
    metrics: OperatorMetrics,
    stop: asyncio.Event,
    leading: list[Controller],
) -> int:
    fenced = FencedClient(cluster, lease)
    namespaces = Namespaces()
    observer = Observer(
        fenced,
        scraper,
        sidecar_image=settings.env.sidecar_image,
        namespace=settings.namespace,
        webhook="" if settings.injection == "Policy" else settings.webhook,
        namespaces=namespaces,
        still_s=lambda: CACHE_TTL_FRACTION * controller.interval_s,
    )
    book = NodeCache()
    nodes = NodeReconciler(fenced, book, commands)
    reconciler = PoolReconciler(
        PoolDependencies(
            fenced,
            observer,
            settings.env,
            nodes=nodes,
            config_pusher=ConfigPusher(commands),
            record_own_write=lambda pool, version: controller.watch_staleness.record_own_write(pool, version),
        )
    )
    background = max(1, settings.workers // 3)
    controller = Controller(fenced, reconciler, metrics, refresh_s=settings.refresh_s, background=background)
    leading.append(controller)
    operations = Controller(
        fenced, OperationReconciler(fenced, commands, scraper), metrics, refresh_s=settings.refresh_s, kind=OPERATION
    )
    watching = asyncio.Event()
    parts = [asyncio.create_task(lease.renew_loop(), name="lease")]
    parts += [asyncio.create_task(controller.refresh(), name="refresh")]
    parts += [asyncio.create_task(controller.work(), name=f"worker {i}") for i in range(settings.workers)]
    parts += [asyncio.create_task(operations.refresh(), name="operations' refresh")]
    parts += [asyncio.create_task(operations.work(), name=f"operations' worker {i}") for i in range(OPERATION_WORKERS)]
    stopping = asyncio.create_task(stop.wait(), name="stop")
    # last: when kopf ends, it ends every task that was made after its start
    watched = watches.run(
        controller, book, namespaces, stop, watching, operation_changed=operations.enqueue, silence_s=settings.silence_s
    )
    events = asyncio.create_task(watched, name="events")
    started = asyncio.create_task(_after(watching, stop), name="signals")
    try:
        done, _ = await asyncio.wait([*parts, stopping, events], return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            if not part.cancelled() and part.exception() is not None:
                log.error("%s failed: %s", part.get_name(), part.exception())
        clean = stop.is_set() or (events in done and events.exception() is None)
        log.info("ending%s", "" if clean else f": {', '.join(sorted(p.get_name() for p in done))}")
        return 0 if clean else 1
    finally:
        stop.set()
        for part in (*parts, started):
            part.cancel()
        await asyncio.wait(parts, timeout=5)
        await lease.release()  # before kopf, which takes its time
        await asyncio.wait([events], timeout=5)


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Whether `work` was done before `stop` was set."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _after(watching: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf takes the signals when it starts; take them back, so that the Lease is released first."""
    await watching.wait()
    _on_signals(stop)


def _on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def main(argv: Sequence[str] | None = None) -> int:
    """`kvpool-operator run`: runs until SIGTERM or SIGINT."""
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    return asyncio.run(run(settings))
