"""What routers are to be told, in order: a bounded queue in front of a list of everything that is here.

Whoever stores or removes a block never waits: an event that finds no room empties the queue, and everything is told
again from the beginning, after a `CLEARED`. A tenant's blocks are told once the tenant's name is known.
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
        self._shared_only: OrderedDict[bytes, None] = OrderedDict()  # of these, what is on the shared tier alone
        self._tenants: dict[bytes, str] = {}  # name by tag
        self._queue: deque[Event] = deque([Event(EventKind.CLEARED)])
        self._pending: dict[bytes, None] = {}  # to be told as they are when their turn comes
        self._interned: dict[bytes, bytes] = {}
        self._gap = False
        self._again_at = 0.0

    def tenant(self, tag: bytes, name: str) -> None:
        """Blocks with this tag are of the tenant `name`."""
        with self._lock:
            if tag in self._tenants or len(self._tenants) >= _MAX_TENANTS:
                return
            self._tenants[tag] = name
            self._pending.update((key, None) for key, known in self._blocks.items() if known.tag == tag)
        self.wake()

    def stored(self, key: bytes, header: BlockHeader) -> None:
        """A block is on this node's drives now."""
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
        """The shared tier has a copy of a block that is here."""
        with self._lock:
            known = self._blocks.get(key)
            if known is None:
                return
            self._add(known, Locality.SHARED)
        self.wake()

    def removed(self, keys: Iterable[bytes], place: Locality) -> None:
        """They are no longer there."""
        with self._lock:
            found = [(key, known) for key in keys if (known := self._blocks.get(key)) is not None]
            for key, known in found:
                self._remove(key, known, place)
        if found:
            self.wake()

    def sample_shared(self, count: int) -> list[bytes]:
        """Blocks that were told to be on the shared tier and nowhere else, other ones at each call."""
        with self._lock:
            return list(self._shared_only) if len(self._shared_only) <= count else self._rotate(count)

    def resend_all(self) -> None:
        """Somebody missed more than can be replayed; done once a minute at most."""
        with self._lock:
            if self._clock() < self._again_at:
                return
            self._restart()
        self.wake()

    def pop_batch(self, limit: int) -> tuple[list[Event], bool]:
        """The next events, at most about `limit`; True if events before them were lost."""
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
        """Events and blocks that are still to be told."""
        return len(self._queue) + len(self._pending)

    @property
    def tracked_blocks(self) -> int:
        """Blocks whose names are known."""
        return len(self._blocks)

    def _intern(self, text: bytes) -> bytes:
        """The same object for the same bytes, of which there are few."""
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
        """What is on the shared tier alone gives way: it is found by lookups all the same."""
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
            return  # told when the tenant's name is known
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
