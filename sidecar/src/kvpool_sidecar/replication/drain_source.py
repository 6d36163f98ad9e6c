"""A node that is drained moves what is hot and nowhere else: to the shared tier, else to peers that have room for it.

While it leaves, everything that was used within the last hour is looked after, also what is stored only now: what
neither the shared tier nor a peer that stays has is copied, the hottest first and roots before leaves, at the
bandwidth it was told. Its peers are told by the index, so none of them counts on it or gives it blocks. It goes on
serving all the while; nothing is removed from it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import KVPoolError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.peers import migration as moving
from kvpool_sidecar.peers.migration import ReceiveResult
from kvpool_sidecar.replication.write_back import copy_block
from kvpool_sidecar.resilience.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvpool_sidecar.blocks.popularity import PopularBlock
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["FAMILY", "HOT_S", "NODE", "OPERATION", "DrainSource", "Migration", "in_order"]

log = logging.getLogger(__name__)

FAMILY = "evacuated"
HOT_S = 3600.0
"""What was used within so many seconds is hot: the half-life of a block's heat."""
NODE, OPERATION = "node", "operation"
"""Why it is drained: the node is to leave, or an operation moves its blocks off once."""
_MAX_BLOCKS = 1 << 17
_MAX_HEAT = 1 << 16
_BUCKET_S = 60.0
_MAX_PEERS = 8
_ASK_AGAIN = 64  # blocks after which peers are asked anew what room they have
_ROOM_S = 2.0
_TELL_S = 2.0
_ADOPT_S = 30.0
_ELSEWHERE_S = 2.0
_BATCH = 256
_PAUSE_S = 2.0
_LOOK_S = 10.0
_COPIED = ("shared", "peers")
_SETTLE_S = 5.0  # a copy of a moment ago may not be in the index yet


class Migration(NamedTuple):
    """A block that is to have a copy elsewhere."""

    key: bytes
    payload_len: int
    idle_s: float

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.payload_len


