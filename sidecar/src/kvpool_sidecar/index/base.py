"""The interface of an index. Calls may block up to their timeout; failures raise RetryableError.

`kvpool_testing.index` is the contract as tests. Implementations are thread-safe.
"""

from __future__ import annotations

import abc
import json
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.index.record import Record

__all__ = ["MAX_NODE", "Index", "IndexAnswer", "IndexFullError", "NodeInfo", "RosterChange"]

MAX_NODE = 0xFFFF
_MAX_TEXT = 253


class NodeInfo(NamedTuple):
    """A node as registered in the index. `generation`: see Record. `leaving`: it is drained, the last choice."""

    node: str
    host: str
    port: int
    generation: int
    leaving: bool = False

    def dumps(self) -> str:
        return json.dumps(self._asdict(), sort_keys=True)

    @classmethod
    def loads(cls, text: bytes | str) -> NodeInfo | None:
        """Parse; None for anything that no node would write."""
        try:
            value = json.loads(text)
            leaving = value.get("leaving", False) is True  # absent in records of releases before this field
            info = cls(value["node"], value["host"], value["port"], value["generation"], leaving)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not (isinstance(info.node, str) and isinstance(info.host, str) and 0 < len(info.host) <= _MAX_TEXT):
            return None
        if not (isinstance(info.port, int) and 0 < info.port < 65536 and isinstance(info.generation, int)):
            return None
        return info


class IndexFullError(RetryableError):
    """The index has no memory for new entries; reads still work."""


class IndexAnswer(NamedTuple):
    """Result of Index.query. `unknown`: nodes whose lease could not be checked."""

    records: list[tuple[Record, ...]]
    nodes: Mapping[int, NodeInfo]
    unknown: frozenset[int] = frozenset()


class RosterChange(NamedTuple):
    """Result of Index.refresh_roster."""

    alive: Mapping[int, NodeInfo]
    gone: frozenset[int]


class Index(abc.ABC):
    """Soft state shared by the nodes of a pool."""

    @abc.abstractmethod
    def join(self, info: NodeInfo) -> int:
        """Register the node; its number, which stays the same if the index knows it and no other node holds it."""

    @abc.abstractmethod
    def renew(self, number: int, info: NodeInfo) -> str | None:
        """Extend the lease; the epoch, which changes when the index was emptied. None: the number is another node's."""

    @abc.abstractmethod
    def leave(self, number: int, info: NodeInfo) -> None:
        """End the lease now."""

    @abc.abstractmethod
    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        """Add entries for these blocks. Idempotent."""

    @abc.abstractmethod
    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        """Remove the entries of node `number` for these blocks. Best effort: readers detect stale entries."""

    @abc.abstractmethod
    def query(self, keys: Sequence[bytes], numbers: Sequence[int]) -> IndexAnswer:
        """Return the records of each block, in the order of `keys`, and the live nodes of `numbers`. One round trip."""

    def locate(self, keys: Sequence[bytes]) -> list[tuple[Record, ...]]:
        """Return the records of each block, in the order of `keys`. One round trip."""
        return self.query(keys, ()).records

    def nodes(self, numbers: Sequence[int]) -> Mapping[int, NodeInfo]:
        """Return the live nodes of `numbers`. One round trip."""
        return self.query((), numbers).nodes

    @abc.abstractmethod
    def live_nodes(self) -> IndexAnswer:
        """Return all nodes whose lease holds. Not for the request path."""

    @abc.abstractmethod
    def refresh_roster(self) -> RosterChange:
        """Return the nodes that changed since the last call; the first calls return those that were there before.

        For one caller, once a heartbeat: its cost does not grow with the number of nodes that did not change.
        """

    @abc.abstractmethod
    def expire(self, number: int, pace: Callable[[int], bool]) -> int:
        """Remove the entries of nodes without a heartbeat for `forget_s`; the number of removed entries.

        One node at a time does this, once in `forget_s`; otherwise the result is 0. `pace(n)` is called after every n
        scanned entries; it may sleep, and False ends the run.
        """

    def members(self) -> list[NodeInfo]:
        """Return the nodes whose lease holds, this one included. Slow: for background work."""
        return list(self.live_nodes().nodes.values())

    def warm(self, connections: int) -> None:  # noqa: B027 - optional
        """Open `connections` connections in advance, so that no lookup waits for one."""

    def close(self) -> None:  # noqa: B027 - optional
        """Close the connections."""
