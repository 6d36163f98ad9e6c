"""The roster of a pool's nodes in Redis: read once, then only what changed.

================ ====================================================================
`n:version`      counter of changes
`n:change:<v>`   number of the node that joined, left or changed its data; expires
`n:report:<n>`   lease of the reader that reports a change which the node did not
================ ====================================================================

A node publishes its own changes. Nodes that end without a word, or run a release that publishes nothing, are found by
probes: each heartbeat reads a few leases, of all nodes together several times those of the pool. So a heartbeat costs
the same in a pool of any size.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, Final

from kvpool.errors import RetryableError
from kvpool_sidecar.index.base import MAX_NODE, NodeInfo, RosterChange
from kvpool_sidecar.index.redis_connection import ConnectionFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvpool_sidecar.index.redis_connection import Reply
    from kvpool_sidecar.index.redis_topology import RedisTopology

__all__ = ["RedisRoster", "lease_name"]

_VERSION: Final = b"n:version"
_CHANGE_MS: Final = 600_000
_REPORT_MS: Final = 5000
_MEMBER_PROBES: Final = 4
_OTHER_PROBES: Final = 2
_MAX_READ: Final = 256  # changes of one heartbeat
_MAX_BEHIND: Final = 1024
_MAX_TRIES: Final = 3
_CHUNK: Final = 1024
_SMALL: Final = 1024
_SPREAD_S: Final = 0.03


def lease_name(number: int) -> bytes:
    """Name of a node's lease."""
    return b"n:%d" % number