def in_order(hot: Sequence[PopularBlock], used: Iterable[tuple[bytes, int, float]]) -> list[Migration]:
    """What to move, in order: what lookups found most (`hot` is sorted), then what was used last.

    `used` are (key, payload length, idle seconds) of the blocks that are here; others of `hot` are left out. Of blocks
    that were used within the same minute the one used first comes first: a prompt is stored from its root on.
    """
    here = {key: Migration(key, payload_len, idle_s) for key, payload_len, idle_s in used}
    first = [here.pop(one.key) for one in hot if one.key in here]
    rest = sorted(here.values(), key=lambda move: (move.idle_s // _BUCKET_S, -move.idle_s))
    return (first + rest)[:_MAX_BLOCKS]


class DrainSource:
    """One thread while this node leaves. `shared` is None where nothing may be copied there.

    `members` are the nodes of the pool, `holders` tells which staying peers have each block (None: nobody could tell).
    """

    def __init__(
        self,
        local: LocalStore,
        shared: SharedTier | None,
        own: str,
        *,
        hottest: Callable[[int, float], Sequence[PopularBlock]],
        members: Callable[[], Sequence[NodeInfo]],
        holders: Callable[[Sequence[bytes], float], list[set[str]] | None],
        dial: Callable[[NodeInfo, float], PeerConnection],
        tell: Callable[[bool, float], bool],
        stats: Stats,
        hot_s: float = HOT_S,
    ) -> None:
        self._local = local
        self._shared = shared
        self._own = own
        self._hottest = hottest
        self._members = members
        self._holders = holders
        self._dial = dial
        self._set_draining = tell
        self._stats = stats
        self._hot_s = hot_s
        self._changed = threading.Condition()
        self._stop = threading.Event()  # of the present thread
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
        """Is this node drained?"""
        return self._thread is not None

    def start(self, bytes_per_s: int, holder: str = NODE) -> None:
        """This node is to be drained, at so many bytes per second, until `holder` says `stay`.

        Called again, only the bandwidth changes.
        """
        with self._changed:
            self._bytes_per_s = max(1, bytes_per_s)
            self._requesters.add(holder)
            if self._thread is not None:
                return
            self._clean, self._problem, self._remaining = False, "", (0, 0)
            self._moved = (0, 0)
            self._copied.clear()
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="evacuate", daemon=True)
            self._thread.start()
        log.info("this node leaves: its hot blocks are moved")

    def cancel(self, holder: str = "") -> None:
        """As far as `holder` goes it is not drained (any more); none is named: whoever said so. Copies stay."""
        with self._changed:
            self._requesters -= {holder} if holder else set(self._requesters)
            if self._requesters:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
            self._changed.notify_all()
        if thread is not None:
            log.info("this node stays: %s", self.status())
            self._set_draining(False, 0.0)

    def on_stored(self) -> None:
        """A block was stored on this node: while it leaves, it must not be here alone."""
        if self._thread is not None:
            with self._changed:
                self._new = True
                self._clean = False
                self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """For /status. `clean`: everything hot is elsewhere, too. `problem`: why the last block could not be moved."""
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
        """Until everything hot is elsewhere, too; False after `timeout_s` or when this node stays."""
        with self._changed:
            self._changed.wait_for(lambda: self._clean or self._thread is None, timeout_s)
            return self._clean and self._thread is not None

    def _run(self, stop: threading.Event) -> None:
        pace = RateLimiter(lambda: float(self._bytes_per_s), stop.wait)
        # told before looking, so that of two nodes that leave at once one at least sees it of the other
        while not stop.is_set() and not self._set_draining(True, _TELL_S):
            self._set_problem("the index does not answer")
            if self._shared is not None:
                break
        while not stop.is_set():
            moved = 0
            with self._changed:
                self._new = False
            try:
                wanted = self._pending()
                self._update_progress(stop, len(wanted), sum(move.size for move in wanted))
                moved = self._migrate(wanted, pace, stop)
            except KVPoolError as e:
                self._set_problem(str(e))
            except Exception as e:
                self._set_problem(type(e).__name__)
                log.exception("moving blocks")
            with self._changed:
                if not self._new and not stop.is_set() and not (moved and not self._clean):
                    self._changed.wait(_LOOK_S if self._clean else _PAUSE_S)

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
        """What is hot, here, and nowhere else."""
        if not self._local.scanned:
            raise KVPoolError("the drives are still being scanned")
        now = time.monotonic()
        self._copied = {key: at for key, at in self._copied.items() if now - at < _SETTLE_S}
        moves = in_order(self._hottest(_MAX_HEAT, now), self._local.used_since(self._hot_s))
        leaving = {self._own}
        with contextlib.suppress(KVPoolError):  # then what is remembered of them must do
            leaving |= {node.node for node in self._members() if node.leaving}
        found: list[Migration] = []
        for at in range(0, len(moves), _BATCH):
            some = [move for move in moves[at : at + _BATCH] if move.key not in self._copied]
            found += self._without_replica(some, leaving)
        return found

    def _without_replica(self, moves: Sequence[Migration], leaving: set[str]) -> list[Migration]:
        """Those that neither the shared tier nor a peer that stays has, as far as one can tell."""
        rest = list(moves)
        if rest and self._shared is not None and self._shared.available:
            there = self._shared.contains_many([move.key for move in rest], _ELSEWHERE_S)
            rest = [move for move, is_there in zip(rest, there, strict=True) if not is_there]
        if rest:
            held = self._holders([move.key for move in rest], _ELSEWHERE_S)
            if held is not None:
                rest = [move for move, names in zip(rest, held, strict=True) if not names - leaving]
        return rest

    def _migrate(self, wanted: Sequence[Migration], pace: RateLimiter, stop: threading.Event) -> int:
        """Move these, as far as it goes; how many got a copy."""
        peers = PeerSelector(self._own, self._members, self._dial)
        moved = 0
        left, left_bytes = len(wanted), sum(move.size for move in wanted)
        to_shared = self._shared is not None and self._shared.available
        try:
            for move in wanted:
                if stop.is_set():
                    break
                pace.acquire(move.size, time.monotonic() + _ADOPT_S)
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
        """Whether the next block should be tried there, too; and where this one is now."""
        assert self._shared is not None  # noqa: S101
        try:
            copied = copy_block(self._local, self._shared.store, move.key)
        except TierFullError as e:
            self._set_problem(str(e))
            return False, ""
        except (KVPoolError, OSError) as e:
            self._shared.bulkhead.breaker.failure()
            self._set_problem(str(e))
            log.warning("copying %s to the shared tier: %s", move.key.hex()[:16], e)
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


class PeerSelector:
    """Those who may take blocks, for one pass."""

    def __init__(
        self, own: str, members: Callable[[], Sequence[NodeInfo]], dial: Callable[[NodeInfo, float], PeerConnection]
    ) -> None:
        self._own = own
        self._members = members
        self._dial = dial
        self._connections: dict[NodeInfo, PeerConnection] = {}
        self._headroom: dict[NodeInfo, moving.Headroom] = {}
        self._placed: int | None = None
        self.problem = ""

    def close(self) -> None:
        for link in self._connections.values():
            link.close()
        self._connections.clear()

    def place(self, move: Migration) -> ReceiveResult | None:
        """Have the peer with the most room take it; None if nobody does."""
        if self._placed is None or self._placed >= _ASK_AGAIN:
            self._poll_headroom()
        for peer, evict in _choices(self._headroom, move):
            result = self._request_receive(peer, move, evict=evict)
            if result in (ReceiveResult.STORED, ReceiveResult.HAVE):
                self._placed = (self._placed or 0) + 1
                room = self._headroom[peer]
                self._headroom[peer] = room._replace(spare_bytes=max(0, room.spare_bytes - move.size))
                return result
            if result == ReceiveResult.ABSENT:
                self.problem = "a peer did not find the block: the index may not know it yet"
                return result
            if result == ReceiveResult.FULL:
                self._headroom[peer] = self._headroom[peer]._replace(spare_bytes=0, coldest_idle_s=0.0)
            elif result != ReceiveResult.BUSY:
                self._headroom.pop(peer, None)
        self.problem = self.problem or ("no peer has room" if self._headroom else "there is no peer that stays")
        return None

    def _poll_headroom(self) -> None:
        self._placed = 0
        self.problem = ""
        peers = [node for node in self._members() if node.node != self._own and not node.leaving]
        chosen = secrets.SystemRandom().sample(peers, min(_MAX_PEERS, len(peers)))
        chosen += [peer for peer in self._connections if peer in peers and peer not in chosen]
        self._headroom.clear()
        for peer in chosen[: 2 * _MAX_PEERS]:
            try:
                room = moving.request_headroom(self._connection(peer), time.monotonic() + _ROOM_S)
            except (KVPoolError, OSError) as e:
                self._disconnect(peer, e)
            else:
                if not room.leaving:
                    self._headroom[peer] = room

    def _request_receive(self, peer: NodeInfo, move: Migration, *, evict: bool) -> ReceiveResult | None:
        try:
            return moving.request_receive(self._connection(peer), move.key, time.monotonic() + _ADOPT_S, evict=evict)
        except (KVPoolError, OSError) as e:
            self._disconnect(peer, e)
            return None

    def _connection(self, peer: NodeInfo) -> PeerConnection:
        link = self._connections.get(peer)
        if link is None:
            link = self._connections[peer] = self._dial(peer, _ROOM_S)
        return link

    def _disconnect(self, peer: NodeInfo, error: Exception) -> None:
        self.problem = f"node {peer.node}: {error}"
        log.info("moving blocks to node %s: %s", peer.node, error)
        if (link := self._connections.pop(peer, None)) is not None:
            link.close()


def _choices(rooms: Mapping[NodeInfo, moving.Headroom], move: Migration) -> list[tuple[NodeInfo, bool]]:
    """Whom to ask, and whether colder blocks may go for it: first who has room, the most room first."""
    roomy = [peer for peer, room in rooms.items() if room.spare_bytes >= move.size]
    others = [peer for peer, room in rooms.items() if peer not in roomy and move.idle_s < room.coldest_idle_s]
    roomy.sort(key=lambda peer: rooms[peer].spare_bytes, reverse=True)
    others.sort(key=lambda peer: rooms[peer].coldest_idle_s, reverse=True)
    return [(peer, False) for peer in roomy] + [(peer, True) for peer in others]
