"""What this node can give and take: own drive first, then a peer, then the shared tier. No wire formats here.

Every call ends by its deadline; what could not be found out by then is a miss.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, KVPoolError, RefusedError, TierFullError
from kvpool.protocol.wire import BeginStatus, CommitStatus, Flag, OpenStatus, Tier
from kvpool_sidecar.blocks.file import Expect
from kvpool_sidecar.peers.rdma.fetch import ReadRequest
from kvpool_sidecar.serving.locator import BlockLocator, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.config import PoolConfig
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.registration import IndexRegistration
    from kvpool_sidecar.index.resolver import BlockResolver, ReplicaLocation
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher
    from kvpool_sidecar.peers.rdma.slots import Slot
    from kvpool_sidecar.replication.lookup_events import LookupEvents
    from kvpool_sidecar.replication.prefetch import Prefetcher
    from kvpool_sidecar.replication.verifier import BlockVerifier
    from kvpool_sidecar.replication.write_back import WriteBack
    from kvpool_sidecar.serving.locator import Located
    from kvpool_sidecar.storage.base import Block, Store, WriteTransaction
    from kvpool_sidecar.storage.shared.tier import SharedTier
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["BlockService", "OpenResult", "PeerStreams", "close_files"]

_MAX_STREAMS = 0xFFFF
_STREAM_BYTES = 8 << 20  # of a load are worth a connection of their own
_REASONS: dict[type[Exception], str] = {CorruptBlockError: "corrupt", RefusedError: "still-writable"}


class OpenResult(NamedTuple):
    """One entry of an OPEN: `fd` is a block file to hand over and close, or a stream's socket to hand over and keep."""

    status: OpenStatus
    tier: Tier = Tier.MISS
    stream: int = 0
    payload_len: int = 0
    key: bytes = bytes(32)
    fd: int = -1


class PeerStreams:
    """The peer connections of one client connection, numbered. Not thread-safe."""

    def __init__(
        self,
        dial: Callable[[NodeInfo, float], PeerConnection],
        give_back: Callable[[Slot], None] = lambda _slot: None,
        on_silent: Callable[[NodeInfo], None] = lambda _peer: None,
    ) -> None:
        self._dial = dial
        self._on_silent = on_silent
        self._give_back = give_back
        self._held: list[list[Slot]] = [[], []]
        self._links: dict[tuple[NodeInfo, int], tuple[int, PeerConnection]] = {}
        self._last = 0

    def get(self, peer: NodeInfo, timeout_s: float, lane: int = 0) -> tuple[int, PeerConnection, bool]:
        """Number, link, and whether it is new; each `lane` is a connection. KVPoolError if the peer is not reached."""
        number, link = self._links.get((peer, lane), (0, None))
        if link is not None and link.alive:
            return number, link, False
        if link is not None:
            self.drop(number)
        if self._last >= _MAX_STREAMS:
            raise RefusedError("this connection has used up its streams")
        link = self._dial(peer, timeout_s)
        self._last += 1
        self._links[peer, lane] = (self._last, link)
        return self._last, link, True

    def drop(self, number: int) -> None:
        """End one; its number is not used again."""
        for place, (known, link) in list(self._links.items()):
            if known == number:
                del self._links[place]
                if link.is_silent:
                    self._on_silent(place[0])
                link.close()

    def hold(self, slot: Slot) -> None:
        """Keep it while the client reads from it."""
        self._held[-1].append(slot)

    def turn(self) -> None:
        """A request begins: what was handed over two requests ago has been read."""
        for slot in self._held.pop(0):
            self._give_back(slot)
        self._held.append([])

    def close(self) -> None:
        """End all."""
        for number, _ in list(self._links.values()):
            self.drop(number)
        for _ in range(len(self._held)):
            self.turn()


