"""Builds the connections to other nodes: peers, prefix index, warm-up and drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.protocol import index_url, keys, wire
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.blocks.events import BlockPromoted, BlocksRemoved
from kvpool_sidecar.blocks.popularity import Popularity
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.expiry import IndexExpiry
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.registration import IndexRegistration
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.peers import ca, hottest
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.issued import IssuedLeaves, IssuerClient
from kvpool_sidecar.peers.preconnect import Preconnector
from kvpool_sidecar.peers.probe import PeerProber
from kvpool_sidecar.peers.rdma import factory as rdma
from kvpool_sidecar.peers.security import PeerSecurity
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.replication.drain_source import DrainSource
from kvpool_sidecar.replication.drain_target import DrainTarget
from kvpool_sidecar.replication.peer_copy import PeerAccess
from kvpool_sidecar.replication.warm_up import WarmUp, WarmUpLimits
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
    prober: PeerProber
    peers: PeerAccess
    drain_target: DrainTarget

    def components(self) -> list[Component]:
        """Return the parts to start, in order."""
        return [self.security.identity, self.peer_server, self.index.registration, self.index.expiry, self.prober]


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
    issuer = IssuerClient(settings.issuer_url, settings.issuer_token) if settings.issuer_url else None

    def leaf_source() -> ca.LeafSource:
        if issuer is not None and settings.secret_file("peer-ca.crt") and not settings.secret_file("peer-ca.key"):
            return IssuedLeaves(settings.secret_file, issuer)
        return ca.read(settings.secret_file, secret)

    identity = NodeIdentity(leaf_source, config.uid, settings.node)
    security = PeerSecurity(identity, config.peer.encryption, config.peer.congestion_control)
    cleanup.callback(security.close)
    dial = Preconnector(security.dial, config.peer.streams)
    cleanup.callback(dial.close)
    popularity = Popularity() if config.cache.warm_up_bytes_per_s else None
    stack = rdma.make(config.peer, settings.node, storage.local, dial, context.stats)
    cleanup.callback(stack.close)

    def popular(count: int, now: float) -> Sequence[PopularBlock]:
        return popularity.hottest(count, now) if popularity is not None else []

    options = PeerServerOptions(
        security=security,
        congestion_control=config.peer.congestion_control,
        queue=context.queues.peers,
        staging=stack.staging,
        roster=lambda: {peer.host for peer in parts.resolver.live_nodes()},
    )
    peer_server = PeerServer(
        settings.address,
        config.peer.port,
        storage.local,
        context.stats,
        options,
        on_absent=lambda key: parts.registration.withdraw([key]),
    )
    cleanup.callback(peer_server.stop)
    url = index_url.parse(config.index.url) if config.index.url else None
    passwords = Passwords(lambda: (*settings.index_passwords(), url.password if url else ""))
    parts = _build_index(context, storage, passwords, peer_server.port)
    peers = PeerAccess(settings.node, parts.index, parts.resolver, dial)
    warm_up = _warm_up(context, storage, parts, peers)
    drain = DrainSource(
        storage.local,
        storage.shared if config.cache.write_policy != "LocalOnly" else None,
        peers,
        context.stats,
        registration=parts.registration,
        hottest=popular,
    )
    cleanup.callback(drain.cancel)
    drain_target = DrainTarget(
        storage.local,
        peers,
        context.events,
        context.stats,
        max_block_bytes=config.cache.max_block_bytes,
        is_draining=lambda: drain.is_draining,
    )
    cleanup.callback(drain_target.stop)
    peer_server.register(
        wire.Op.HOTTEST,
        lambda request, _flags: hottest.build_response(
            popular, storage.local.payload_len, storage.local.usage, request
        ),
    )
    peer_server.register(wire.Op.HEADROOM, drain_target.headroom)
    peer_server.register(wire.Op.RECEIVE, drain_target.receive)
    resolver = parts.resolver
    # not through the preconnector: a probe shows that a new connection can be made now
    prober = PeerProber(
        resolver.live_nodes,
        security.dial,
        resolver.reachability,
        context.stats,
        config.peer.connect_timeout_ms / 1000,
    )
    cleanup.callback(prober.stop)
    return NetworkParts(
        security, dial, stack, peer_server, passwords, parts, warm_up, drain, popularity, prober, peers, drain_target
    )


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
        resolver=resolver,
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
    credentials = IndexCredentials(
        config.username, passwords, files.get("ca", ""), files.get("cert", ""), files.get("key", "")
    )
    return RedisIndex(config.url, credentials=credentials, lease_s=config.lease_s, forget_s=config.forget_after_s)


def _warm_up(context: AppContext, storage: StorageParts, index: IndexParts, peers: PeerAccess) -> WarmUp | None:
    cache, stats = context.config.current.cache, context.stats
    if not cache.warm_up_bytes_per_s or not context.config.current.index.url:
        return None
    return WarmUp(
        storage.local,
        peers,
        context.events,
        stats,
        WarmUpLimits(cache.warm_up_bytes_per_s, cache.max_block_bytes),
        ready=lambda: storage.local.scanned and index.registration.status().connected,
        requests=lambda: sum(n for op, n in stats.family("requests").items() if op in _DATA_REQUESTS),
    )
