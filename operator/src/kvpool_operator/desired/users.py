"""Kernel user of a pool's sidecars. The kernel counts descriptors in flight per user, so pods must not share it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["FIRST_USER", "LAST_USER", "USER", "Drive", "server_user"]

USER: Final = 65532
FIRST_USER: Final = 2_000_000_000
LAST_USER: Final = 2_099_999_999


class Drive(NamedTuple):
    """Directory of a local tier and the user that owns it."""

    path: str
    user: int


def server_user(pool: KVCachePool) -> int:
    """Return the user of the sidecars: of the spec, or one that is derived from the pool's uid.

    A shared directory is prepared by an administrator for a known user, and every node must own the same files there.
    """
    if pool.spec.nodes.run_as_user is not None:
        return pool.spec.nodes.run_as_user
    if any(tier.shared for tier in pool.spec.tiers):
        return USER
    digest = hashlib.sha256(f"kvpool user {pool.metadata.uid}".encode()).digest()
    return FIRST_USER + int.from_bytes(digest[:8], "big") % (LAST_USER - FIRST_USER + 1)
