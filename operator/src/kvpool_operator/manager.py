"""`kvpool-operator run`: one process, from its settings to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvpool_operator import watches
from kvpool_operator.api.node import NODE_KIND
from kvpool_operator.api.operation import KIND as OPERATION
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.errors import OperatorError
from kvpool_operator.informers import Informers
from kvpool_operator.issuing.issuer import LeafIssuer
from kvpool_operator.issuing.root_store import load_root
from kvpool_operator.issuing.server import IssuingServer, serve_issuer
from kvpool_operator.k8s.leader_election import FencedClient, Lease
from kvpool_operator.k8s.rest import open_api_client
from kvpool_operator.nodes.reconciler import NodeReconciler
from kvpool_operator.observe.observer import Observer, ObserverConfig
from kvpool_operator.observe.unlabeled_pods import INTERVAL_S as UNLABELED_INTERVAL_S
from kvpool_operator.observe.unlabeled_pods import AllEnginePods, UnlabeledPods
from kvpool_operator.operations.reconciler import OperationReconciler
from kvpool_operator.pools.config_push import ConfigPusher
from kvpool_operator.pools.orphaned_pods import OrphanedPods
from kvpool_operator.pools.reconciler import PoolDependencies, PoolReconciler
from kvpool_operator.runtime.controller import Controller, ControllerOptions
from kvpool_operator.runtime.metrics import OperatorMetrics, serve_admin
from kvpool_operator.runtime.watch_staleness import WatchStaleness
from kvpool_operator.settings import read_settings
from kvpool_operator.sidecars.admin_client import open_admin_client
from kvpool_operator.sidecars.status_client import open_status_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.k8s.rest import RestClient
    from kvpool_operator.observe.observer import Listers
    from kvpool_operator.pki.authority_root import AuthorityRoot
    from kvpool_operator.settings import OperatorSettings
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["main", "run"]

log = logging.getLogger(__name__)

OPERATION_WORKERS: Final = 4


@dataclass(frozen=True)
class _Clients:
    """Connections that live as long as the process."""

    api: RestClient
    sidecar_statuses: StatusClient
    sidecar_admin: SidecarAdminClient
    root: AuthorityRoot


async def run(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT (0), or until the Lease is lost or a task fails (1)."""
    stop = asyncio.Event()
    _on_signals(stop)
    metrics = OperatorMetrics()
    leading: list[Controller] = []

    def health_problem() -> str:
        return leading[0].health_problem if leading else ""

    async with (
        serve_admin(settings.address, settings.admin_port, metrics, health_problem),
        open_api_client(namespaces=settings.namespaces) as api,
        open_status_client() as scraper,
        open_admin_client() as commands,
    ):
        loading = asyncio.ensure_future(_until_root(api, settings))
        if not await _unless(stop, loading):
            return 0
        clients = _Clients(api, scraper, commands, loading.result())
        issuing = IssuingServer(LeafIssuer(api, clients.root), metrics)
        async with serve_issuer(settings.address, settings.issuer_port, clients.root, issuing):
            lease = Lease(
                api, settings.namespace, settings.leader_election_id, settings.identity, lease_s=settings.lease_s
            )
            if not await _unless(stop, _until_leading(api, lease)):
                return 0
            metrics.leader.set(1)
            try:
                return await _lead(settings, clients, lease, metrics, stop, leading)
            finally:
                metrics.leader.set(0)
                await lease.release()


async def _until_root(api: ApiClient, settings: OperatorSettings) -> AuthorityRoot:
    """Read or create the root of the pools' CAs, as soon as the API server answers."""
    is_logged = False
    while True:
        try:
            return await load_root(api, settings.namespace, settings.authority_secret)
        except OperatorError as e:
            if not is_logged:
                log.warning("waiting for the root of the CAs: %s", e)
                is_logged = True
            await asyncio.sleep(2)


async def _until_leading(api: ApiClient, lease: Lease) -> None:
    """Wait for the CRDs, without which nothing can be watched, and for the Lease."""
    is_logged = False
    while True:
        try:
            for kind in (KIND, OPERATION, NODE_KIND, TENANT_KIND):
                await api.list(kind)
            break
        except OperatorError as e:
            if not is_logged:
                log.warning("waiting for the API server and the CRDs: %s", e)
                is_logged = True
            await asyncio.sleep(2)
    await lease.acquire()


