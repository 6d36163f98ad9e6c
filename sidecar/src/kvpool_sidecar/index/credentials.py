"""The index password as its file contains it now and, during a rotation, the previous one.

Both reach the server and the nodes in any order. A node tries the new password first and, if the server does not know
it yet, the old one; it reports to the operator which one was accepted (`accepted`). The old one is removed when every
node was admitted with the new one, so that no connection is ever refused.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["IndexCredentials", "Passwords"]


class Passwords:
    """Thread-safe. `read` is called for each new connection and returns the current passwords, the newest first."""

    def __init__(self, read: Callable[[], Sequence[str]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: tuple[str, ...] = ("",)
        self._accepted: str | None = None

    @classmethod
    def fixed(cls, password: str) -> Passwords:
        """A password that never changes; empty for a server without passwords."""
        return cls(lambda: (password,))

    def candidates(self) -> tuple[str, ...]:
        """Passwords to try, in this order; never empty. The previous ones if they cannot be read."""
        try:
            found = tuple(dict.fromkeys(self._read()))
        except (ConfigError, OSError):
            found = ()
        with self._lock:
            # an empty one means "no password" only if there is no other
            self._known = tuple(p for p in found if p) or (("",) if found else self._known)
            return self._known

    def accept(self, password: str) -> None:
        """Record that the server accepted this password."""
        with self._lock:
            self._accepted = password

    @property
    def accepted(self) -> str:
        """The password that the server accepted last; empty before that."""
        with self._lock:
            return self._accepted or ""

    def is_rotated(self) -> bool:
        """Return whether the server last accepted the newest password."""
        newest = self.candidates()[0]
        with self._lock:
            return self._accepted == newest

    def __repr__(self) -> str:
        return "Passwords()"


@dataclass(frozen=True)
class IndexCredentials:
    """User, passwords (None: those of the URL) and the paths of the TLS files; all files may be rotated."""

    username: str = ""
    passwords: Passwords | None = None
    ca: str = ""
    cert: str = ""
    key: str = ""
