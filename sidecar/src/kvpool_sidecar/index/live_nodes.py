"""Which nodes of the pool are alive, as this node knows. No I/O, no lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_sidecar.index.base import IndexAnswer, NodeInfo, RosterChange

__all__ = ["LiveNodes"]

_DEAD_S: Final = 0.5
_MOVED_S: Final = 0.2  # then a node that was not reached may have a new address: sidecars are replaced


class LiveNodes:
    """Not thread-safe. `now` is monotonic.

    A node of the roster is alive until a change says otherwise, while changes are read. Nodes that were queried one by
    one, such as those that are not in the roster yet, are alive for `lease_s`; a dead one is queried again after 0.5 s.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._roster: dict[int, NodeInfo] = {}
        self._roster_until = float("-inf")
        self._queried: dict[int, tuple[NodeInfo | None, float]] = {}  # valid until; None: dead. Before the roster
        self._strangers: set[int] = set()

    def all(self, now: float) -> dict[int, NodeInfo]:
        """Return the nodes that are alive."""
        live = dict(self._roster) if self._roster_until > now else {}
        for number, (info, until) in self._queried.items():
            if info is None:
                live.pop(number, None)
            elif until > now:
                live[number] = info
        return live

    def get(self, number: int, now: float) -> tuple[NodeInfo | None, bool]:
        """Return a node as last read, and whether that still holds."""
        queried = self._queried.get(number)
        if queried is not None:
            return queried[0], queried[1] > now
        info = self._roster.get(number)
        return info, info is not None and self._roster_until > now

    def note_answer(self, numbers: Iterable[int], answer: IndexAnswer, now: float) -> None:
        """Record the answer to a query for these nodes."""
        for number in numbers:
            if number in answer.unknown:
                continue
            info = answer.nodes.get(number)
            if info is not None and number in self._roster and self._roster_until > now:
                self._roster[number] = info
                self._queried.pop(number, None)
            else:  # a dead node is queried again soon: it may restart
                self._queried[number] = (info, now + (self._lease_s if info else _DEAD_S))
        for number in [n for n, (_, until) in self._queried.items() if until < now - self._lease_s]:
            del self._queried[number]

    def note_roster(self, change: RosterChange, now: float) -> None:
        """Record what changed in the roster; the rest of it holds for another lease."""
        self._roster_until = now + self._lease_s
        for number, info in change.alive.items():
            self._roster[number] = info
            self._queried.pop(number, None)
        for number in change.gone:
            self._roster.pop(number, None)
            self._queried[number] = (None, now + _DEAD_S)

    def note_moved(self, peer: NodeInfo, now: float) -> None:
        """Query this node soon: it was not reached."""
        for number in [n for n, info in self._roster.items() if info == peer]:
            self._queried.setdefault(number, (peer, now + _MOVED_S))
            self._strangers.add(number)  # no lookup may ask for it
        for number, (info, until) in self._queried.items():
            if info == peer:
                self._queried[number] = (info, min(until, now + _MOVED_S))

    def note_strangers(self, numbers: Iterable[int], now: float) -> None:
        """Count these nodes as dead until they are queried."""
        for number in numbers:
            self._queried.setdefault(number, (None, now))
            self._strangers.add(number)

    def take_strangers(self) -> list[int]:
        """Return the noted strangers, once."""
        strangers, self._strangers = self._strangers, set()
        return list(strangers)