async def _lead(
    settings: OperatorSettings,
    clients: _Clients,
    lease: Lease,
    metrics: OperatorMetrics,
    stop: asyncio.Event,
    leading: list[Controller],
) -> int:
    fenced = FencedClient(clients.api, lease)
    informers = Informers(
        clients.api,
        idle_timeout_s=settings.watch_idle_timeout_s,
        nfs=settings.env.limits.nfs,
        namespaces=settings.namespaces,
    )
    staleness = WatchStaleness()
    unlabeled = UnlabeledPods(
        fenced,
        informers.listers.namespaces,
        settings.namespaces,
        min(UNLABELED_INTERVAL_S, settings.resync_period_s),
    )
    engine_pods = AllEnginePods(informers.listers.engine_pods, unlabeled)
    listers = replace(informers.listers, engine_pods=engine_pods)
    pools, operations = _controllers(settings, clients, fenced, informers, listers, staleness, metrics)
    leading.append(pools)
    watching = asyncio.Event()

    async def work(controller: Controller) -> None:
        await informers.wait_synced()  # before that, existing objects look missing
        await controller.work()

    orphans = OrphanedPods(
        fenced, informers.listers.engine_pods, lambda: pools.listed_keys, metrics, settings.namespaces
    )

    async def report_orphans() -> None:
        await informers.wait_synced()
        await orphans.run()

    async def list_unlabeled() -> None:
        await informers.wait_synced()
        await unlabeled.run()

    parts = [
        asyncio.create_task(lease.renew_loop(), name="lease"),
        asyncio.create_task(informers.run(pools), name="informers"),
        asyncio.create_task(pools.resync_loop(), name="pool resync"),
        asyncio.create_task(operations.resync_loop(), name="operation resync"),
        asyncio.create_task(report_orphans(), name="orphaned pods"),
        *([asyncio.create_task(list_unlabeled(), name="unlabeled pods")] if settings.injection != "Policy" else []),
        *(asyncio.create_task(work(pools), name=f"pool worker {i}") for i in range(settings.max_concurrent_reconciles)),
        *(asyncio.create_task(work(operations), name=f"operation worker {i}") for i in range(OPERATION_WORKERS)),
    ]
    stopping = asyncio.create_task(stop.wait(), name="stop")
    # last: when kopf ends, it cancels every task that was created after its start
    watched = watches.run(
        pools,
        operations.enqueue,
        stop,
        watching,
        namespaces=settings.namespaces,
        idle_timeout_s=settings.watch_idle_timeout_s,
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
        await lease.release()  # before kopf, which ends slowly
        await asyncio.wait([events], timeout=5)


def _controllers(
    settings: OperatorSettings,
    clients: _Clients,
    fenced: FencedClient,
    informers: Informers,
    listers: Listers,
    staleness: WatchStaleness,
    metrics: OperatorMetrics,
) -> tuple[Controller, Controller]:
    """Controllers of pools and of operations."""
    observer = Observer(
        fenced,
        clients.sidecar_statuses,
        listers,
        ObserverConfig(
            sidecar_image=settings.env.sidecar_image,
            namespace=settings.namespace,
            webhook="" if settings.injection == "Policy" else settings.webhook,
        ),
    )
    pool_reconciler = PoolReconciler(
        PoolDependencies(
            fenced,
            observer,
            settings.env,
            nodes=NodeReconciler(fenced, informers.nodes, clients.sidecar_admin),
            config_pusher=ConfigPusher(clients.sidecar_admin),
            root=clients.root,
            record_own_write=staleness.record_own_write,
        )
    )
    operation_reconciler = OperationReconciler(
        fenced, clients.sidecar_admin, clients.sidecar_statuses, root=clients.root
    )
    period_s = settings.resync_period_s
    background = max(1, settings.max_concurrent_reconciles // 3)
    return (
        Controller(
            fenced,
            pool_reconciler,
            metrics,
            ControllerOptions(period_s, background=background),
            watch_staleness=staleness,
        ),
        Controller(fenced, operation_reconciler, metrics, ControllerOptions(period_s, OPERATION)),
    )


async def _unless(stop: asyncio.Event, work: Awaitable[object]) -> bool:
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
    """kopf installs signal handlers when it starts: replace them, so that the Lease is released first."""
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
