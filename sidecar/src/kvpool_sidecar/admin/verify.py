"""Operation `verify`: read every block of one tier at a limited bandwidth and compare its checksum.

Parameters: `tier`: Local or Shared; `bytes_per_s`. Counts: blocks and bytes read, and corrupt (quarantined and
withdrawn from the index). Blocks that are removed meanwhile are skipped. Reading does not count as an access, and
blocks that were not in the page cache before are dropped from it.
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

_SCAN_POLL_INTERVAL_S = 0.2


class Verify:
    """Operation `verify`."""

    def __init__(self, local: LocalStore, shared: SharedTier | None) -> None:
        self._local = local
        self._shared = shared

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        rate, tier = params.get("bytes_per_s"), params.get("tier")
        if params.keys() - {"bytes_per_s", "tier"} or isinstance(rate, bool) or not isinstance(rate, int) or rate <= 0:
            raise ProtocolError(
                "verify: tier and bytes_per_s (a number above 0) are required, and nothing else is allowed"
            )
        for label in ("blocks", "bytes", "corrupt"):
            context.count(label, 0)
        pace = context.pace(rate)
        if tier == "Local":
            while not self._local.scanned:
                if context.cancelled.wait(_SCAN_POLL_INTERVAL_S):
                    context.check()
            self._verify_local(context, pace)
        elif tier == "Shared" and self._shared is not None:
            self._verify_shared(self._shared, context, pace)
        else:
            raise ProtocolError("verify: tier must be Local, or Shared if the pool has a shared tier")

    def _verify_local(self, context: Context, pace: RateLimiter) -> None:
        total, seen = self._local.usage().blocks, 0
        for drive in self._local.drives:
            for key, size in drive.keys():  # noqa: SIM118 - not a dictionary
                context.check()
                if drive.health.fenced:
                    raise PoolUnavailableError("the drive returned errors or did not answer", where=drive.name)
                seen += 1
                pace.settle()
                block = drive.peek(key)
                if block is not None:
                    pace.acquire(HEADER_BYTES + size, 0.0)
                    self._count(context, size, is_valid=_is_valid(drive, key, block))
                context.set_progress(seen, max(seen, total), "blocks")

    def _verify_shared(self, shared: SharedTier, context: Context, pace: RateLimiter) -> None:
        for seen, (key, size) in enumerate(shared.store.keys(), 1):
            context.check()
            if not shared.available:
                raise PoolUnavailableError(f"the shared tier is not available: {shared.problem or 'no answer'}")
            pace.settle()
            if shared.store.contains(key):  # otherwise it was removed meanwhile
                pace.acquire(HEADER_BYTES + size, 0.0)
                is_valid = shared.verify(key)
                if not is_valid and shared.store.contains(key):
                    raise PoolUnavailableError("the shared tier: a block could not be read", block_key=key.hex())
                self._count(context, size, is_valid=is_valid)
            context.set_progress(seen, max(seen, shared.store.usage().blocks), "blocks")

    @staticmethod
    def _count(context: Context, size: int, *, is_valid: bool) -> None:
        context.count("blocks")
        context.count("bytes", HEADER_BYTES + size)
        if not is_valid:
            context.count("corrupt")


def _is_valid(drive: Drive, key: bytes, block: Block) -> bool:
    """Verify and close a block; a corrupt one is quarantined."""
    fd, size = block
    try:
        was_cached = size > 0 and in_memory(fd, HEADER_BYTES + size)
        blockfile.verify(fd, key, size)
        if not was_cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except (CorruptBlockError, OSError):  # an unreadable block is as bad as a corrupt one
        drive.quarantine(key)
        return False
    finally:
        os.close(fd)
    return True
