"""Lifecycle of the storage server: builds its parts, starts them in order, and stops them in reverse order."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

from kvpool_sidecar.app.client_parts import build_clients
from kvpool_sidecar.app.config_reload import ConfigReloader
from kvpool_sidecar.app.context import AppContext
from kvpool_sidecar.app.http_parts import build_http
from kvpool_sidecar.app.maintenance import DriveMaintenance, SharedMaintenance
from kvpool_sidecar.app.network_parts import build_network
from kvpool_sidecar.app.storage_parts import build_storage
from kvpool_sidecar.app.takeover import POLL_INTERVAL_S, TakeoverWatch, await_ownership
from kvpool_sidecar.blocks.events import BlockEvents
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.events.feed import EventFeed
from kvpool_sidecar.resilience.fair_queue import FairQueues
from kvpool_sidecar.serving.config_holder import ConfigHolder
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.lookup_figures import LookupFigures

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.app.context import Component
    from kvpool_sidecar.settings import ServeSettings

__all__ = ["SidecarApp", "serve"]

log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 5.0  # with the 2 s for open requests within the pod's grace period of 10 s
_SWITCH_INTERVAL_S = 0.001  # longest time that one tenant's computation keeps another's request from starting


class SidecarApp:
    """All parts of one `serve` process. The constructor opens and binds (ConfigError, OSError); `start` serves."""

    def __init__(self, settings: ServeSettings) -> None:
        self._serving = False
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup:
            context = _context(settings, cleanup)
            self._storage = build_storage(context)
            self._network = build_network(context, self._storage)
            self._clients = build_clients(context, self._storage, self._network)
            self._reloader = ConfigReloader(settings.config_file, settings.config, context.config.replace)
            self._http = build_http(
                context, self._storage, self._network, self._clients, self._reloader, lambda: self._serving
            )
            self._maintenance = self._build_maintenance(context)
            self._cleanup = cleanup.pop_all()

    def _build_maintenance(self, context: AppContext) -> list[Component]:
        drives = DriveMaintenance(self._storage.local)
        context.cleanup.callback(drives.stop)
        if self._storage.shared is None:
            return [drives]
        # each query costs money in an object store, so published blocks are checked in a directory only
        feed = context.feed if context.config.current.fsspec is None else None
        shared = SharedMaintenance(self._storage.shared, feed)
        context.cleanup.callback(shared.stop)
        return [drives, shared]

    def components(self) -> list[Component]:
        """Return the parts in the order of their start; the HTTP servers follow them."""
        warm_up = self._network.warm_up
        return [
            self._storage.local,
            *self._network.components(),
            *self._clients.background(),
            *self._storage.components(),
            *([warm_up] if warm_up is not None else []),
            *self._maintenance,
            *self._clients.frontends(),
            self._reloader,
        ]

    def start(self) -> None:
        """Start all parts; does not block."""
        for component in self.components():
            component.start()
        self._serving = True  # before the first probe is answered
        for server in self._http.components():
            server.start()

    def stop(self, *, hand_over: bool = False) -> None:
        """Flush dirty blocks (WriteBack: at most 5 s), let requests finish (2 s), release the lease, and close.

        `hand_over`: another sidecar takes the drives over, and finds the dirty blocks there.
        """
        if self._storage.write_back is not None and not hand_over:
            self._storage.write_back.flush(_FLUSH_TIMEOUT_S)
        if self._clients.handoff is not None and hand_over:
            self._clients.handoff.release_sockets()
        self._serving = False
        self._reloader.stop()
        self._cleanup.close()


def _context(settings: ServeSettings, cleanup: contextlib.ExitStack) -> AppContext:
    stats = Stats()
    return AppContext(
        settings=settings,
        config=ConfigHolder(settings.secret, settings.config),
        stats=stats,
        events=BlockEvents(),
        feed=(
            EventFeed(stats, tokens_of=settings.config.events.prompt_tokens_of)
            if settings.config.events.enabled
            else None
        ),
        queues=FairQueues(len(settings.config.local)),
        fingerprints=Fingerprints(),
        lookups=LookupFigures(per_tenant=settings.metrics_per_tenant),
        cleanup=cleanup,
    )


def serve(read_settings: Callable[[], ServeSettings]) -> int:
    """Run until SIGTERM or SIGINT and return 0. A second signal ends the process immediately.

    ConfigError or OSError at start. The settings are read again when the drives are taken back after a handover.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # SIGIO reports a broken file lease, and would end the process
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    _raise_descriptor_limit()
    done = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if done.is_set():
            os._exit(128 + number)
        done.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    back = False
    while not done.is_set():
        _serve_once(read_settings(), done, back=back)
        back = True
    return 0


def _serve_once(settings: ServeSettings, done: threading.Event, *, back: bool) -> None:
    """Serve until `done`, or until another sidecar of this node takes the drives over (settings.allow_takeover)."""
    ownership = await_ownership(settings, done, back=back) if settings.allow_takeover else None
    if settings.allow_takeover and ownership is None:
        return
    try:
        app = SidecarApp(settings)
        app.start()
    finally:
        if ownership is not None:
            ownership.close()
    config = settings.config
    log.info("serving pool %s/%s on node %s at %s", config.namespace, config.pool, settings.node, settings.address)
    successor = TakeoverWatch(settings)
    while not done.wait(POLL_INTERVAL_S if settings.allow_takeover else 1.0) and not successor.is_requested:
        pass
    log.info("stopping" if done.is_set() else "handing the drives over to another sidecar")
    app.stop(hand_over=not done.is_set())
    successor.close()


def _raise_descriptor_limit() -> None:
    """Raise the soft limit: descriptors in flight count against it too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
