"""Copies blocks of peers to this node's drives in the background, in a given order and without evicting anything.

Warm-up (kvpool_sidecar.replication.warm_up) selects the blocks and their order. A node that is drained has other nodes
fetch its blocks one at a time instead (kvpool_sidecar.replication.drain_target).
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, KVPoolError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockPromoted, CorruptBlockReported
from kvpool_sidecar.peers.fetch import fetch_block
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import Index, NodeInfo
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.peers.connection import PeerConnection, PeerDialer
    from kvpool_sidecar.resilience.rate_limiter import RateLimiter
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["CopyRequest", "CopyResult", "PeerAccess", "Replicator"]

log = logging.getLogger(__name__)

_DIAL_S = 2.0


@dataclass(frozen=True)
class PeerAccess:
    """Members of the pool, the replicas of their blocks, and connections to them. `own_node` is this node's name."""

    own_node: str
    index: Index
    resolver: BlockResolver
    dial: PeerDialer

    def peers(self) -> list[NodeInfo]:
        """The other nodes of the pool whose lease holds. KVPoolError if the index does not respond."""
        return [node for node in self.index.members() if node.node != self.own_node]


class CopyRequest(NamedTuple):
    """A block and the nodes that have it; they are tried in order."""

    key: bytes
    payload_len: int
    sources: tuple[NodeInfo, ...]


class CopyResult(enum.Enum):
    DONE = "done"  # every available block was copied
    FULL = "full"  # the next block does not fit without eviction
    CUT = "cut"  # a peer was lost, or the copy was stopped


class Replicator:
    """For one thread at a time. `family` names the counters. Emits BlockPromoted and CorruptBlockReported."""

    def __init__(
        self,
        local: LocalStore,
        dial: PeerDialer,
        events: BlockEvents,
        stats: Stats,
        *,
        max_block_bytes: int,
        family: str,
        stop: threading.Event,
    ) -> None:
        self._local = local
        self._dial = dial
        self._events = events
        self._stats = stats
        self._max_block_bytes = max_block_bytes
        self._family = family
        self._stop = stop
        self._corrupt: set[tuple[bytes, NodeInfo]] = set()

    def copy(
        self,
        requests: Iterable[CopyRequest],
        limiter: RateLimiter,
        on_copied: Callable[[int], None] = lambda _payload_len: None,
    ) -> CopyResult:
        """Copy missing blocks in order, and call `on_copied(payload_len)`. Blocks that no peer delivers are skipped."""
        links: dict[NodeInfo, PeerConnection] = {}
        lost: set[NodeInfo] = set()
        try:
            for request in requests:
                if self._stop.is_set():
                    return CopyResult.CUT
                if self._local.contains(request.key) or not 0 < request.payload_len <= self._max_block_bytes:
                    continue
                if self._local.largest_fit() < HEADER_BYTES + request.payload_len:
                    return CopyResult.FULL
                if self._copy_one(request, links, lost, limiter):
                    on_copied(request.payload_len)
        finally:
            for link in links.values():
                link.close()
        return CopyResult.CUT if lost or self._stop.is_set() else CopyResult.DONE

    def _copy_one(
        self,
        request: CopyRequest,
        links: dict[NodeInfo, PeerConnection],
        lost: set[NodeInfo],
        limiter: RateLimiter,
    ) -> bool:
        """Return whether a new copy was stored."""
        for peer in request.sources:
            if peer in lost or (request.key, peer) in self._corrupt:
                continue
            try:
                link = links.get(peer) or links.setdefault(peer, self._dial(peer, _DIAL_S))
                outcome = fetch_block(link, request.key, request.payload_len, self._local, limiter)
            except CorruptBlockError as e:
                log.warning("node %s sent a corrupt block: %s", peer.node, e)
                self._stats.add(self._family, "corrupt")
                self._corrupt.add((request.key, peer))
                self._events.emit(CorruptBlockReported(request.key))
                continue
            except TierFullError:
                self._stats.add(self._family, "refused")
                return False
            except (KVPoolError, OSError) as e:
                lost.add(peer)
                if (broken := links.pop(peer, None)) is not None:
                    broken.close()
                if not self._stop.is_set():
                    self._stats.add(self._family, "lost-peers")
                    log.info("copying blocks from node %s failed: %s", peer.node, e)
                continue
            if outcome is CommitOutcome.STORED:
                self._stats.add(self._family, "blocks")
                self._stats.add(self._family, "bytes", HEADER_BYTES + request.payload_len)
                self._events.emit(BlockPromoted(request.key, request.payload_len))
            if outcome is not None:
                return outcome is CommitOutcome.STORED
            self._stats.add(self._family, "missing")  # evicted there, or the peer is overloaded
        return False
