"""Copies blocks of peers to this node's drives in the background, in a given order, without evicting anything.

Who decides what is copied is another matter: warm-up copies the hottest (kvpool_sidecar.replication.warm_up). A node
that leaves
has others take its blocks one at a time (kvpool_sidecar.replication.drain_target).
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, KVPoolError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.peers.fetch import fetch_block
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.resilience.rate_limiter import RateLimiter
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["CopyRequest", "CopyResult", "Replicator"]

log = logging.getLogger(__name__)

_DIAL_S = 2.0


class CopyRequest(NamedTuple):
    """A block, and who has it; the first that delivers is taken."""

    key: bytes
    payload_len: int
    sources: tuple[NodeInfo, ...]


class CopyResult(enum.Enum):
    DONE = "done"  # all that could be had
    FULL = "full"  # the next block would need room that eviction must make
    CUT = "cut"  # a peer was lost, or `stop`


class Replicator:
    """One thread at a time. `family` names the counters."""

    def __init__(
        self,
        local: LocalStore,
        dial: Callable[[NodeInfo, float], PeerConnection],
        *,
        max_block_bytes: int,
        stats: Stats,
        family: str,
        stop: threading.Event,
        on_stored: Callable[[bytes, int], None],
        on_corrupt: Callable[[bytes], None],
    ) -> None:
        self._local = local
        self._dial = dial
        self._max_block_bytes = max_block_bytes
        self._stats = stats
        self._family = family
        self._stop = stop
        self._on_stored = on_stored
        self._on_corrupt = on_corrupt
        self._bad: set[tuple[bytes, NodeInfo]] = set()

    def copy(self, wanted: Iterable[CopyRequest], pace: RateLimiter) -> CopyResult:
        """Copy what is not here yet, in order. Blocks that a peer does not deliver are passed over."""
        links: dict[NodeInfo, PeerConnection] = {}
        lost: set[NodeInfo] = set()
        try:
            for one in wanted:
                if self._stop.is_set():
                    return CopyResult.CUT
                if self._local.contains(one.key) or not 0 < one.payload_len <= self._max_block_bytes:
                    continue
                if self._local.headroom_for(one.key) < HEADER_BYTES + one.payload_len:
                    return CopyResult.FULL
                self._copy_one(one, links, lost, pace)
        finally:
            for link in links.values():
                link.close()
        return CopyResult.CUT if lost or self._stop.is_set() else CopyResult.DONE

    def _copy_one(
        self, one: CopyRequest, links: dict[NodeInfo, PeerConnection], lost: set[NodeInfo], pace: RateLimiter
    ) -> None:
        for peer in one.sources:
            if peer in lost or (one.key, peer) in self._bad:
                continue
            try:
                link = links.get(peer) or links.setdefault(peer, self._dial(peer, _DIAL_S))
                outcome = fetch_block(link, one.key, one.payload_len, self._local, pace)
            except CorruptBlockError as e:
                log.warning("node %s sent a block that is not right: %s", peer.node, e)
                self._stats.add(self._family, "corrupt")
                self._bad.add((one.key, peer))
                self._on_corrupt(one.key)
                continue
            except TierFullError:
                self._stats.add(self._family, "refused")
                return
            except (KVPoolError, OSError) as e:
                lost.add(peer)
                if (broken := links.pop(peer, None)) is not None:
                    broken.close()
                if not self._stop.is_set():
                    self._stats.add(self._family, "lost-peers")
                    log.info("copying from node %s: %s", peer.node, e)
                continue
            if outcome is CommitOutcome.STORED:
                self._stats.add(self._family, "blocks")
                self._stats.add(self._family, "bytes", HEADER_BYTES + one.payload_len)
                self._on_stored(one.key, one.payload_len)
            if outcome is not None:
                return
            self._stats.add(self._family, "missing")  # gone there, or the peer has too much to do
