"""One collection of a shared tier by the lease holder: removes expired blocks, then blocks above the capacity.

A first walk counts and applies the ages; a second one removes what the plan selects, if any. Both are rate-limited. The
lease is checked before each removal; losing it ends the collection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.shared_gc.orphans import remove_orphans
from kvpool_sidecar.shared_gc.plan import CollectionLimits, Group, Inventory, Model, make_plan, superseded
from kvpool_sidecar.shared_gc.walk import LeafDirectory, WalkResult, leaves, read_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.shared_gc.metadata import TierMetadata
    from kvpool_sidecar.shared_gc.plan import CollectionPlan

__all__ = ["Collection", "CollectionContext", "CollectionStoppedError", "LeaseLostError", "entry_rate_limiter"]

log = logging.getLogger(__name__)

_SAFE_AGE_S = 3600.0
_EMPTY_AGE_S = 600.0
_SUPERSEDED_S = 7 * 86400.0
_READ_ALL = 1 << 17  # headers read for accounting alone; beyond that a sample


class LeaseLostError(Exception):
    """Another sidecar holds the lease."""


class CollectionStoppedError(Exception):
    """The process is ending."""


def entry_rate_limiter(entries_per_s: float, wait: Callable[[float], bool]) -> RateLimiter:
    """Limit the directory entries per second. `wait(seconds)` is True when the process ends: CollectionStoppedError."""

    def wait_or_stop(seconds: float) -> bool:
        if wait(seconds):
            raise CollectionStoppedError
        return False

    return RateLimiter(lambda: entries_per_s, wait_or_stop, min_pause_s=0.02)


class CollectionResult(NamedTuple):
    """Result: what is left, in total and per tenant, and what was removed."""

    used: int
    blocks: int
    tenants: dict[bytes, int]
    removed_blocks: int
    removed_bytes: int


class CollectionContext(NamedTuple):
    """What a collection needs of its collector."""

    now: Callable[[], float]  # the mount's time
    is_lease_held: Callable[[], bool]
    rate_limiter: RateLimiter
    on_removed: Callable[[str, int, bytes | None], None]  # reason, bytes, key (None: the file is no block)


class Collection:
    """`expected`: approximate number of blocks; 0 if unknown. `grace_s`: precision of access times."""

    def __init__(
        self,
        tier: TierMetadata,
        limits: CollectionLimits,
        context: CollectionContext,
        *,
        expected: int = 0,
        grace_s: float = 0.0,
    ) -> None:
        self._tier = tier
        self._limits = limits
        self._now, self._is_lease_held, self._rate_limiter, self._on_removed = context
        self._grace_s = grace_s
        self._mask = 0 if limits.by_tenant or limits.max_age_s else _mask(expected)
        self._as_of = self._now()  # ages are counted up to here, in both walks
        self._first = secrets.randbelow(256)  # sweeps that are cut short do not always begin with the same blocks
        self._removed_blocks = 0
        self._removed_bytes = 0

    def run(self, concurrent_writes: Callable[[], int]) -> CollectionResult:
        """`concurrent_writes()`: bytes stored meanwhile that the first walk did not meet.

        LeaseLostError, CollectionStoppedError, OSError.
        """
        inventory = self._count()
        for reason, size in remove_orphans(
            self._tier,
            self._now(),
            safe_age_s=_SAFE_AGE_S,
            model_age_s=4 * _SUPERSEDED_S,
            is_lease_held=self._is_lease_held,
        ):
            self._on_removed(reason, size, None)
            self._rate_limiter.acquire(1)
        plan = make_plan(inventory, self._limits, self._superseded(inventory), concurrent_writes=concurrent_writes())
        size, blocks, tenants = inventory.bytes, inventory.blocks, inventory.tenants()
        if plan:
            log.info("the shared tier holds %d blocks, %d bytes: making room", blocks, size)
            before_blocks, before_bytes = self._removed_blocks, self._removed_bytes
            self._make_room(plan, tenants)
            blocks -= self._removed_blocks - before_blocks
            size -= self._removed_bytes - before_bytes
        return CollectionResult(size, blocks, tenants, self._removed_blocks, self._removed_bytes)

    def _count(self) -> Inventory:
        inventory = Inventory()
        for leaf in leaves(self._tier.blocks, self._tier.device, self._first):
            entries = 0
            for found in leaf.blocks():
                entries += 1
                self._visit(leaf, found, inventory)
            if not entries:
                self._remove_empty(leaf)
            self._rate_limiter.acquire(max(1, entries))
        return inventory

    def _visit(self, leaf: LeafDirectory, found: WalkResult, inventory: Inventory) -> None:
        now = self._as_of
        age = now - found.used_at
        is_read = self._is_read(found)
        known = read_owner(leaf, found) if is_read else None
        limits = self._limits.of(known.group.tenant if known is not None else b"")
        if limits.idle_s and age > limits.idle_s + self._grace_s:
            self._remove(leaf, found, "idle")
            return
        # the writer's clock may be ahead
        made = min(known.made_at, found.used_at) if known is not None else found.used_at
        if known is not None and limits.max_age_s and now - made > limits.max_age_s:
            self._remove(leaf, found, "age")
            return
        inventory.add(found.size, age)
        if is_read:
            group = known.group if known is not None else Group()
            inventory.attribute(group, found.size, age, now - made, self._mask + 1)

    def _superseded(self, inventory: Inventory) -> list[Group]:
        models: dict[bytes, Model] = {}
        for name, fingerprint, stamped in folder.notes(self._tier.sweep, folder.MODEL):
            digest = folder.read_note(self._tier.sweep, name).get("model")
            if isinstance(digest, str):
                models[bytes.fromhex(fingerprint)] = Model(digest, self._now() - stamped)
        return superseded(inventory, models, _SUPERSEDED_S)

    def _is_read(self, found: WalkResult) -> bool:
        """Sample by key: keys are uniformly distributed."""
        return int.from_bytes(found.key[-4:], "big") & self._mask == 0

    def _make_room(self, plan: CollectionPlan, tenants: dict[bytes, int]) -> None:
        for leaf in leaves(self._tier.blocks, self._tier.device, self._first):
            entries = 0
            for found in leaf.blocks():
                entries += 1
                is_read = self._is_read(found)
                known = read_owner(leaf, found) if plan.reads_headers or is_read else None
                group = known.group if known is not None else Group()
                reason = plan.reason(group, found.size, self._as_of - found.used_at)
                if reason and self._remove(leaf, found, reason) and is_read:
                    left = tenants.get(group.tenant, 0) - found.size * (self._mask + 1)
                    tenants[group.tenant] = max(0, left)
            self._rate_limiter.acquire(max(1, entries))

    def _remove(self, leaf: LeafDirectory, found: WalkResult, reason: str) -> bool:
        if not self._is_lease_held():
            raise LeaseLostError
        try:
            os.unlink(found.name, dir_fd=leaf.fd)
        except FileNotFoundError:
            return False
        self._removed_blocks += 1
        self._removed_bytes += found.size
        self._on_removed(reason, found.size, found.key)
        return True

    def _remove_empty(self, leaf: LeafDirectory) -> None:
        """The kernel refuses it unless it is empty; a writer that was about to use it makes it again."""
        if self._now() - os.fstat(leaf.fd).st_mtime < _EMPTY_AGE_S:
            return
        if not self._is_lease_held():
            raise LeaseLostError
        with contextlib.suppress(OSError):
            os.rmdir(leaf.inner, dir_fd=leaf.parent)
            os.rmdir(leaf.outer, dir_fd=self._tier.blocks)


def _mask(expected: int) -> int:
    """Return the mask of key bits that must be zero for a header to be read."""
    return (1 << max(0, (expected // _READ_ALL).bit_length())) - 1