class RedisRoster:
    """State of one reader. Not thread-safe, except `publish` and `everyone`.

    Reading all leases at the same time is what a large pool must not do: after a disturbance each node does it at a
    random time, within 30 ms for each node of the pool, and keeps what it knows until then.
    """

    def __init__(
        self,
        topology: RedisTopology,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._topology = topology
        self._lease_s = lease_s
        self._clock = clock
        self._jitter = jitter  # from 0 to 1
        self._members: dict[int, NodeInfo] = {}
        self._is_read = False
        self._read_all_at: float | None = 0.0
        self._seen = 0
        self._pending: dict[int, int] = {}  # changes that are not read yet, and how often they were not there
        self._last = 0  # the highest number
        self._quiet_until = 0.0
        self._cursor = int(jitter() * MAX_NODE)
        self._probes: list[int] = []
        self._replies: list[Reply] | None = None

    def publish(self, numbers: Collection[int]) -> None:
        """Count and name changed nodes. Best effort: probes find what is lost."""
        if not numbers:
            return
        with contextlib.suppress(RetryableError):
            (version,) = self._topology.execute([(b"INCRBY", _VERSION, len(numbers))])
            names = (b"n:change:%d" % (int(version) - n) for n in range(len(numbers)))
            self._topology.execute(
                [(b"SET", name, number, b"PX", _CHANGE_MS) for name, number in zip(names, numbers, strict=True)]
            )

    def disturb(self) -> None:
        """Believe no missing lease for two leases: the index was emptied or stood still, and all nodes renew theirs."""
        self._quiet_until = self._clock() + 2 * self._lease_s
        if self._is_read:
            self._schedule_reading_all(2 * self._lease_s)

    def everyone(self) -> dict[int, NodeInfo | None]:
        """Read all leases: the node of each number, None without one; those of an unavailable server are left out."""
        (count,) = self._topology.execute([(b"GET", b"nodes")])
        return self._read(range(1, _last_number(count) + 1))

    def names(self) -> list[bytes]:
        """Return the keys that the next refresh needs, for a caller that reads others at the same time."""
        self._probes = self._next_probes()
        return [_VERSION, b"nodes", *map(lease_name, self._probes)]

    def note(self, replies: list[Reply]) -> None:
        """Record the values of `names`, or ConnectionFailure, for the next refresh."""
        self._replies = replies

    def refresh(self) -> RosterChange:
        """Return the nodes that changed since the last call. RetryableError if no server answers."""
        if self._replies is None:
            self._replies = self._get(self.names())
        (version, count, *leases), probes = self._replies, self._probes
        self._replies = None
        if not isinstance(count, ConnectionFailure):
            self._last = _last_number(count)
        if not isinstance(version, ConnectionFailure):
            self._note_version(_int(version))
        if self._read_all_at is not None and self._clock() >= self._read_all_at:
            return self._read_everyone()
        changed = self._read(self._changed())
        found = {n: _node(reply) for n, reply in zip(probes, leases, strict=True) if _is_answer(reply)}
        differing = {n: info for n, info in found.items() if n not in changed and info != self._members.get(n)}
        if self._clock() < self._quiet_until:
            differing = {n: info for n, info in differing.items() if info is not None}
        self._report(differing)
        return self._apply({**changed, **differing})

    def _next_probes(self) -> list[int]:
        if not self._is_read or not self._last:
            return []
        self._cursor = (self._cursor + _MEMBER_PROBES) % (1 << 30)
        at = self._cursor % max(1, len(self._members))
        members = itertools.islice(itertools.chain(self._members, self._members), at, at + _MEMBER_PROBES)
        others = ((self._cursor * _OTHER_PROBES // _MEMBER_PROBES + n) % self._last + 1 for n in range(_OTHER_PROBES))
        return list(dict.fromkeys([*members, *others]))

    def _note_version(self, version: int) -> None:
        if not self._is_read:
            if self._read_all_at == 0.0 and self._last > _SMALL:
                self._schedule_reading_all()
        elif version < self._seen:  # the index was emptied
            self.disturb()
        elif version - self._seen + len(self._pending) > max(_MAX_BEHIND, len(self._members) // 2):
            self._pending.clear()
            self._schedule_reading_all()
        else:
            self._pending.update(dict.fromkeys(range(self._seen + 1, version + 1), 0))
        self._seen = version

    def _schedule_reading_all(self, delay_s: float = 0.0) -> None:
        spread = self._last * _SPREAD_S if self._last > _SMALL else 0.0
        if not self._read_all_at:
            self._read_all_at = self._clock() + delay_s + self._jitter() * spread

    def _changed(self) -> set[int]:
        """Read which nodes the next pending changes are about."""
        versions = list(itertools.islice(self._pending, _MAX_READ))
        numbers: set[int] = set()
        replies = self._get([b"n:change:%d" % v for v in versions])
        for version, reply in zip(versions, replies, strict=True):
            if isinstance(reply, bytes):
                numbers.add(_int(reply))
                del self._pending[version]
            elif reply is None and self._pending[version] >= _MAX_TRIES:  # its writer ended, or it has expired
                del self._pending[version]
                self._schedule_reading_all()
            else:
                self._pending[version] += 1
        return {n for n in numbers if 0 < n <= MAX_NODE}

    def _report(self, differing: Collection[int]) -> None:
        """Publish what probes found, unless another reader does."""
        if not differing:
            return
        with contextlib.suppress(RetryableError):
            claims = [(b"SET", b"n:report:%d" % n, b"", b"NX", b"PX", _REPORT_MS) for n in differing]
            replies = self._topology.execute(claims, partly=True)
            self.publish([n for n, reply in zip(differing, replies, strict=True) if _is_answer(reply) and reply])

    def _read_everyone(self) -> RosterChange:
        found = self._read(range(1, self._last + 1))
        change = self._apply({**dict.fromkeys(n for n in self._members if n > self._last), **found})
        self._pending.clear()
        self._read_all_at, self._is_read = None, True
        return change

    def _apply(self, found: dict[int, NodeInfo | None]) -> RosterChange:
        alive = {n: info for n, info in found.items() if info is not None and info != self._members.get(n)}
        gone = frozenset(n for n, info in found.items() if info is None and n in self._members)
        self._members.update(alive)
        for number in gone:
            del self._members[number]
        return RosterChange(alive, gone)

    def _read(self, numbers: Iterable[int]) -> dict[int, NodeInfo | None]:
        found: dict[int, NodeInfo | None] = {}
        rest = iter(numbers)
        while some := list(itertools.islice(rest, _CHUNK)):
            replies = self._topology.read([lease_name(n) for n in some])
            found.update({n: _node(reply) for n, reply in zip(some, replies, strict=True) if _is_answer(reply)})
        return found

    def _get(self, names: Sequence[bytes]) -> list[Reply]:
        return self._topology.execute([(b"GET", name) for name in names], partly=True) if names else []


def _is_answer(reply: Reply) -> bool:
    return not isinstance(reply, ConnectionFailure)


def _node(reply: Reply) -> NodeInfo | None:
    return NodeInfo.loads(reply) if isinstance(reply, bytes) else None


def _int(reply: Reply) -> int:
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else 0


def _last_number(count: Reply) -> int:
    """The highest number that a node can have; numbers follow the counter, and start again after MAX_NODE."""
    return min(_int(count) + 1, MAX_NODE)
