"""The one interface of an index. Calls may block up to their timeout; what fails raises RetryableError.

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

__all__ = ["MAX_NODE", "Index", "IndexAnswer", "IndexFullError", "NodeInfo"]

MAX_NODE = 0xFFFF
_MAX_TEXT = 253


class NodeInfo(NamedTuple):
    """What a node says of itself. `generation`: see Record. `leaving`: it is drained: ask it, rely on nothing."""

    node: str
    host: str
    port: int
    generation: int
    leaving: bool = False

    def dumps(self) -> str:
        return json.dumps(self._asdict(), sort_keys=True)

    @classmethod
    def loads(cls, text: bytes | str) -> NodeInfo | None:
        """None for anything that no node would write."""
        try:
            value = json.loads(text)
            leaving = value.get("leaving", False) is True  # a sidecar of before this field does not say
            info = cls(value["node"], value["host"], value["port"], value["generation"], leaving)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not (isinstance(info.node, str) and isinstance(info.host, str) and 0 < len(info.host) <= _MAX_TEXT):
            return None
        if not (isinstance(info.port, int) and 0 < info.port < 65536 and isinstance(info.generation, int)):
            return None
        return info


class IndexFullError(RetryableError):
    """The index has no memory left for anything new; it still answers."""


class IndexAnswer(NamedTuple):
    """To Index.ask. `unknown`: nodes of which nobody could tell just now whether their lease holds."""

    records: list[tuple[Record, ...]]
    nodes: Mapping[int, NodeInfo]
    unknown: frozenset[int] = frozenset()


class Index(abc.ABC):
    """Soft state shared by the nodes of a pool."""

    @abc.abstractmethod
    def join(self, info: NodeInfo) -> int:
        """Register; the node's number: the same as before if the index still knows it and nobody else has it."""

    @abc.abstractmethod
    def renew(self, number: int, info: NodeInfo) -> str | None:
        """Extend the lease; the epoch, which changes when the index was emptied. None: the number is another node's."""

    @abc.abstractmethod
    def leave(self, number: int, info: NodeInfo) -> None:
        """End the lease now."""

    @abc.abstractmethod
    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        """These blocks are there. Telling it twice changes nothing."""

    @abc.abstractmethod
    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        """Node `number` no longer has these. Best effort: a reader finds out by itself."""

    @abc.abstractmethod
    def query(self, keys: Sequence[bytes], numbers: Sequence[int]) -> IndexAnswer:
        """Where each block is said to be, in the order of `keys`, and those of the nodes whose lease holds.

        One round trip for all of it.
        """

    def locate(self, keys: Sequence[bytes]) -> list[tuple[Record, ...]]:
        """Where each block is said to be, in the order of `keys`. One round trip."""
        return self.query(keys, ()).records

    def nodes(self, numbers: Sequence[int]) -> Mapping[int, NodeInfo]:
        """Those of the nodes whose lease holds. One round trip."""
        return self.query((), numbers).nodes

    @abc.abstractmethod
    def live_nodes(self) -> IndexAnswer:
        """All nodes whose lease holds; not for the path of requests."""

    @abc.abstractmethod
    def expire(self, number: int, pace: Callable[[int], bool]) -> int:
        """Remove the entries of nodes that have not been heard of for `forget_s`; how many were removed.

        One node at a time does it, and it is done once in `forget_s`; else 0. `pace(n)` is called after every n entries
        that were looked at; it may sleep, and False ends it.
        """

    def members(self) -> list[NodeInfo]:
        """The nodes whose lease holds, this one too. Slow: for the background."""
        return list(self.live_nodes().nodes.values())

    def warm(self, connections: int) -> None:  # noqa: B027 - nothing to do is a fine default
        """Have so many connections ready, so that no lookup pays for making one."""

    def close(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Let go of connections."""
