"""Drains this node: copies hot blocks without a replica to the shared tier, or else to peers with headroom.

While the node is drained, blocks that were used within the last hour are copied, also those that are stored meanwhile,
if neither the shared tier nor a peer that remains has them: the hottest first and roots before leaves, at the requested
bandwidth. The index shows the peers that this node is drained, so that none relies on it or migrates blocks to it. The
node keeps serving; nothing is removed from it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool.errors import KVPoolError, TierFullError
from kvpool_sidecar.peers.migration import ReceiveResult
from kvpool_sidecar.replication.peer_selector import RECEIVE_S, Migration, PeerSelector
from kvpool_sidecar.replication.write_back import copy_block
from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.storage.shared.key_ring import NoKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpool_sidecar.blocks.popularity import PopularBlock
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.registration import IndexRegistration
    from kvpool_sidecar.replication.peer_copy import PeerAccess
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["FAMILY", "HOT_S", "NODE", "OPERATION", "DrainSource", "in_order"]

log = logging.getLogger(__name__)

FAMILY = "evacuated"
HOT_S = 3600.0
"""Blocks used within this many seconds are hot: the half-life of a block's popularity."""
NODE, OPERATION = "node", "operation"
"""Requesters of a drain: the node is going to be removed, or an operation migrates its blocks once."""
_MAX_BLOCKS = 1 << 17
_MAX_HEAT = 1 << 16
_BUCKET_S = 60.0
_ANNOUNCE_S = 2.0
_LOCATE_S = 2.0
_BATCH = 256
_RETRY_S = 2.0
_POLL_S = 10.0
_COPIED = ("shared", "peers")
_SETTLE_S = 5.0  # a recent copy may not be in the index yet


