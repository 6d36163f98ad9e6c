"""The storage server: puts the parts together, starts and stops them in order."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import threading
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError, RefusedError
from kvpool.protocol import index_url, keys, wire
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.admin.operations import Operations
from kvpool_sidecar.admin.registry import OperationDeps, operation_handlers
from kvpool_sidecar.admin.server import AdminServer
from kvpool_sidecar.app.config_reload import ConfigReloader
from kvpool_sidecar.app.takeover import POLL_INTERVAL_S, TakeoverWatch, await_ownership
from kvpool_sidecar.blocks.events import (
    BlockEvents,
    BlockPromoted,
    BlockReplicated,
    BlocksEvicted,
    BlocksOpened,
    BlocksRemoved,
    BlockStored,
    BlockUnreplicated,
    DriveIncident,
    SharedBlocksAbsent,
)
from kvpool_sidecar.blocks.popularity import Popularity
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.events.feed import EventFeed, Locality
from kvpool_sidecar.events.prefix_api import PrefixApi
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.credentials import Passwords
from kvpool_sidecar.index.expiry import IndexExpiry
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.registration import IndexRegistration
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.observability.http import HealthServer
from kvpool_sidecar.observability.metrics import Metrics
from kvpool_sidecar.observability.status import StatusReport
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers import hottest
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.preconnect import Preconnector
from kvpool_sidecar.peers.rdma import factory as rdma
from kvpool_sidecar.peers.security import PeerSecurity
from kvpool_sidecar.peers.server import PeerServer
from kvpool_sidecar.preflight.run import PreflightSettings
from kvpool_sidecar.replication.drain_source import DrainSource
from kvpool_sidecar.replication.drain_target import DrainTarget
from kvpool_sidecar.replication.lookup_events import LookupEvents, LookupListener
from kvpool_sidecar.replication.prefetch import Prefetcher
from kvpool_sidecar.replication.verifier import BlockVerifier
from kvpool_sidecar.replication.warm_up import WarmUp
from kvpool_sidecar.replication.write_back import WriteBack
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.resilience.fair_queue import FairQueues
from kvpool_sidecar.serving.block_service import BlockService
from kvpool_sidecar.serving.config_holder import ConfigHolder
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.listener import PodListeners
from kvpool_sidecar.serving.locator import BlockLocator
from kvpool_sidecar.serving.opener import BlockOpener
from kvpool_sidecar.serving.pod_registry import PodRegistry
from kvpool_sidecar.serving.session import Session, SessionContext
from kvpool_sidecar.serving.socket_handoff import SocketHandoff
from kvpool_sidecar.shared_gc.controller import SharedGcController, create_controller
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.shared.factory import open_shared
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.system.unix_socket import listen_at
from kvpool_sidecar.tenancy.identity import Identity

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from kvpool.config import PoolConfig
    from kvpool_sidecar.blocks.popularity import PopularBlock
    from kvpool_sidecar.events.publisher import EventPublisher
    from kvpool_sidecar.index.base import Index
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.settings import ServeSettings
    from kvpool_sidecar.storage.local.drive import Drive

__all__ = ["SidecarApp", "serve"]

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 2.0
_SHARED_LOOKS = 32  # at blocks that routers were told to be on the shared tier, each time
_WATCH_DRIVES_S = 1.0
_DATA_REQUESTS = ("open", "begin")
_DRAIN_S = 2.0
_FLUSH_S = 5.0  # with the above within the pod's grace period of ten
_INDEX_THREADS, _INDEX_BACKLOG = 8, 64


class SidecarApp:
    """Everything of one `serve` process. Making it opens and binds (ConfigError, OSError); `start` serves."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._config = settings.config
        self._holder = ConfigHolder(settings.secret, settings.config)
        self._live = ConfigReloader(settings.config_file, settings.config, self._holder.replace)
        self._stats = Stats()
        self._fingerprints = Fingerprints()
        self._admission = FairQueues(len(self._config.local))
        self._stopping = threading.Event()
        self._serving = False
        self._handoff: SocketHandoff | None = None
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as made:
            self._open_tiers(made)
            self._open_network(made)
            self._open_clients(made)
            self._cleanup = made.pop_all()

    def _open_tiers(self, made: contextlib.ExitStack) -> None:
        config, settings = self._config, self._settings
        self._events = BlockEvents()
        self._feed = EventFeed(self._stats) if config.events.enabled else None
        read_paths = {tier.path: ro for tier in config.local if (ro := settings.read_path(tier.path)) is not None}
        self._local = open_local(
            config.local,
            config.cache,
            config.uid,
            tenants=self._holder.tenancy.local_limits,
            read_paths=read_paths,
            events=self._events,
            read_headers=self._feed is not None,
        )
        made.callback(self._local.close)
        self._shared: SharedTier | None = None
        self._copier: WriteBack | None = None
        self._count_drive_events()
        if self._feed is not None:
            self._feed_events(self._feed)
        self._keeper: SharedGcController | None = None
        shared = open_shared(settings, self._local, self._events, self._stats)
        if shared is not None:
            self._shared = SharedTier(shared, events=self._events)
            made.callback(self._shared.close)
            self._keeper = create_controller(
                config, self._holder.tenancy, settings.node, self._shared, self._stats, self._fingerprints.known
            )
            if self._keeper is not None:
                made.callback(self._keeper.stop)
            if config.cache.write_policy != "LocalOnly":
                self._copier = WriteBack(
                    self._local,
                    self._shared,
                    self._stats,
                    policy=config.cache.write_policy,
                    max_dirty=config.cache.write_max_dirty_bytes,
                    min_hits=config.cache.write_min_hits,
                )
                made.callback(self._copier.stop)
                self._copy_on_events(self._copier, selective=config.cache.write_policy == "WriteThroughSelective")

    def _count_drive_events(self) -> None:
        stats = self._stats
        self._events.subscribe(DriveIncident, lambda event: stats.add("events", event.kind, event.occurrences))
        self._events.subscribe(BlocksEvicted, lambda event: stats.add("evictions", event.cause, event.blocks))

    def _feed_events(self, feed: EventFeed) -> None:
        """Publish what the tiers store and lose to routers."""

        def on_stored(event: BlockStored) -> None:
            feed.stored(event.block_key, event.header)
            if not self._local.contains(event.block_key):  # evicted before it was published
                feed.removed([event.block_key], Locality.LOCAL)

        self._events.subscribe(BlockStored, on_stored)
        self._events.subscribe(BlockReplicated, lambda event: feed.shared(event.block_key))
        self._events.subscribe(BlocksRemoved, lambda event: feed.removed(event.block_keys, Locality.LOCAL))
        self._events.subscribe(SharedBlocksAbsent, lambda event: feed.removed(event.block_keys, Locality.SHARED))

    def _copy_on_events(self, copier: WriteBack, *, selective: bool) -> None:
        self._local.set_pending_copies(copier)
        self._events.subscribe(BlockUnreplicated, lambda event: copier.enqueue(*event))
        self._events.subscribe(BlocksRemoved, lambda event: copier.discard(event.block_keys))
        if selective:
            self._events.subscribe(BlocksOpened, lambda event: copier.record_hits(event.block_keys))

    def _open_network(self, made: contextlib.ExitStack) -> None:
        config, settings = self._config, self._settings
        secret = keys.peer_secret(settings.secret, config.uid)
        cc = config.peer.congestion_control
        identity = NodeIdentity(lambda: authority.read(settings.secret_file, secret), config.uid, settings.node)
        self._security = PeerSecurity(identity, config.peer.encryption, cc)
        made.callback(self._security.close)
        self._dial = Preconnector(self._security.dial, config.peer.streams)
        made.callback(self._dial.close)
        self._heat = Popularity() if config.cache.warm_up_bytes_per_s else None
        self._rdma = rdma.make(config.peer, settings.node, self._local, self._dial, self._stats)
        made.callback(self._rdma.close)
        self._adopter = self._make_adopter()
        made.callback(self._adopter.stop)
        self._peer_server = PeerServer(
            settings.address,
            config.peer.port,
            security=self._security,
            store=self._local,
            stats=self._stats,
            congestion_control=cc,
            lane=self._admission.peers,
            staging=self._rdma.staging,
            hottest=self._tell_hottest,
            others={wire.Op.HEADROOM: self._adopter.headroom, wire.Op.RECEIVE: self._adopter.receive},
            on_absent=lambda key: self._announcer.withdraw([key]),
        )
        made.callback(self._peer_server.stop)
        url = index_url.parse(config.index.url) if config.index.url else None
        self._passwords = Passwords(lambda: (*settings.index_passwords(), url.password if url else ""))
        self._breakers: dict[str, CircuitBreaker] = {}
        index = self._make_index()
        made.callback(index.close)
        info = NodeInfo(settings.node, settings.address, self._peer_server.port, self._local.generation)
        lease_s = float(config.index.lease_s)
        guard = Bulkhead("index", _INDEX_THREADS, _INDEX_BACKLOG, CircuitBreaker(3, 0.5, max_cooldown_s=2.0))
        made.callback(guard.close)
        if config.index.url:
            self._breakers["index"] = guard.breaker
        if self._shared is not None:
            self._breakers["shared"] = self._shared.bulkhead.breaker
        self._peers = BlockResolver(
            index,
            guard,
            lambda: self._announcer.number,
            lease_s=lease_s,
            lookup_s=config.index.lookup_timeout_ms / 1000,
        )
        self._announcer = IndexRegistration(
            index,
            info,
            self._local,
            scanned=lambda: self._local.scanned,
            lease_s=lease_s,
            keys_per_s=config.index.rebuild_per_s,
            nodes=lambda: self._peers.live_peers + 1,
            on_renewed=self._peers.refresh,
        )
        made.callback(self._announcer.stop)
        self._sweeper = IndexExpiry(
            index,
            lambda: self._announcer.number,
            keys_per_s=config.index.rebuild_per_s / 5,
            interval_s=min(60.0, config.index.forget_after_s / 4),
        )
        made.callback(self._sweeper.stop)
        self._warm_up = self._make_warm_up(index, info)
        self._evacuator = self._make_evacuator(index)
        made.callback(self._evacuator.cancel)
        self._events.subscribe(BlocksRemoved, lambda event: self._announcer.withdraw(event.block_keys))
        self._events.subscribe(BlockPromoted, lambda event: self._announcer.announce(*event))

    def _make_warm_up(self, index: Index, own: NodeInfo) -> WarmUp | None:
        config = self._config
        if not config.cache.warm_up_bytes_per_s or not config.index.url:
            return None
        return WarmUp(
            self._local,
            own,
            index.members,
            self._peers.locate,
            self._dial,
            bytes_per_s=config.cache.warm_up_bytes_per_s,
            max_block_bytes=config.cache.max_block_bytes,
            ready=lambda: self._local.scanned and self._announcer.status().connected,
            requests=lambda: sum(n for op, n in self._stats.family("requests").items() if op in _DATA_REQUESTS),
            stats=self._stats,
            on_stored=self._announcer.announce,
            on_corrupt=lambda key: self._inspector.report(key),
        )

    def _make_adopter(self) -> DrainTarget:
        return DrainTarget(
            self._local,
            lambda keys, timeout_s: self._peers.locate(keys, timeout_s),
            self._dial,
            max_block_bytes=self._config.cache.max_block_bytes,
            leaving=lambda: self._evacuator.is_draining,
            stats=self._stats,
            on_stored=lambda key, payload_len: self._announcer.announce(key, payload_len),
            on_corrupt=lambda key: self._inspector.report(key),
        )

    def _make_evacuator(self, index: Index) -> DrainSource:
        return DrainSource(
            self._local,
            self._shared if self._config.cache.write_policy != "LocalOnly" else None,
            self._settings.node,
            hottest=self._hottest,
            members=index.members,
            holders=lambda keys, timeout_s: self._peers.replicas(keys, timeout_s, staying=True),
            dial=self._dial,
            tell=lambda leaving, timeout_s: self._announcer.set_draining(leaving=leaving, timeout_s=timeout_s),
            stats=self._stats,
        )

    def _hottest(self, count: int, now: float) -> Sequence[PopularBlock]:
        return self._heat.hottest(count, now) if self._heat is not None else []

    def _tell_hottest(self, request: bytes) -> bytes:
        return hottest.build_response(self._hottest, self._local.payload_len, self._local.usage, request)

    def _make_index(self) -> Index:
        config = self._config.index
        if not config.url:
            return MemoryIndex(config.lease_s, forget_s=config.forget_after_s)
        files = self._settings.index_files
        return RedisIndex(
            config.url,
            username=config.username,
            passwords=self._passwords,
            lease_s=config.lease_s,
            forget_s=config.forget_after_s,
            ca=files.get("ca", ""),
            cert=files.get("cert", ""),
            key=files.get("key", ""),
        )

    def _open_clients(self, made: contextlib.ExitStack) -> None:
        settings = self._settings
        self._publisher = self._make_publisher()
        if self._publisher is not None:
            made.callback(self._publisher.stop)
        self._inspector = BlockVerifier(self._local, self._shared, self._peers, self._dial, self._stats)
        made.callback(self._inspector.stop)
        self._prefetcher: Prefetcher | None = None
        if self._config.cache.prefetch_bytes:
            self._prefetcher = Prefetcher(self._local, self._shared, self._config.cache.prefetch_bytes, self._stats)
            made.callback(self._prefetcher.stop)
        self._after_lookup = LookupEvents(self._lookup_listeners(), self._stats, self._local.observe_sequence)
        made.callback(self._after_lookup.stop)
        if self._warm_up is not None:
            made.callback(self._warm_up.stop)
        self._node = BlockService(
            self._holder,
            BlockLocator(self._local, self._shared, self._peers),
            BlockOpener(
                self._holder,
                self._local,
                self._shared,
                self._peers,
                self._stats,
                self._rdma.fetcher,
                self._prefetcher,
            ),
            self._inspector,
            self._stats,
            self._written,
            self._after_lookup,
        )
        self._listeners = PodListeners(self._new_session, self._stats)
        made.callback(self._listeners.stop, _DRAIN_S)
        self._pods = PodRegistry(self._holder, settings.secret, self._listeners, self._local, self._feed)
        self._pods.register_tenants()
        self._subscribe_config()
        for number, (path, tenant) in enumerate(settings.sockets.items()):
            self._serve_fixed(path, Identity(f"fixed-{number}", tenant, "fixed", "fixed"))
        if settings.rendezvous_socket:
            self._handoff = SocketHandoff(settings.rendezvous_socket, self._pods)
            made.callback(self._handoff.stop)
        self._report = report = StatusReport(
            node=settings.node,
            config=self._holder,
            live=self._live.status,
            tenants=lambda: self._holder.tenancy.tags,
            local=self._local,
            shared=self._shared,
            announcer=self._announcer,
            index_login=lambda: keys.index_login(settings.secret, self._passwords.accepted),
            peers=self._peers,
            copier=self._copier,
            keeper=self._keeper,
            listeners=self._listeners,
            fingerprints=self._fingerprints,
            congestion_control=self._peer_server.congestion_control,
            rdma=self._rdma,
            admission=self._admission,
            warm_up=self._warm_up.status if self._warm_up is not None else lambda: {"state": "off"},
            drain=self._evacuator.status,
            security=self._security,
            breakers=self._breakers,
            kv_events=self._publisher.status if self._publisher is not None else None,
            stats=self._stats,
            ready=lambda: self._serving,
        )
        prefixes = self._make_prefixes() if self._publisher is not None else None
        self._health = HealthServer(settings.address, self._config.http_port, report, self._metrics(report), prefixes)
        made.callback(self._health.stop)
        self._open_admin(made)

    def _open_admin(self, made: contextlib.ExitStack) -> None:
        settings = self._settings
        parts = OperationDeps(
            config=self._config,
            secret=settings.secret,
            local=self._local,
            shared=self._shared,
            warm_up=self._warm_up,
            preflight=PreflightSettings(
                self._config,
                settings.node,
                settings.index_passwords,
                settings.index_files,
                settings.object_secret_dir,
            ),
            drain=self._evacuator,
            reloader=self._live,
        )
        self._operations = Operations(operation_handlers(parts), self._stats)
        made.callback(self._operations.stop)
        self._admin: AdminServer | None = None
        if port := self._config.admin_port:
            self._admin = AdminServer(settings.address, port, self._security.identity, self._operations, self._stats)
            made.callback(self._admin.stop)

    def _metrics(self, report: StatusReport) -> Metrics:
        return Metrics(report, per_tenant=self._settings.metrics_per_tenant)

    def _make_publisher(self) -> EventPublisher | None:
        if self._feed is None:
            return None
        from kvpool_sidecar.events.publisher import EventPublisher  # the only part that needs ZeroMQ

        config, events = self._config, self._config.events
        names = {"{node}": self._settings.node, "{pool}": config.pool, "{namespace}": config.namespace}
        topic = events.topic
        for place, name in names.items():
            topic = topic.replace(place, name)
        return EventPublisher(
            self._settings.address,
            port=events.port,
            replay_port=events.replay_port,
            topic=topic,
            feed=self._feed,
            stats=self._stats,
            int_hashes=events.hashes == "Int64",
            models=lambda: dict(self._fingerprints.known()),
        )

    def _make_prefixes(self) -> PrefixApi:
        settings, config = self._settings, self._config
        token = keys.events_token(settings.secret, config.uid, config.events.token_revision)
        return PrefixApi(
            token,
            settings.secret,
            settings.node,
            self._local,
            self._peers,
            self._shared,
            self._stats,
            lambda namespace: (self._holder.tenancy.tenant_id(namespace), *self._holder.tenancy.reads_from(namespace)),
        )

    def _lookup_listeners(self) -> list[LookupListener]:
        listeners: list[LookupListener] = []
        if self._prefetcher is not None:
            listeners.append(self._prefetcher.enqueue)
        if (heat := self._heat) is not None:
            listeners.append(lambda _tenant, keys, _tiers, asked_at: heat.record_hits(keys, asked_at))
        if self._keeper is not None:
            listeners.append(self._keeper.access_times.on_lookup)
        return listeners

    def start(self) -> None:
        """Serve. Returns at once."""
        self._local.start()
        self._security.identity.start()
        self._peer_server.start()
        self._announcer.start()
        self._sweeper.start()
        self._inspector.start()
        if self._copier is not None:
            self._copier.start()
        if self._keeper is not None:
            self._keeper.start()
        if self._prefetcher is not None:
            self._prefetcher.start()
        self._after_lookup.start()
        if self._warm_up is not None:
            self._warm_up.start()
        for root in self._local.drives:  # each by itself: one that hangs keeps nobody
            threading.Thread(
                target=self._housekeep, args=(root,), name=f"housekeeping-{root.name}", daemon=True
            ).start()
        threading.Thread(target=self._watch_drives, name="drives", daemon=True).start()
        if self._shared is not None:
            threading.Thread(target=self._housekeep_shared, name="housekeeping-shared", daemon=True).start()
        if self._publisher is not None:
            self._publisher.start()
        self._listeners.start()
        if self._handoff is not None:
            self._handoff.start()
        if self._admin is not None:
            self._admin.start()
        self._health.start()
        self._live.start()
        self._serving = True

    def stop(self, *, hand_over: bool = False) -> None:
        """Copy what waits (WriteBack: at most five seconds), let requests finish (two), give the lease back, close.

        `hand_over`: another sidecar waits for the drives; it finds there what is not copied yet.
        """
        if self._copier is not None and not hand_over:
            self._copier.flush(_FLUSH_S)
        if self._handoff is not None and hand_over:
            self._handoff.release_sockets()
        self._serving = False
        self._stopping.set()
        self._live.stop()
        self._cleanup.close()

    def _serve_fixed(self, path: str, identity: Identity) -> None:
        directory, _, name = os.path.abspath(path).rpartition("/")
        os.makedirs(directory or "/", exist_ok=True)
        dir_fd = os.open(directory or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener = listen_at(dir_fd, name, 0o600)
        finally:
            os.close(dir_fd)
        try:
            self._pods.admit(identity, listener)
        except RefusedError as e:
            listener.close()
            raise ConfigError(f"--socket {path}: {e}") from None

    def _subscribe_config(self) -> None:
        """Apply configuration changes in this order: pods, local tiers, garbage collection, limits, rendezvous."""
        holder = self._holder
        holder.subscribe(self._pods.apply_config)
        holder.subscribe(
            lambda _: self._local.reconfigure(holder.current.local, holder.current.cache, holder.tenancy.local_limits)
        )
        if (gc := self._keeper) is not None:
            holder.subscribe(lambda _: gc.reconfigure(holder.current, holder.tenancy))
        holder.subscribe(self._pods.apply_limits)
        holder.subscribe(self._resync_pods)

    def _resync_pods(self, previous: PoolConfig) -> None:
        if previous.allowed_namespaces != self._holder.current.allowed_namespaces and self._handoff is not None:
            self._handoff.resync()

    def _new_session(self, sock: socket.socket, pod: Pod) -> Session:
        return Session(
            sock, pod, SessionContext(self._settings.node, self._node, self._dial, self._fingerprints, self._admission)
        )

    def _written(self, key: bytes, payload_len: int) -> None:
        self._announcer.announce(key, payload_len)
        if self._copier is not None:
            self._copier.enqueue(key, payload_len)
        self._evacuator.on_stored()

    def _housekeep(self, root: Drive) -> None:
        while not self._stopping.is_set():
            root.due.wait(_HOUSEKEEPING_S)
            if self._stopping.is_set():
                return
            try:
                root.maintain()
            except Exception:
                log.exception("housekeeping of %s", root.name)

    def _watch_drives(self) -> None:
        while not self._stopping.wait(_WATCH_DRIVES_S):
            for root in self._local.drives:
                root.health.tick()

    def _housekeep_shared(self) -> None:
        """In a thread of its own: it may hang with the mount."""
        assert self._shared is not None  # noqa: S101
        while not self._stopping.wait(_HOUSEKEEPING_S):
            if not self._shared.available:
                continue
            try:
                self._shared.store.maintain()
                if self._feed is not None and self._config.fsspec is None:  # looking costs money in an object store
                    self._look_again(self._shared, self._feed.sample_shared(_SHARED_LOOKS))
            except Exception as e:
                log.warning("the shared tier: %s", e)

    @staticmethod
    def _look_again(shared: SharedTier, keys: list[bytes]) -> None:
        """Tell routers what another node's sweep has removed (SharedBlocksAbsent)."""
        for key in keys:
            shared.mark_absent(key)
        shared.contains_many(keys, _HOUSEKEEPING_S)


def serve(read_settings: Callable[[], ServeSettings]) -> int:
    """Run until SIGTERM or SIGINT; 0. A second signal ends the process at once. ConfigError or OSError at start.

    The settings are read again when drives that were handed over come back.
    """
    # a lease that somebody breaks is told by SIGIO, which would end the process
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
    """Until `done`, or until the drives are handed over to another sidecar of this node (settings.allow_takeover)."""
    turns = await_ownership(settings, done, back=back) if settings.allow_takeover else None
    if settings.allow_takeover and turns is None:
        return
    try:
        app = SidecarApp(settings)
        app.start()
    finally:
        if turns is not None:
            turns.close()
    config = settings.config
    log.info("pool %s/%s on node %s is served at %s", config.namespace, config.pool, settings.node, settings.address)
    successor = TakeoverWatch(settings)
    while not done.wait(POLL_INTERVAL_S if settings.allow_takeover else 1.0) and not successor.is_requested:
        pass
    log.info("stopping" if done.is_set() else "handing the drives over")
    app.stop(hand_over=not done.is_set())
    successor.close()


def _raise_descriptor_limit() -> None:
    """Descriptors in flight count against the soft limit too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
