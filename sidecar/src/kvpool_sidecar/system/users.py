"""Kernel users of storage servers. Descriptors in flight are counted per user, so no pod may have the same one."""

from __future__ import annotations

__all__ = ["DEFAULT_USER", "is_server_user"]

DEFAULT_USER = 65532
_FIRST, _COUNT = 2_000_000_000, 100_000_000  # kvpool_operator.desired.users derives a pool's user from this range


def is_server_user(uid: int) -> bool:
    """Whether some release of the operator may have run a storage server as this user."""
    return uid == DEFAULT_USER or _FIRST <= uid < _FIRST + _COUNT
