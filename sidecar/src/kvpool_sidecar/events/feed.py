"""Feed of block events for routers, in order: a bounded queue, and the set of all tracked blocks behind it.

Storing or removing a block never waits: an event that finds the queue full empties it, and all blocks are published
again after a `CLEARED` event. A tenant's blocks are published once the tenant's name is known.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import keys as names

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
    __slots__ = ("fingerprint", "name", "place", "tag")

    def __init__(self, name: EngineBlock, tag: bytes, fingerprint: bytes) -> None:
        self.name = name
        self.tag = tag
        self.fingerprint = fingerprint
        self.place = Locality.NOWHERE


class EventFeed:
    """Thread-safe; nothing here blocks. `wake` is called when there is something to take."""

    def __init__(
        self,
        stats: Stats,
        *,
        max_blocks: int = _MAX_BLOCKS,
        max_queued: int = _MAX_QUEUED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._stats = stats
        self._max_blocks = max_blocks
        self._max_queued = max_queued
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _TrackedBlock] = {}
        self._shared_only: OrderedDict[bytes, None] = OrderedDict()  # tracked blocks that are on the shared tier only
        self._tenants: dict[bytes, str] = {}  # name by tag
        self._queue: deque[Event] = deque([Event(EventKind.CLEARED)])
        self._pending: dict[bytes, None] = {}  # blocks to publish in their state at that time
        self._interned: dict[bytes, bytes] = {}
        self._gap = False
        self._again_at = 0.0

    def tenant(self, tag: bytes, name: str) -> None:
        """Register the tenant `name` of the blocks with this tag."""
        with self._lock:
            if tag in self._tenants or len(self._tenants) >= _MAX_TENANTS:
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
            if known is None:
                tag, fingerprint = self._intern(header.tenant_tag), self._intern(header.fingerprint)
                known = self._blocks[key] = _TrackedBlock(name, tag, fingerprint)
            self._shared_only.pop(key, None)
            self._add(known, Locality.LOCAL)
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
            if self._clock() < self._again_at:
                return
            self._restart()
        self.wake()

    def pop_batch(self, limit: int) -> tuple[list[Event], bool]:
        """Take the next events, about `limit` at most; True if events before them were lost."""
        events: list[Event] = []
        with self._lock:
            gap, self._gap = self._gap, False
            while self._queue and len(events) < limit:
                events.append(self._queue.popleft())
            while self._pending and not self._queue and len(events) < limit:
                key = next(iter(self._pending))
                del self._pending[key]
                if (known := self._blocks.get(key)) is not None:
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
            del self._blocks[key]
            self._shared_only.pop(key, None)
            self._pending.pop(key, None)
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

    def _restart(self) -> None:
        self._gap = True
        self._again_at = self._clock() + _AGAIN_S
        self._queue.clear()
        self._queue.append(Event(EventKind.CLEARED))
        self._pending = dict.fromkeys(self._blocks)
