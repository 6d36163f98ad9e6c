"""Feed of block events for routers, in order: a bounded queue, and the set of all tracked blocks behind it.

Storing or removing a block never waits: an event that finds the queue full empties it, and all blocks are published
again after a `CLEARED` event. A tenant's blocks are published once the tenant's name is known.

Routers index a block below its parent, so parents are published first: a block whose parent comes later (a scan reads
files in any order) is published again after it.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import keys as names
from kvpool.protocol.router_blocks import NO_ROUTER_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.protocol.block import BlockHeader, EngineBlock
    from kvpool_sidecar.counters import Stats

__all__ = ["Event", "EventFeed", "EventKind", "Locality"]

_MAX_BLOCKS = 1 << 18
_MAX_QUEUED = 1 << 16
_MAX_TENANTS = 1 << 14
_MAX_FEW = 1 << 10
_AGAIN_S = 60.0
_MAX_DETAILS = 64 << 20  # bytes of the engine's blocks and their tokens, of all tracked blocks
_ID = 16  # bytes of a block id that identify a tracked block of a tenant


class Locality(enum.IntFlag):
    NOWHERE = 0
    LOCAL = 1  # this node's drives
    SHARED = 2  # the shared tier


class EventKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class Event(NamedTuple):
    """`name` is None for CLEARED. `place`: one."""

    kind: EventKind
    name: EngineBlock | None = None
    place: Locality = Locality.NOWHERE
    tenant: str = ""
    fingerprint: bytes = b""


class _TrackedBlock:
    __slots__ = ("fingerprint", "is_rooted", "name", "place", "tag")

    def __init__(self, name: EngineBlock, tag: bytes, fingerprint: bytes) -> None:
        self.name = name
        self.tag = tag
        self.fingerprint = fingerprint
        self.place = Locality.NOWHERE
        self.is_rooted = True  # its parents were published before it

    @property
    def own_id(self) -> bytes:
        """Identify the block within the node, for its children."""
        return self.tag + names.block_id(self.fingerprint, self.name.engine_hash, self.name.part)[:_ID]

    @property
    def parent_id(self) -> bytes:
        """`own_id` of the parent; empty without one."""
        if not self.name.parent_hash:
            return b""
        return self.tag + names.block_id(self.fingerprint, self.name.parent_hash, self.name.part)[:_ID]


class EventFeed:
    """Thread-safe; nothing here blocks. `wake` is called when there is something to take.

    `tokens_of`: the tenant whose token ids are published; then blocks of no other tenant are. Empty: no token ids.
    """

    def __init__(
        self,
        stats: Stats,
        *,
        tokens_of: str = "",
        max_details: int = _MAX_DETAILS,
        max_blocks: int = _MAX_BLOCKS,
        max_queued: int = _MAX_QUEUED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._stats = stats
        self._tokens_of = tokens_of
        self._max_details = max_details
        self._details = 0
        self._max_blocks = max_blocks
        self._max_queued = max_queued
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _TrackedBlock] = {}
        self._shared_only: OrderedDict[bytes, None] = OrderedDict()  # tracked blocks that are on the shared tier only
        self._tenants: dict[bytes, str] = {}  # name by tag
        self._queue: deque[Event] = deque([Event(EventKind.CLEARED)])
        self._pending: dict[bytes, None] = {}  # blocks to publish in their state at that time
        self._keys: dict[bytes, bytes] = {}  # key of a tracked block by its own_id
        self._orphans: dict[bytes, dict[bytes, None]] = {}  # keys of blocks that are not rooted, by their parent_id
        self._interned: dict[bytes, bytes] = {}
        self._gap = False
        self._restart_at = self._present_at = 0.0  # earliest time of the next one
        self._is_restart_due = self._is_present_due = False

    def tenant(self, tag: bytes, name: str) -> None:
        """Register the tenant `name` of the blocks with this tag."""
        with self._lock:
            if tag in self._tenants or len(self._tenants) >= _MAX_TENANTS:
                return
            if self._tokens_of and name != self._tokens_of:
                return
            self._tenants[tag] = name
            self._pending.update((key, None) for key, known in self._blocks.items() if known.tag == tag)
        self.wake()

    def stored(self, key: bytes, header: BlockHeader) -> None:
        """Record a block that was stored on this node's drives."""
        name = header.engine_block
        if name is None:
            self._stats.add("kv_events_lost", "unnamed")
            return
        if names.block_id(header.fingerprint, name.engine_hash, name.part) != header.block_id:
            self._stats.add("kv_events_lost", "false-name")
            return
        with self._lock:
            if key not in self._blocks and not self._make_room():
                self._stats.add("kv_events_lost", "too-many")
                return
            known = self._blocks.get(key)
            is_new = known is None
            if known is None:
                known = self._track(key, name, header)
            self._shared_only.pop(key, None)
            self._add(known, Locality.LOCAL)
            if is_new and known.is_rooted:
                self._root_descendants(known)
        self.wake()

    def shared(self, key: bytes) -> None:
        """Record that the shared tier has a copy of a local block."""
        with self._lock:
            known = self._blocks.get(key)
            if known is None:
                return
            self._add(known, Locality.SHARED)
        self.wake()

    def removed(self, keys: Iterable[bytes], place: Locality) -> None:
        """Record blocks that are no longer at `place`."""
        with self._lock:
            found = [(key, known) for key in keys if (known := self._blocks.get(key)) is not None]
            for key, known in found:
                self._remove(key, known, place)
        if found:
            self.wake()

    def sample_shared(self, count: int) -> list[bytes]:
        """Return tracked blocks that are only on the shared tier, different ones at each call."""
        with self._lock:
            return list(self._shared_only) if len(self._shared_only) <= count else self._rotate(count)

    def resend_all(self) -> None:
        """Publish all blocks again for a subscriber that missed more than can be replayed; at most once a minute."""
        with self._lock:
            self._is_restart_due = True
            self._resend_if_due()
        self.wake()

    def resend_present(self) -> None:
        """Publish all blocks again for a new subscriber, without `CLEARED` for the others; at most once a minute."""
        with self._lock:
            self._is_present_due = True
            self._resend_if_due()
        self.wake()

    def pop_batch(self, limit: int) -> tuple[list[Event], bool]:
        """Take the next events, about `limit` or a prompt's whole chain; True if events before them were lost."""
        events: list[Event] = []
        with self._lock:
            self._resend_if_due()
            gap, self._gap = self._gap, False
            while self._queue and len(events) < limit:
                events.append(self._queue.popleft())
            while self._pending and not self._queue and len(events) < limit:
                for key in self._pop_pending():
                    known = self._blocks[key]
                    events += [self._event(EventKind.STORED, known, place) for place in known.place]
        return [event for event in events if event.kind is EventKind.CLEARED or event.tenant], gap

    @property
    def queued(self) -> int:
        """Number of events and blocks that wait."""
        return len(self._queue) + len(self._pending)

    @property
    def tracked_blocks(self) -> int:
        """Number of tracked blocks."""
        return len(self._blocks)

    def _track(self, key: bytes, name: EngineBlock, header: BlockHeader) -> _TrackedBlock:
        details = name.router_blocks if self._tokens_of else name.router_blocks.without_tokens()
        if details and self._details + details.size > self._max_details:
            self._stats.add("kv_events_lost", "details")
            details = NO_ROUTER_BLOCKS
        self._details += details.size if details else 0
        name = replace(name, router_blocks=details)
        known = _TrackedBlock(name, self._intern(header.tenant_tag), self._intern(header.fingerprint))
        self._blocks[key] = known
        self._keys[known.own_id] = key
        if parent_id := known.parent_id:
            parent = self._blocks.get(self._keys.get(parent_id, b""))
            known.is_rooted = parent is not None and parent.is_rooted
            if not known.is_rooted:
                self._orphans.setdefault(parent_id, {})[key] = None
        return known

    def _untrack(self, key: bytes, known: _TrackedBlock) -> None:
        del self._blocks[key]
        self._shared_only.pop(key, None)
        self._pending.pop(key, None)
        self._keys.pop(known.own_id, None)
        if known.name.router_blocks:
            self._details -= known.name.router_blocks.size
        if not known.is_rooted:
            orphans = self._orphans.get(known.parent_id, {})
            orphans.pop(key, None)
            if not orphans:
                self._orphans.pop(known.parent_id, None)

    def _root_descendants(self, known: _TrackedBlock) -> None:
        """Publish the blocks again that came before this parent; each of them once."""
        rooted = [known]
        while rooted:
            for key in self._orphans.pop(rooted.pop().own_id, {}):
                child = self._blocks[key]
                child.is_rooted = True
                self._pending.pop(key, None)
                self._pending[key] = None
                rooted.append(child)

    def _pop_pending(self) -> list[bytes]:
        """Take the next block to publish, after those of its parents that wait too: a whole chain."""
        key: bytes | None = next(iter(self._pending))
        chain: list[bytes] = []
        while key is not None and key in self._pending:
            del self._pending[key]
            chain.append(key)
            key = self._keys.get(self._blocks[key].parent_id)
        return chain[::-1]

    def _intern(self, text: bytes) -> bytes:
        """Intern bytes that occur in many blocks."""
        if len(self._interned) >= _MAX_FEW:
            self._interned.clear()
        return self._interned.setdefault(text, text)

    def _add(self, known: _TrackedBlock, place: Locality) -> None:
        if not known.place & place:
            known.place |= place
            self._put(self._event(EventKind.STORED, known, place))

    def _remove(self, key: bytes, known: _TrackedBlock, place: Locality) -> None:
        if not known.place & place:
            return
        known.place &= ~place
        if known.place == Locality.SHARED:
            self._shared_only[key] = None
        elif not known.place:
            self._untrack(key, known)
        self._put(self._event(EventKind.REMOVED, known, place))

    def _make_room(self) -> bool:
        """Drop a block that is only on the shared tier: lookups still find it."""
        if len(self._blocks) < self._max_blocks:
            return True
        if not self._shared_only:
            return False
        key = next(iter(self._shared_only))
        self._remove(key, self._blocks[key], Locality.SHARED)
        return True

    def _rotate(self, count: int) -> list[bytes]:
        some = [self._shared_only.popitem(last=False)[0] for _ in range(count)]
        self._shared_only.update(dict.fromkeys(some))
        return some

    def _event(self, kind: EventKind, known: _TrackedBlock, place: Locality) -> Event:
        return Event(kind, known.name, place, self._tenants.get(known.tag, ""), known.fingerprint)

    def _put(self, event: Event) -> None:
        if not event.tenant:
            return  # published when the tenant's name is known
        if len(self._queue) >= self._max_queued:
            self._stats.add("kv_events_lost", "dropped", len(self._queue) + 1)
            self._restart()
            return
        self._queue.append(event)

    def _resend_if_due(self) -> None:
        now = self._clock()
        if self._is_restart_due and now >= self._restart_at:
            self._restart()
        if self._is_present_due and now >= self._present_at:
            self._is_present_due, self._present_at = False, now + _AGAIN_S
            self._pending = dict.fromkeys(self._blocks)

    def _restart(self) -> None:
        self._gap = True
        self._is_restart_due, self._restart_at = False, self._clock() + _AGAIN_S
        self._queue.clear()
        self._queue.append(Event(EventKind.CLEARED))
        self._pending = dict.fromkeys(self._blocks)
