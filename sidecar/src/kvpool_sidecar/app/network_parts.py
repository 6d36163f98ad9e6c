"""Builds the connections to other nodes: peers, prefix index, warm-up and drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.protocol import index_url, keys, wire
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.blocks.events import BlockPromoted, BlocksRemoved, CorruptBlockReported
from kvpool_sidecar.blocks.popularity import Popularity
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.credentials import Passwords
from kvpool_sidecar.index.expiry import IndexExpiry
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.registration import IndexRegistration
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.peers import ca, hottest
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.preconnect import Preconnector
from kvpool_sidecar.peers.rdma import factory as rdma
from kvpool_sidecar.peers.security import PeerSecurity
from kvpool_sidecar.peers.server import PeerServer
from kvpool_sidecar.replication.drain_source import DrainSource
from kvpool_sidecar.replication.drain_target import DrainTarget
from kvpool_sidecar.replication.warm_up import WarmUp
from kvpool_sidecar.resilience.bulkhead import Bulkhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.app.context import AppContext, Component
    from kvpool_sidecar.app.storage_parts import StorageParts
    from kvpool_sidecar.blocks.popularity import PopularBlock
    from kvpool_sidecar.index.base import Index
    from kvpool_sidecar.peers.rdma.factory import RdmaStack

__all__ = ["NetworkParts", "build_network"]

_DATA_REQUESTS = ("open", "begin")
_INDEX_THREADS, _INDEX_BACKLOG = 8, 64


@dataclass(frozen=True)
class NetworkParts:
    """Connections to peers and to the prefix index. `warm_up` is None without an index or without a bandwidth."""

    security: PeerSecurity
    dial: Preconnector
    rdma: RdmaStack
    peer_server: PeerServer
    passwords: Passwords
    index: IndexParts
    warm_up: WarmUp | None
    drain: DrainSource
    popularity: Popularity | None

    def components(self) -> list[Component]:
        """Return the parts to start, in order."""
        return [self.security.identity, self.peer_server, self.index.registration, self.index.expiry]


@dataclass(frozen=True)
class IndexParts:
    """Client side of the prefix index."""

    index: Index
    own: NodeInfo
    bulkhead: Bulkhead
    resolver: BlockResolver
    registration: IndexRegistration
    expiry: IndexExpiry


def build_network(context: AppContext, storage: StorageParts) -> NetworkParts:
    """Bind the peer port and connect to the index. ConfigError or OSError if that fails."""
    settings, config, cleanup = context.settings, context.config.current, context.cleanup
    secret = keys.peer_secret(settings.secret, config.uid)
    identity = NodeIdentity(lambda: ca.read(settings.secret_file, secret), config.uid, settings.node)
    security = PeerSecurity(identity, config.peer.encryption, config.peer.congestion_control)
    cleanup.callback(security.close)
    dial = Preconnector(security.dial, config.peer.streams)
    cleanup.callback(dial.close)
    popularity = Popularity() if config.cache.warm_up_bytes_per_s else None
    stack = rdma.make(config.peer, settings.node, storage.local, dial, context.stats)
    cleanup.callback(stack.close)

    def popular(count: int, now: float) -> Sequence[PopularBlock]:
        return popularity.hottest(count, now) if popularity is not None else []

    drain_target = DrainTarget(
        storage.local,
        lambda keys, timeout_s: parts.resolver.locate(keys, timeout_s),
        dial,
        max_block_bytes=config.cache.max_block_bytes,
        leaving=lambda: drain.is_draining,
        stats=context.stats,
        on_stored=lambda key, size: context.events.emit(BlockPromoted(key, size)),
        on_corrupt=lambda key: context.events.emit(CorruptBlockReported(key)),
    )
    cleanup.callback(drain_target.stop)
    peer_server = PeerServer(
        settings.address,
        config.peer.port,
        security=security,
        store=storage.local,
        stats=context.stats,
        congestion_control=config.peer.congestion_control,
        lane=context.queues.peers,
        staging=stack.staging,
        hottest=lambda request: hottest.build_response(
            popular, storage.local.payload_len, storage.local.usage, request
        ),
        others={wire.Op.HEADROOM: drain_target.headroom, wire.Op.RECEIVE: drain_target.receive},
        on_absent=lambda key: parts.registration.withdraw([key]),
    )
    cleanup.callback(peer_server.stop)
    url = index_url.parse(config.index.url) if config.index.url else None
    passwords = Passwords(lambda: (*settings.index_passwords(), url.password if url else ""))
    parts = _build_index(context, storage, passwords, peer_server.port)
    warm_up = _warm_up(context, storage, parts, dial)
    drain = DrainSource(
        storage.local,
        storage.shared if config.cache.write_policy != "LocalOnly" else None,
        settings.node,
        hottest=popular,
        members=parts.index.members,
        holders=lambda keys, timeout_s: parts.resolver.replicas(keys, timeout_s, staying=True),
        dial=dial,
        tell=lambda leaving, timeout_s: parts.registration.set_draining(leaving=leaving, timeout_s=timeout_s),
        stats=context.stats,
    )
    cleanup.callback(drain.cancel)
    return NetworkParts(security, dial, stack, peer_server, passwords, parts, warm_up, drain, popularity)


def _build_index(context: AppContext, storage: StorageParts, passwords: Passwords, peer_port: int) -> IndexParts:
    settings, config, cleanup = context.settings, context.config.current.index, context.cleanup
    index = _connect_index(context, passwords)
    cleanup.callback(index.close)
    own = NodeInfo(settings.node, settings.address, peer_port, storage.local.generation)
    lease_s = float(config.lease_s)
    bulkhead = Bulkhead("index", _INDEX_THREADS, _INDEX_BACKLOG, CircuitBreaker(3, 0.5, max_cooldown_s=2.0))
    cleanup.callback(bulkhead.close)
    resolver = BlockResolver(
        index,
        bulkhead,
        lambda: registration.number,
        lease_s=lease_s,
        lookup_s=config.lookup_timeout_ms / 1000,
    )
    registration = IndexRegistration(
        index,
        own,
        storage.local,
        scanned=lambda: storage.local.scanned,
        lease_s=lease_s,
        keys_per_s=config.rebuild_per_s,
        nodes=lambda: resolver.live_peers + 1,
        on_renewed=resolver.refresh,
    )
    cleanup.callback(registration.stop)
    expiry = IndexExpiry(
        index,
        lambda: registration.number,
        keys_per_s=config.rebuild_per_s / 5,
        interval_s=min(60.0, config.forget_after_s / 4),
    )
    cleanup.callback(expiry.stop)
    context.events.subscribe(BlocksRemoved, lambda event: registration.withdraw(event.block_keys))
    context.events.subscribe(BlockPromoted, lambda event: registration.announce(*event))
    return IndexParts(index, own, bulkhead, resolver, registration, expiry)


def _connect_index(context: AppContext, passwords: Passwords) -> Index:
    config, files = context.config.current.index, context.settings.index_files
    if not config.url:
        return MemoryIndex(config.lease_s, forget_s=config.forget_after_s)
    return RedisIndex(
        config.url,
        username=config.username,
        passwords=passwords,
        lease_s=config.lease_s,
        forget_s=config.forget_after_s,
        ca=files.get("ca", ""),
        cert=files.get("cert", ""),
        key=files.get("key", ""),
    )


def _warm_up(context: AppContext, storage: StorageParts, index: IndexParts, dial: Preconnector) -> WarmUp | None:
    cache, stats = context.config.current.cache, context.stats
    if not cache.warm_up_bytes_per_s or not context.config.current.index.url:
        return None
    return WarmUp(
        storage.local,
        index.own,
        index.index.members,
        index.resolver.locate,
        dial,
        bytes_per_s=cache.warm_up_bytes_per_s,
        max_block_bytes=cache.max_block_bytes,
        ready=lambda: storage.local.scanned and index.registration.status().connected,
        requests=lambda: sum(n for op, n in stats.family("requests").items() if op in _DATA_REQUESTS),
        stats=stats,
        on_stored=lambda key, size: context.events.emit(BlockPromoted(key, size)),
        on_corrupt=lambda key: context.events.emit(CorruptBlockReported(key)),
    )
