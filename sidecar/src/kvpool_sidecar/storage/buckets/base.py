"""Interface of an object store: objects by name below one prefix. `object_store` knows the block format.

Names consist of digits, letters, `/`, `-` and `.`. An object appears whole or not at all.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PIECE", "Bucket", "ObjectInfo"]

PIECE = 4 << 20  # maximum bytes of an object in memory, for each call


class ObjectInfo(NamedTuple):
    """An object: its name below the folder, bytes, and when it was stored or touched.

    `stored_at` is Unix seconds by the store's clock; None if the store does not report it.
    """

    name: str
    size: int
    stored_at: float | None


class Bucket(abc.ABC):
    """Thread-safe. OSError without secrets if the server fails; every call ends in bounded time."""

    url: str  # for messages

    @abc.abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size in bytes of the object; None if it is absent."""

    @abc.abstractmethod
    def get_to_fd(self, name: str, fd: int, size: int) -> None:
        """Write the object's `size` bytes to `fd` from its start. FileNotFoundError; OSError if it is cut short."""

    @abc.abstractmethod
    def get_prefix(self, name: str, fd: int, size: int) -> None:
        """Write the object's first `size` bytes to `fd`. FileNotFoundError; OSError if it has fewer."""

    @abc.abstractmethod
    def put(self, name: str, fd: int, size: int) -> bool:
        """Create an object from the first `size` bytes of `fd`. False if it exists, where the store can detect that."""

    @abc.abstractmethod
    def copy(self, name: str, to: str) -> None:
        """Copy an object, on the server where supported."""

    @abc.abstractmethod
    def delete(self, name: str) -> bool:
        """Delete an object. False if it did not exist."""

    @abc.abstractmethod
    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Each object below `folder` (`ab/abcd`), there and one folder further down, in no order."""

    def names(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield name and size of each object below `folder`."""
        for found in self.list(folder):
            yield found.name, found.size

    def touch(self, name: str) -> bool:
        """Update the object's time. False if that is unsupported or the object does not exist."""
        return False

    def close(self) -> None:  # noqa: B027 - no resources is a valid default
        """Close connections."""
