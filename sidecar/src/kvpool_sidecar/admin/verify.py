"""Verify: read every block of one tier and compare its checksum, at a bandwidth.

parameters: `tier`: Local or Shared; `bytes_per_s`. counts: blocks and bytes that were read, corrupt (quarantined, and
withdrawn from the index). A block that goes meanwhile is passed over. Reading does not count as a use, and what was not
in the page cache before is not left there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, PoolUnavailableError, ProtocolError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.replication.prefetch import in_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.resilience.rate_limiter import RateLimiter
    from kvpool_sidecar.storage.base import Block
    from kvpool_sidecar.storage.local.drive import Drive
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["Verify"]

_SCAN_POLL_S = 0.2


class Verify:
    """A kind of operation."""

    def __init__(self, local: LocalStore, shared: SharedTier | None) -> None:
        self._local = local
        self._shared = shared

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        rate, tier = params.get("bytes_per_s"), params.get("tier")
        if params.keys() - {"bytes_per_s", "tier"} or isinstance(rate, bool) or not isinstance(rate, int) or rate <= 0:
            raise ProtocolError("verify: give tier and bytes_per_s, a number above 0, and nothing else")
        for label in ("blocks", "bytes", "corrupt"):
            context.count(label, 0)
        pace = context.pace(rate)
        if tier == "Local":
            while not self._local.scanned:
                if context.cancelled.wait(_SCAN_POLL_S):
                    context.check()
            self._verify_local(context, pace)
        elif tier == "Shared" and self._shared is not None:
            self._verify_shared(self._shared, context, pace)
        else:
            raise ProtocolError("verify: tier is Local, or Shared where the pool has one")

    def _verify_local(self, context: Context, pace: RateLimiter) -> None:
        total, seen = self._local.usage().blocks, 0
        for root in self._local.drives:
            for key, size in root.keys():  # noqa: SIM118 - not a dictionary
                context.check()
                if root.health.fenced:
                    raise PoolUnavailableError("the drive returned errors or did not answer", where=root.name)
                seen += 1
                pace.settle()
                found = root.peek(key)
                if found is not None:
                    pace.acquire(HEADER_BYTES + size, 0.0)
                    self._note(context, size, is_good=_is_good(root, key, found))
                context.progress(seen, max(seen, total), "blocks")

    def _verify_shared(self, shared: SharedTier, context: Context, pace: RateLimiter) -> None:
        for seen, (key, size) in enumerate(shared.store.keys(), 1):
            context.check()
            if not shared.available:
                raise PoolUnavailableError(f"the shared tier is not available: {shared.problem or 'no answer'}")
            pace.settle()
            if shared.store.contains(key):  # else it was swept meanwhile
                pace.acquire(HEADER_BYTES + size, 0.0)
                is_good = shared.verify(key)
                if not is_good and shared.store.contains(key):
                    raise PoolUnavailableError("the shared tier: a block could not be read", key=key.hex())
                self._note(context, size, is_good=is_good)
            context.progress(seen, max(seen, shared.store.usage().blocks), "blocks")

    @staticmethod
    def _note(context: Context, size: int, *, is_good: bool) -> None:
        context.count("blocks")
        context.count("bytes", HEADER_BYTES + size)
        if not is_good:
            context.count("corrupt")


def _is_good(root: Drive, key: bytes, found: Block) -> bool:
    """A block that is not is quarantined. It is closed."""
    fd, size = found
    try:
        was_in_memory = size > 0 and in_memory(fd, HEADER_BYTES + size)
        blockfile.verify(fd, key, size)
        if not was_in_memory:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except (CorruptBlockError, OSError):  # a bad spot on the drive is as bad
        root.quarantine(key)
        return False
    finally:
        os.close(fd)
    return True