def in_order(hot: Sequence[PopularBlock], used: Iterable[tuple[bytes, int, float]]) -> list[Migration]:
    """Order the blocks to migrate: the most popular first (`hot` is sorted), then the most recently used.

    `used` are (key, payload length, idle seconds) of the local blocks; blocks of `hot` that are not local are left out.
    Among blocks used within the same minute the one used first comes first: a prompt is stored from its root on.
    """
    here = {key: Migration(key, payload_len, idle_s) for key, payload_len, idle_s in used}
    first = [here.pop(one.key) for one in hot if one.key in here]
    rest = sorted(here.values(), key=lambda move: (move.idle_s // _BUCKET_S, -move.idle_s))
    return (first + rest)[:_MAX_BLOCKS]


class DrainSource:
    """One thread while this node is drained. `shared` is None if nothing may be copied to the shared tier.

    `hottest(count, now)` returns the blocks that lookups requested most.
    """

    def __init__(
        self,
        local: LocalStore,
        shared: SharedTier | None,
        peers: PeerAccess,
        stats: Stats,
        *,
        registration: IndexRegistration,
        hottest: Callable[[int, float], Sequence[PopularBlock]],
        hot_s: float = HOT_S,
    ) -> None:
        self._local = local
        self._shared = shared
        self._peers = peers
        self._stats = stats
        self._registration = registration
        self._hottest = hottest
        self._hot_s = hot_s
        self._changed = threading.Condition()
        self._stop = threading.Event()  # of the current thread
        self._thread: threading.Thread | None = None
        self._bytes_per_s = 1
        self._clean = False
        self._remaining = (0, 0)  # blocks, bytes
        self._moved = (0, 0)
        self._problem = ""
        self._requesters: set[str] = set()
        self._new = False
        self._copied: dict[bytes, float] = {}

    @property
    def is_draining(self) -> bool:
        """True while this node is drained."""
        return self._thread is not None

    def start(self, bytes_per_s: int, requester: str = NODE) -> None:
        """Drain this node at `bytes_per_s`, until `requester` cancels. A second call changes only the bandwidth."""
        with self._changed:
            self._bytes_per_s = max(1, bytes_per_s)
            self._requesters.add(requester)
            if self._thread is not None:
                return
            self._clean, self._problem, self._remaining = False, "", (0, 0)
            self._moved = (0, 0)
            self._copied.clear()
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="evacuate", daemon=True)
            self._thread.start()
        log.info("drain started: hot blocks are migrated to the shared tier or to peers")

    def cancel(self, requester: str = "") -> None:
        """Cancel the drain for `requester`, or for all requesters. Copies that were made remain."""
        with self._changed:
            self._requesters -= {requester} if requester else set(self._requesters)
            if self._requesters:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
            self._changed.notify_all()
        if thread is not None:
            log.info("drain cancelled: %s", self.status())
            self._registration.set_draining(leaving=False, timeout_s=0.0)

    def on_stored(self) -> None:
        """Reconsider the node's blocks after one was stored, if the node is drained."""
        if self._thread is not None:
            with self._changed:
                self._new = True
                self._clean = False
                self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """For /status. `clean`: every hot block has a copy elsewhere. `problem`: why the last migration failed."""
        with self._changed:
            blocks, size = self._remaining
            return {
                "leaving": self._thread is not None,
                "leaving_for": sorted(self._requesters),
                "clean": self._clean,
                "moved_blocks": self._moved[0],
                "moved_bytes": self._moved[1],
                "remaining_blocks": blocks,
                "remaining_bytes": size,
                "problem": self._problem,
            }

    def wait(self, timeout_s: float) -> bool:
        """Wait until every hot block has a copy elsewhere; False after `timeout_s` or when the drain is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._clean or self._thread is None, timeout_s)
            return self._clean and self._thread is not None

    def _run(self, stop: threading.Event) -> None:
        limiter = RateLimiter(lambda: float(self._bytes_per_s), stop.wait)
        # announced first, so that of two nodes drained at the same time at least one sees the other
        while not stop.is_set() and not self._registration.set_draining(leaving=True, timeout_s=_ANNOUNCE_S):
            self._set_problem("the index does not respond")
            if self._shared is not None:
                break
        while not stop.is_set():
            moved = 0
            with self._changed:
                self._new = False
            try:
                wanted = self._pending()
                self._update_progress(stop, len(wanted), sum(move.size for move in wanted))
                moved = self._migrate(wanted, limiter, stop)
            except KVPoolError as e:
                self._set_problem(str(e))
            except Exception as e:
                self._set_problem(type(e).__name__)
                log.exception("migrating blocks failed")
            with self._changed:
                if not self._new and not stop.is_set() and not (moved and not self._clean):
                    self._changed.wait(_POLL_S if self._clean else _RETRY_S)

    def _update_progress(self, stop: threading.Event, blocks: int, size: int) -> None:
        with self._changed:
            if stop.is_set():
                return
            self._remaining = (blocks, size)
            self._clean = not blocks and not self._new
            if self._clean:
                self._problem = ""
            self._changed.notify_all()

    def _set_problem(self, problem: str) -> None:
        with self._changed:
            self._problem = problem[:200]

    def _pending(self) -> list[Migration]:
        """Hot local blocks without a copy elsewhere."""
        if not self._local.scanned:
            raise KVPoolError("the drives are still being scanned")
        now = time.monotonic()
        self._copied = {key: at for key, at in self._copied.items() if now - at < _SETTLE_S}
        moves = in_order(self._hottest(_MAX_HEAT, now), self._local.used_since(self._hot_s))
        draining = {self._peers.own_node}
        with contextlib.suppress(KVPoolError):  # then the cached state is used
            draining |= {node.node for node in self._peers.index.members() if node.leaving}
        found: list[Migration] = []
        for at in range(0, len(moves), _BATCH):
            some = [move for move in moves[at : at + _BATCH] if move.key not in self._copied]
            found += self._without_replica(some, draining)
        return found

    def _without_replica(self, moves: Sequence[Migration], draining: set[str]) -> list[Migration]:
        """Those without a known copy in the shared tier or on a peer that remains."""
        rest = list(moves)
        if rest and self._shared is not None and self._shared.available:
            there = self._shared.contains_many([move.key for move in rest], _LOCATE_S)
            rest = [move for move, is_there in zip(rest, there, strict=True) if not is_there]
        if rest:
            held = self._peers.resolver.replicas([move.key for move in rest], _LOCATE_S, staying=True)
            if held is not None:
                rest = [move for move, names in zip(rest, held, strict=True) if not names - draining]
        return rest

    def _migrate(self, wanted: Sequence[Migration], limiter: RateLimiter, stop: threading.Event) -> int:
        """Migrate these blocks as far as possible; the number that got a copy."""
        peers = PeerSelector(self._peers.own_node, self._peers.index.members, self._peers.dial)
        moved = 0
        left, left_bytes = len(wanted), sum(move.size for move in wanted)
        to_shared = self._shared is not None and self._shared.available
        try:
            for move in wanted:
                if stop.is_set():
                    break
                limiter.acquire(move.size, time.monotonic() + RECEIVE_S)
                where = "gone" if not self._local.contains(move.key) else ""
                if not where and to_shared:
                    to_shared, where = self._to_shared(move)
                if not where:
                    where = self._to_peer(move, peers)
                if where:
                    left, left_bytes = left - 1, left_bytes - move.size
                if where in _COPIED:
                    moved += 1
                    self._copied[move.key] = time.monotonic()
                    with self._changed:
                        self._moved = (self._moved[0] + 1, self._moved[1] + move.size)
                    self._stats.add(FAMILY, where)
                    self._stats.add(FAMILY, "bytes", move.size)
                self._update_progress(stop, left, left_bytes)
        finally:
            peers.close()
        return moved

    def _to_shared(self, move: Migration) -> tuple[bool, str]:
        """Return whether the shared tier takes further blocks, and where this block is now."""
        assert self._shared is not None  # noqa: S101
        try:
            copied = copy_block(self._local, self._shared.store, move.key)
        except TierFullError as e:
            self._set_problem(str(e))
            return False, ""
        except NoKeyError as e:  # the tier is not at fault, and takes blocks of other tenants
            self._set_problem(str(e))
            return True, ""
        except (KVPoolError, OSError) as e:
            self._shared.bulkhead.breaker.failure()
            self._set_problem(str(e))
            log.warning("copying block %s to the shared tier failed: %s", move.key.hex()[:16], e)
            return self._shared.available, ""
        if copied is None:
            return True, "gone"
        self._shared.bulkhead.breaker.success()
        self._shared.mark_present(move.key)
        self._local.mark_shared(move.key)
        return True, "shared"

    def _to_peer(self, move: Migration, peers: PeerSelector) -> str:
        result = peers.place(move)
        if result in (ReceiveResult.STORED, ReceiveResult.HAVE):
            return "peers"
        self._set_problem(peers.problem)
        self._stats.add(FAMILY, "failed")
        return ""
