"""What an object store is asked for: objects by name below one prefix. The block format and its checks are `objects`.

Names are made by us alone (digits, letters, `/`, `-`, `.`). An object appears whole or not at all.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PIECE", "Bucket", "ObjectInfo"]

PIECE = 4 << 20  # most bytes of an object that are in memory at a time, for each call


class ObjectInfo(NamedTuple):
    """An object: its name below the folder, bytes, and when it was stored or touched.

    `stored_at` is Unix seconds by the store's clock; None if it does not tell.
    """

    name: str
    size: int
    stored_at: float | None


class Bucket(abc.ABC):
    """Thread-safe. OSError where the other side fails, its text free of secrets; every call ends in bounded time."""

    url: str  # for messages

    @abc.abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of the object; None if there is none."""

    @abc.abstractmethod
    def get_to_fd(self, name: str, fd: int, size: int) -> None:
        """Write the object's `size` bytes to `fd` from its start. FileNotFoundError; OSError if it is cut short."""

    @abc.abstractmethod
    def get_prefix(self, name: str, fd: int, size: int) -> None:
        """Write the object's first `size` bytes to `fd`. FileNotFoundError; OSError if it has fewer."""

    @abc.abstractmethod
    def put(self, name: str, fd: int, size: int) -> bool:
        """Make an object of the first `size` bytes of `fd`; False if there was one, where that can be told."""

    @abc.abstractmethod
    def copy(self, name: str, to: str) -> None:
        """Copy an object, without its bytes coming here where that can be had."""

    @abc.abstractmethod
    def delete(self, name: str) -> bool:
        """False if there was none."""

    @abc.abstractmethod
    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Each object below `folder` (`ab/abcd`), there and one folder further down, in no order."""

    def names(self, folder: str) -> Iterator[tuple[str, int]]:
        """Name and size of the same."""
        for found in self.list(folder):
            yield found.name, found.size

    def touch(self, name: str) -> bool:
        """Have the store stamp the object anew. False where that cannot be had, or there is none."""
        return False

    def close(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Let go of connections."""
