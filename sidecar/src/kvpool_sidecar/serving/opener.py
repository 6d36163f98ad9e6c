"""Opens blocks for reading: from the local drives, then from a peer, then from the shared tier.

Returns statuses and tiers of the wire protocol; messages are encoded in kvpool_sidecar.serving.messages. Every call
ends by its deadline, and a block that was not found by then is a miss.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError, RefusedError
from kvpool.protocol.wire import Flag, MissCause, OpenStatus, Tier
from kvpool_sidecar.peers.rdma.fetch import ReadRequest
from kvpool_sidecar.resilience.turn import end_turn
from kvpool_sidecar.serving.locator import first_local_key
from kvpool_sidecar.serving.stream_exchange import TooManyStreamsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.location_cache import ReplicaLocation
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher
    from kvpool_sidecar.replication.prefetch import Prefetcher
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.peer_streams import PeerStreams
    from kvpool_sidecar.storage.base import Block, Store
    from kvpool_sidecar.storage.shared.tier import SharedTier
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["BlockOpener", "OpenResult"]

_BYTES_PER_STREAM = 8 << 20  # a load of this size is worth a connection of its own


class OpenResult(NamedTuple):
    """One entry of an OPEN reply.

    `fd` is a block file, which the receiver closes. `token` is for dialing a new stream.
    """

    status: OpenStatus
    tier: Tier = Tier.MISS
    stream: int = 0
    payload_len: int = 0
    key: bytes = bytes(32)
    fd: int = -1
    why: MissCause = MissCause.ABSENT
    token: bytes = b""


@dataclass
class _OpenCall:
    """State of one call: `results` by position, and `keys` under which the blocks were found."""

    tenants: Sequence[Tenant]
    block_ids: Sequence[bytes]
    keys: list[bytes]
    deadline: float
    verify: bool
    streams: PeerStreams
    results: list[OpenResult] = field(default_factory=list)

    def misses(self) -> list[int]:
        return [n for n, entry in enumerate(self.results) if entry.status == OpenStatus.MISS]


class BlockOpener:
    """Opens blocks of this node, of peers and of the shared tier. Thread-safe; shared by all connections."""

    def __init__(
        self,
        config: ConfigHolder,
        local: Store,
        shared: SharedTier | None,
        resolver: BlockResolver,
        stats: Stats,
        fetcher: RdmaFetcher | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._config = config
        self.local = local
        self.shared = shared
        self.resolver = resolver
        self.fetcher = fetcher
        self._stats = stats
        self._prefetcher = prefetcher

    def open(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], flags: int, timeout_s: float, streams: PeerStreams
    ) -> list[OpenResult]:
        """Open blocks in order; the caller owns `fd` of FILE entries.

        `tenants`: the requesting tenant, then those whose blocks it may read.
        """
        deadline = time.monotonic() + timeout_s
        streams.release()
        keys = [first_local_key(self.local, tenants, block_id) for block_id in block_ids]
        call = _OpenCall(tenants, block_ids, keys, deadline, bool(flags & Flag.VERIFY), streams)
        if self._prefetcher is not None:
            self._prefetcher.consumed(keys)
        try:
            self._open_local(call)
            if not flags & Flag.LOCAL_ONLY:
                self._open_peers(call)
            self._open_shared(call)
        except BaseException:
            self.close_files(call.results)
            raise
        for tier, count in Counter(entry.tier for entry in call.results).items():
            self._stats.add("served", tier.name.lower(), count)
        return call.results

    def record_loaded(self, tenant: Tenant, block_ids: Sequence[bytes], unlisted: int) -> None:
        """Record that a client of `tenant` read local blocks by descriptors that it had, and `unlisted` others."""
        keys = [tenant.block_key(block_id) for block_id in block_ids]
        if self._prefetcher is not None:
            self._prefetcher.consumed(keys)
        self.local.record_opened(keys, tenant.tag, again=True)
        self._stats.add("served", Tier.LOCAL.name.lower(), len(keys) + unlisted)

    def close_files(self, results: Sequence[OpenResult]) -> None:
        """Close the block files among `results`. Does not wait for a shared file system."""
        files = [entry for entry in results if entry.status == OpenStatus.FILE]
        for entry in files:
            if entry.tier != Tier.SHARED:
                os.close(entry.fd)
        if self.shared is not None:
            self.shared.close_files([entry.fd for entry in files if entry.tier == Tier.SHARED])

    def _open_local(self, call: _OpenCall) -> None:
        """Append to `results`, so that the caller can close its entries if this fails."""
        if call.verify:
            end_turn()  # whole blocks are read
            valid = [time.monotonic() <= call.deadline and self._is_valid(key) for key in call.keys]
            blocks = [self.local.open(key) if ok else None for key, ok in zip(call.keys, valid, strict=True)]
        else:
            blocks = self.local.open_many(call.keys)
        for key, block in zip(call.keys, blocks, strict=True):
            call.results.append(
                OpenResult(OpenStatus.MISS, key=key) if block is None else _file(key, Tier.LOCAL, block)
            )
        opened = [key for key, block in zip(call.keys, blocks, strict=True) if block is not None]
        self.local.record_opened(opened, call.tenants[0].tag)

    def _is_valid(self, key: bytes) -> bool:
        return not self.local.contains(key) or self.local.verify(key)

    @staticmethod
    def _is_valid_in_shared(shared: SharedTier, key: bytes, deadline: float) -> bool:
        left = deadline - time.monotonic()
        return left > 0 and shared.verify(key, left)

    def _open_peers(self, call: _OpenCall) -> None:
        """Open the misses at peers; `keys` are updated to those under which the blocks were found."""
        by_peer: dict[NodeInfo, list[tuple[int, ReplicaLocation]]] = {}
        for n, location in sorted(
            self._resolve(call).items()
        ):  # a stream sends its blocks in the order of the block ids
            by_peer.setdefault(location.peer, []).append((n, location))
        for peer, located in by_peer.items():
            remaining = self._fetch_by_rdma(call, peer, located)
            if not remaining or not call.streams.available:
                continue
            total = sum(location.payload_len for _, location in remaining)
            count = max(1, min(self._config.current.peer.streams, len(remaining), total // _BYTES_PER_STREAM))
            for stream_index in range(count):
                if not self._request_stream(call, peer, stream_index, remaining[stream_index::count]):
                    break

    def _resolve(self, call: _OpenCall) -> dict[int, ReplicaLocation]:
        """Query the index for the peers that hold the misses, one tenant after the other."""
        rest = call.misses()
        located: dict[int, ReplicaLocation] = {}
        for tenant in call.tenants:
            left = call.deadline - time.monotonic()
            if not rest or left <= 0:
                break
            keys = [tenant.block_key(call.block_ids[n]) for n in rest]
            locations = self.resolver.locate(keys, left / 2)
            for n, key, location in zip(rest, keys, locations, strict=True):
                if location is not None:
                    call.keys[n], located[n] = key, location
            rest = [n for n in rest if n not in located]
        return located

    def _request_stream(
        self, call: _OpenCall, peer: NodeInfo, stream_index: int, located: list[tuple[int, ReplicaLocation]]
    ) -> bool:
        """Request these blocks on one connection to the peer; return False if the peer cannot be reached."""
        timeout = min(self._config.current.peer.connect_timeout_ms / 1000, (call.deadline - time.monotonic()) / 2)
        number = 0
        end_turn()
        try:
            number, stream, token = call.streams.get(peer, max(timeout, 0.001), stream_index)
            stream.request([(call.keys[n], location.payload_len) for n, location in located])
        except TooManyStreamsError:
            self._stats.add("refused", "streams")
            for n, _ in located:
                call.results[n] = call.results[n]._replace(why=MissCause.BUSY)
            return False
        except (KVPoolError, OSError) as e:
            call.streams.drop(number)
            self.resolver.mark_down(peer)
            self._stats.add("peer_errors", "refused" if isinstance(e, RefusedError) else "unreachable")
            for n, _ in located:
                call.results[n] = call.results[n]._replace(why=MissCause.PEER_UNREACHABLE)
            return False
        for position, (n, location) in enumerate(located):
            is_first = bool(token) and position == 0
            call.results[n] = OpenResult(
                OpenStatus.STREAM_DIAL if is_first else OpenStatus.STREAM,
                Tier.PEER,
                number,
                location.payload_len,
                call.keys[n],
                token=token if is_first else b"",
            )
        return True

    def _fetch_by_rdma(
        self, call: _OpenCall, peer: NodeInfo, located: list[tuple[int, ReplicaLocation]]
    ) -> list[tuple[int, ReplicaLocation]]:
        """Read blocks by RDMA; return those that need a stream."""
        if self.fetcher is None:
            return located
        end_turn()
        now = time.monotonic()
        slots = self.fetcher.fetch(
            peer,
            [ReadRequest(call.keys[n], location.payload_len) for n, location in located],
            call.tenants[0].tag,
            now + (call.deadline - now) / 2,
        )
        rest = []
        for (n, location), slot in zip(located, slots, strict=True):
            if slot is None:
                rest.append((n, location))
                continue
            call.streams.hold(slot)
            fd = os.dup(slot.descriptor)
            call.results[n] = OpenResult(OpenStatus.FILE, Tier.PEER, 0, location.payload_len, call.keys[n], fd)
        return rest

    def _open_shared(self, call: _OpenCall) -> None:
        """Open the misses in the shared tier.

        Keys that the preceding lookup has seen there are tried first, whichever tenant they belong to.
        """
        if self.shared is None:
            return
        rest = call.misses()
        if len(call.tenants) > 1:
            seen = {
                n: key
                for n in rest
                for tenant in reversed(call.tenants)
                if self.shared.is_known_present(key := tenant.block_key(call.block_ids[n]))
            }
            self._open_shared_keys(call, seen)
        for tenant in call.tenants:
            rest = [n for n in rest if call.results[n].status == OpenStatus.MISS]
            self._open_shared_keys(call, {n: tenant.block_key(call.block_ids[n]) for n in rest})

    def _open_shared_keys(self, call: _OpenCall, wanted: dict[int, bytes]) -> None:
        """Open these keys in the shared tier, by their position in `results`."""
        left = call.deadline - time.monotonic()
        if self.shared is None or not wanted or left <= 0:
            return
        if call.verify:
            wanted = {n: key for n, key in wanted.items() if self._is_valid_in_shared(self.shared, key, call.deadline)}
        if self._prefetcher is not None and (others := [key for n, key in wanted.items() if call.keys[n] != key]):
            self._prefetcher.consumed(others)
        blocks = self.shared.open_many(list(wanted.values()), left)
        for (n, key), block in zip(wanted.items(), blocks, strict=True):
            if block is not None:
                call.keys[n] = key
                call.results[n] = _file(key, Tier.SHARED, block)


def _file(key: bytes, tier: Tier, block: Block) -> OpenResult:
    return OpenResult(OpenStatus.FILE, tier, 0, block.payload_len, key, block.fd)
