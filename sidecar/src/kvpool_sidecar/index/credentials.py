"""The password of the index as its file says now and, while it is being changed, the one before it.

Both reach the server and the nodes in any order. A node shows the new one first and, where the server does not know it
yet, the old one; it tells the operator which one was taken (`accepted`). The old one goes when every node was let in
with the new one, so that no connection is ever refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Passwords"]


class Passwords:
    """Thread-safe. `read` is asked for each new connection: the passwords as they are now, the newest first."""

    def __init__(self, read: Callable[[], Sequence[str]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: tuple[str, ...] = ("",)
        self._accepted: str | None = None

    @classmethod
    def fixed(cls, password: str) -> Passwords:
        """One that never changes; empty for a server without passwords."""
        return cls(lambda: (password,))

    def candidates(self) -> tuple[str, ...]:
        """What to show, in this order; never empty. What cannot be read stays as it was."""
        try:
            found = tuple(dict.fromkeys(self._read()))
        except (ConfigError, OSError):
            found = ()
        with self._lock:
            # an empty one stands for "no password" only where there is no other
            self._known = tuple(p for p in found if p) or (("",) if found else self._known)
            return self._known

    def accept(self, password: str) -> None:
        """The server let us in with it."""
        with self._lock:
            self._accepted = password

    @property
    def accepted(self) -> str:
        """The one that the server took last; empty before that."""
        with self._lock:
            return self._accepted or ""

    def is_rotated(self) -> bool:
        """Whether the server was last shown the newest, and took it."""
        newest = self.candidates()[0]
        with self._lock:
            return self._accepted == newest

    def __repr__(self) -> str:
        return "Passwords()"
