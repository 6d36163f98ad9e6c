"""Builds the parts that serve the node's engine pods: sessions, sockets, lookups and published events."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError, RefusedError
from kvpool.protocol import keys, peer_wire
from kvpool.protocol.wire import Op
from kvpool_sidecar.blocks.events import BlocksRemoved, BlockStored, CorruptBlockReported
from kvpool_sidecar.replication.hint_forwarder import HintForwarder
from kvpool_sidecar.replication.lookup_events import LookupEvents
from kvpool_sidecar.replication.prefetch import Prefetcher
from kvpool_sidecar.replication.resume import SessionReader
from kvpool_sidecar.replication.session_hints import SessionHints
from kvpool_sidecar.replication.verifier import BlockVerifier
from kvpool_sidecar.serving.admission import LocalAdmission
from kvpool_sidecar.serving.block_service import BlockService
from kvpool_sidecar.serving.block_tables import BlockTables
from kvpool_sidecar.serving.listener import PodListeners
from kvpool_sidecar.serving.locator import BlockLocator
from kvpool_sidecar.serving.miss_causes import MissCauses
from kvpool_sidecar.serving.opener import BlockOpener
from kvpool_sidecar.serving.pod_registry import FIXED_PREFIX, PodRegistry
from kvpool_sidecar.serving.session import Session, SessionContext
from kvpool_sidecar.serving.socket_handoff import SocketHandoff
from kvpool_sidecar.serving.store_service import StoreService
from kvpool_sidecar.serving.stream_exchange import StreamExchange
from kvpool_sidecar.storage.removed_blocks import RemovedBlocks
from kvpool_sidecar.system.unix_socket import listen_at
from kvpool_sidecar.tenancy.identity import Identity

if TYPE_CHECKING:
    from kvpool.config import PoolConfig
    from kvpool_sidecar.app.context import AppContext, Component
    from kvpool_sidecar.app.network_parts import NetworkParts
    from kvpool_sidecar.app.storage_parts import StorageParts
    from kvpool_sidecar.events.publisher import EventPublisher
    from kvpool_sidecar.replication.lookup_events import LookupListener

__all__ = ["ClientParts", "build_clients"]


@dataclass(frozen=True)
class ClientParts:
    """Parts that serve engine pods. `handoff` is None without a node agent, `publisher` without events."""

    listeners: PodListeners
    pods: PodRegistry
    handoff: SocketHandoff | None
    verifier: BlockVerifier
    prefetcher: Prefetcher | None
    lookup_events: LookupEvents
    stores: StoreService
    publisher: EventPublisher | None
    reader: SessionReader
    hints: SessionHints
    tables: BlockTables

    def background(self) -> list[Component]:
        """Return the parts to start before any pod connects."""
        parts: list[Component | None] = [self.verifier, self.prefetcher, self.lookup_events, self.stores]
        parts += [self.reader, self.hints, self.tables]
        return [part for part in parts if part is not None]

    def frontends(self) -> list[Component]:
        """Return the parts that accept pods and publish events."""
        parts: list[Component | None] = [self.publisher, self.listeners, self.handoff]
        return [part for part in parts if part is not None]


def build_clients(context: AppContext, storage: StorageParts, network: NetworkParts) -> ClientParts:
    """Bind the sockets of the pods. ConfigError or OSError if that fails."""
    settings, config, cleanup = context.settings, context.config, context.cleanup
    resolver = network.index.resolver
    publisher = _publisher(context)
    if publisher is not None:
        cleanup.callback(publisher.stop)
    verifier = BlockVerifier(storage.local, storage.shared, resolver, network.dial, context.stats)
    cleanup.callback(verifier.stop)
    context.events.subscribe(CorruptBlockReported, lambda event: verifier.report(event.block_key))
    prefetcher = None
    if limit := config.current.cache.prefetch_bytes:
        prefetcher = Prefetcher(storage.local, storage.shared, limit, context.stats)
        cleanup.callback(prefetcher.stop)
    tables = _block_tables(context, storage)
    listeners = [*_lookup_listeners(prefetcher, storage, network), tables.on_lookup]
    lookup_events = LookupEvents(listeners, context.stats, storage.local.observe_sequence)
    cleanup.callback(lookup_events.stop)
    if network.warm_up is not None:
        cleanup.callback(network.warm_up.stop)
    reader = SessionReader(storage.local, storage.shared, prefetcher, network.drain_target.receive, context.stats)
    cleanup.callback(reader.stop)
    forwarder = HintForwarder(network.peers, context.stats) if config.current.index.url else None
    hints = SessionHints(lambda: config.current.hints, storage.local, context.stats, forwarder=forwarder, resume=reader)
    cleanup.callback(hints.stop)
    network.peer_server.register(Op.SESSION, hints.from_peer)
    opener = BlockOpener(
        config, storage.local, storage.shared, resolver, context.stats, network.rdma.fetcher, prefetcher
    )
    registration, write_back, drain = network.index.registration, storage.write_back, network.drain

    def on_written(key: bytes, payload_len: int) -> None:
        registration.announce(key, payload_len)
        if write_back is not None:
            write_back.enqueue(key, payload_len)
        drain.on_stored()

    locator = BlockLocator(storage.local, storage.shared, resolver)
    removed = RemovedBlocks()
    context.events.subscribe(BlocksRemoved, lambda event: removed.record(event.block_keys, event.cause))
    causes = MissCauses(storage.local, resolver, removed, context.fingerprints, context.stats)
    service = BlockService(config, locator, opener, verifier, context.stats, causes, lookup_events)
    admission = LocalAdmission(config, storage.local, context.stats)
    stores = StoreService(config, storage.landing, context.stats, on_written, admission)
    cleanup.callback(stores.stop)
    exchange = StreamExchange(context.stats)
    session = SessionContext(
        settings.node,
        service,
        stores,
        network.dial,
        context.fingerprints,
        context.queues,
        context.lookups,
        exchange,
        hints,
        tables,
    )
    sockets = PodListeners(lambda sock, pod: Session(sock, pod, session), exchange, context.stats)
    cleanup.callback(sockets.stop)
    pods = PodRegistry(config, settings.secret, sockets, storage.local, context.feed, tables.withdraw)
    pods.register_tenants()
    for number, (path, tenant) in enumerate(settings.sockets.items()):
        _serve_fixed(pods, path, Identity(f"{FIXED_PREFIX}{number}", tenant, "fixed", "fixed"))
    handoff = None
    if settings.rendezvous_socket:
        handoff = SocketHandoff(settings.rendezvous_socket, pods)
        cleanup.callback(handoff.stop)
    _subscribe_config(context, storage, pods, handoff)
    return ClientParts(
        sockets, pods, handoff, verifier, prefetcher, lookup_events, stores, publisher, reader, hints, tables
    )


def _block_tables(context: AppContext, storage: StorageParts) -> BlockTables:
    """Tables that follow the blocks of the local drives."""
    tables = BlockTables(storage.local)
    context.cleanup.callback(tables.stop)
    context.events.subscribe(BlockStored, tables.on_stored)
    context.events.subscribe(BlocksRemoved, tables.on_removed)
    return tables


def _subscribe_config(
    context: AppContext, storage: StorageParts, pods: PodRegistry, handoff: SocketHandoff | None
) -> None:
    """Apply configuration changes in this order: pods, local tiers, garbage collection, limits, node agent."""
    config, local, gc = context.config, storage.local, storage.gc
    config.subscribe(pods.apply_config)
    config.subscribe(
        lambda _: local.reconfigure(
            config.current.local, config.current.cache, config.tenancy.local_limits, config.tenancy.hints_percent
        )
    )
    if gc is not None:
        config.subscribe(lambda _: gc.reconfigure(config.current, config.tenancy))
    config.subscribe(pods.apply_limits)

    def resync_pods(previous: PoolConfig) -> None:
        if handoff is not None and previous.allowed_namespaces != config.current.allowed_namespaces:
            handoff.resync()

    config.subscribe(resync_pods)


def _lookup_listeners(
    prefetcher: Prefetcher | None, storage: StorageParts, network: NetworkParts
) -> list[LookupListener]:
    listeners: list[LookupListener] = []
    if prefetcher is not None:
        listeners.append(prefetcher.enqueue)
    if (popularity := network.popularity) is not None:
        listeners.append(lambda _tenant, keys, _tiers, asked_at: popularity.record_hits(keys, asked_at))
    if storage.gc is not None:
        listeners.append(storage.gc.access_times.on_lookup)
    return listeners


def _publisher(context: AppContext) -> EventPublisher | None:
    if context.feed is None:
        return None
    from kvpool_sidecar.events.publisher import EventEndpoint, EventPublisher  # the only part that needs ZeroMQ

    config, events = context.config.current, context.config.current.events
    names = {"{node}": context.settings.node, "{pool}": config.pool, "{namespace}": config.namespace}
    topic = events.topic
    for placeholder, name in names.items():
        topic = topic.replace(placeholder, name)
    curve_keys = None
    if events.authentication == "Curve":
        curve_keys = keys.events_curve_keys(context.settings.secret, config.uid, events.token_revision)
    return EventPublisher(
        EventEndpoint(context.settings.address, events.port, events.replay_port, topic, curve_keys),
        context.feed,
        context.stats,
        int_hashes=events.hashes == "Int64",
        models=lambda: dict(context.fingerprints.known()),
    )


def _serve_fixed(pods: PodRegistry, path: str, identity: Identity) -> None:
    """Serve a socket at a fixed path, without a node agent."""
    directory, _, name = os.path.abspath(path).rpartition("/")
    os.makedirs(directory or "/", exist_ok=True)
    dir_fd = os.open(directory or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.ExitStack() as placed:
        placed.callback(os.close, dir_fd)
        streams = listen_at(dir_fd, name + peer_wire.STREAM_SUFFIX, 0o600, socket.SOCK_STREAM)
        listener = listen_at(dir_fd, name, 0o600)
    try:
        pods.admit(identity, listener)
        pods.add_streams(identity.uid, streams)
    except RefusedError as e:
        listener.close()
        streams.close()
        raise ConfigError(f"--socket {path}: {e}") from None