class BlockService:
    """Thread-safe; shared by all connections."""

    def __init__(
        self,
        config: PoolConfig,
        local: Store,
        shared: SharedTier | None,
        peers: BlockResolver,
        announcer: IndexRegistration,
        copier: WriteBack | None,
        inspector: BlockVerifier,
        stats: Stats,
        fetcher: RdmaFetcher | None = None,
        prefetcher: Prefetcher | None = None,
        after_lookup: LookupEvents | None = None,
        on_stored: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.fetcher = fetcher
        self.local = local
        self.shared = shared
        self.peers = peers
        self.stats = stats
        self._locator = BlockLocator(local, shared, peers)
        self._announcer = announcer
        self._copier = copier
        self._inspector = inspector
        self._prefetcher = prefetcher
        self._after_lookup = after_lookup
        self._on_stored = on_stored

    def locate(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], timeout_s: float, *, every: bool
    ) -> Located:
        """Where each block is, and under which key: Locator. `tenants`: the asking one, then those it may read."""
        return self._locator.locate(tenants, block_ids, timeout_s, every=every)

    def looked_up(self, tenant: Tenant, block_ids: Sequence[bytes], located: Located) -> None:
        """The answer of a lookup is out: its blocks will be asked for next. Returns at once."""
        if self._after_lookup is not None:
            self._after_lookup.publish(tenant, block_ids, located.tiers, located.keys)

    def open(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], flags: int, timeout_s: float, streams: PeerStreams
    ) -> list[OpenResult]:
        """Open blocks, in order; the receiver owns `fd` of FILE entries. `tenants` as for `locate`."""
        deadline = time.monotonic() + timeout_s
        streams.turn()
        keys = [nearest(self.local, tenants, block_id) for block_id in block_ids]
        opened: list[OpenResult] = []
        if self._prefetcher is not None:
            self._prefetcher.consumed(keys)
        try:
            self._open_local(keys, opened, deadline, verify=bool(flags & Flag.VERIFY))
            if not flags & Flag.LOCAL_ONLY:
                self._open_peers(tenants, block_ids, keys, opened, deadline, streams)
            self._open_shared(tenants, block_ids, keys, opened, deadline, verify=bool(flags & Flag.VERIFY))
        except BaseException:
            close_files(opened)
            raise
        for tier, count in Counter(entry.tier for entry in opened).items():
            self.stats.add("served", tier.name.lower(), count)
        return opened

    def _open_local(self, keys: Sequence[bytes], opened: list[OpenResult], deadline: float, *, verify: bool) -> None:
        """Appends to `opened`, so that the caller can close what is in it whatever happens."""
        if verify:
            there = [time.monotonic() <= deadline and self._is_whole(key) for key in keys]
            found = [self.local.open(key) if ok else None for key, ok in zip(keys, there, strict=True)]
        else:
            found = self.local.open_many(keys)
        for key, block in zip(keys, found, strict=True):
            opened.append(OpenResult(OpenStatus.MISS, key=key) if block is None else _file(key, Tier.LOCAL, block))

    def _is_whole(self, key: bytes) -> bool:
        return not self.local.contains(key) or self.local.verify(key)

    def _open_peers(
        self,
        tenants: Sequence[Tenant],
        block_ids: Sequence[bytes],
        keys: list[bytes],
        opened: list[OpenResult],
        deadline: float,
        streams: PeerStreams,
    ) -> None:
        """`keys` are those of `tenants` under which the blocks are there, afterwards."""
        rest = [n for n, entry in enumerate(opened) if entry.status == OpenStatus.MISS]
        there: dict[int, ReplicaLocation] = {}
        by_peer: dict[NodeInfo, list[tuple[int, ReplicaLocation]]] = {}
        for tenant in tenants:
            left = deadline - time.monotonic()
            if not rest or left <= 0:
                break
            its = [tenant.block_key(block_ids[n]) for n in rest]
            answers = self.peers.locate(its, left / 2)
            for n, key, found in zip(rest, its, answers, strict=True):
                if found is not None:
                    keys[n], there[n] = key, found
            rest = [n for n in rest if n not in there]
        for n, found in sorted(there.items()):  # a stream brings its blocks in the order of the block ids
            by_peer.setdefault(found.peer, []).append((n, found))
        for peer, found_there in by_peer.items():
            wanted = self._fetch(tenants[0], peer, found_there, keys, opened, deadline, streams)
            if not wanted:
                continue
            total = sum(found.payload_len for _, found in wanted)
            lanes = max(1, min(self.config.peer.streams, len(wanted), total // _STREAM_BYTES))
            for lane in range(lanes):
                if not self._ask(peer, lane, wanted[lane::lanes], keys, opened, deadline, streams):
                    break

    def _ask(
        self,
        peer: NodeInfo,
        lane: int,
        wanted: list[tuple[int, ReplicaLocation]],
        keys: Sequence[bytes],
        opened: list[OpenResult],
        deadline: float,
        streams: PeerStreams,
    ) -> bool:
        """Have a connection to the peer bring these blocks; False if it cannot be reached."""
        timeout = min(self.config.peer.connect_timeout_ms / 1000, (deadline - time.monotonic()) / 2)
        stream = 0
        try:
            stream, link, is_new = streams.get(peer, max(timeout, 0.001), lane)
            link.request([keys[n] for n, _ in wanted])
        except (KVPoolError, OSError) as e:
            streams.drop(stream)
            self.peers.mark_down(peer)
            self.stats.add("peer_errors", "refused" if isinstance(e, RefusedError) else "unreachable")
            return False
        self.peers.mark_up(peer)
        for place, (n, found) in enumerate(wanted):
            status = OpenStatus.STREAM_NEW_CONN if is_new and place == 0 else OpenStatus.STREAM
            opened[n] = OpenResult(status, Tier.PEER, stream, found.payload_len, keys[n], link.fileno())
        return True

    def _fetch(
        self,
        tenant: Tenant,
        peer: NodeInfo,
        wanted: list[tuple[int, ReplicaLocation]],
        keys: Sequence[bytes],
        opened: list[OpenResult],
        deadline: float,
        streams: PeerStreams,
    ) -> list[tuple[int, ReplicaLocation]]:
        """Read what RDMA can bring; the rest, for a stream."""
        if self.fetcher is None:
            return wanted
        now = time.monotonic()
        slots = self.fetcher.fetch(
            peer, [ReadRequest(keys[n], f.payload_len) for n, f in wanted], tenant.tag, now + (deadline - now) / 2
        )
        rest = []
        for (n, found), slot in zip(wanted, slots, strict=True):
            if slot is None:
                rest.append((n, found))
                continue
            streams.hold(slot)
            opened[n] = OpenResult(OpenStatus.FILE, Tier.PEER, 0, found.payload_len, keys[n], os.dup(slot.descriptor))
        return rest

    def _open_shared(
        self,
        tenants: Sequence[Tenant],
        block_ids: Sequence[bytes],
        keys: list[bytes],
        opened: list[OpenResult],
        deadline: float,
        *,
        verify: bool,
    ) -> None:
        """As _open_peers. Where the lookup has just seen a block it is looked for first, whose ever it is."""
        if self.shared is None:
            return
        rest = [n for n, entry in enumerate(opened) if entry.status == OpenStatus.MISS]
        if len(tenants) > 1:
            seen = {
                n: key
                for n in rest
                for t in reversed(tenants)
                if self.shared.is_known_present(key := t.block_key(block_ids[n]))
            }
            self._open_seen(seen, keys, opened, deadline, verify=verify)
        for tenant in tenants:
            rest = [n for n in rest if opened[n].status == OpenStatus.MISS]
            self._open_seen({n: tenant.block_key(block_ids[n]) for n in rest}, keys, opened, deadline, verify=verify)

    def _open_seen(
        self, wanted: dict[int, bytes], keys: list[bytes], opened: list[OpenResult], deadline: float, *, verify: bool
    ) -> None:
        """Open these of the shared tier, by their places in `opened`."""
        left = deadline - time.monotonic()
        if self.shared is None or not wanted or left <= 0:
            return
        if verify:
            wanted = {n: key for n, key in wanted.items() if self.shared.verify(key)}
        if self._prefetcher is not None and (others := [key for n, key in wanted.items() if keys[n] != key]):
            self._prefetcher.consumed(others)
        found = self.shared.open_many(list(wanted.values()), left)
        for (n, key), block in zip(wanted.items(), found, strict=True):
            if block is not None:
                keys[n] = key
                opened[n] = _file(key, Tier.SHARED, block)

    def begin(
        self, tenant: Tenant, block_id: bytes, payload_len: int
    ) -> tuple[BeginStatus, bytes, WriteTransaction | None]:
        """Status, key, and for WRITE a file for a block of `payload_len`."""
        key = tenant.block_key(block_id)
        if not 0 < payload_len <= self.config.cache.max_block_bytes:
            self.stats.add("refused", "too-large")
            return BeginStatus.REFUSED, key, None
        try:
            pending = self.local.begin(key, payload_len)
        except (TierFullError, OSError) as e:
            self.stats.add("refused", "full" if isinstance(e, TierFullError) else "io")
            return BeginStatus.REFUSED, key, None
        return (BeginStatus.HAVE, key, None) if pending is None else (BeginStatus.WRITE, key, pending)

    def commit(self, tenant: Tenant, block_id: bytes, pending: WriteTransaction, *, fill: bool) -> CommitStatus:
        """Publish a written file. REJECTED, and counted by reason, for whatever is wrong with it."""
        try:
            status = self.local.commit(pending, Expect(block_id, tenant.tag), fill=fill)
        except (CorruptBlockError, RefusedError, OSError) as e:
            self.stats.add("rejected", _REASONS.get(type(e), "io"))
            return CommitStatus.REJECTED
        if status == CommitStatus.STORED:
            self.stats.add("stored", "blocks")
            self.stats.add("stored", "bytes", pending.payload_len)
            self._announcer.announce(pending.key, pending.payload_len)
            if self._copier is not None:
                self._copier.enqueue(pending.key, pending.payload_len)
            self._on_stored()
        return status

    def report(self, tenants: Sequence[Tenant], corrupt: Sequence[bytes]) -> None:
        """A client found these blocks corrupt: have a look at them, whose ever of `tenants` they were."""
        for tenant, block_id in itertools.product(tenants, corrupt):
            key = tenant.block_key(block_id)
            self.peers.invalidate(key)
            self._inspector.report(key)


def close_files(opened: Sequence[OpenResult]) -> None:
    """Close the block files among `opened`."""
    for entry in opened:
        if entry.status == OpenStatus.FILE:
            os.close(entry.fd)


def _file(key: bytes, tier: Tier, found: Block) -> OpenResult:
    return OpenResult(OpenStatus.FILE, tier, 0, found.payload_len, key, found.fd)
