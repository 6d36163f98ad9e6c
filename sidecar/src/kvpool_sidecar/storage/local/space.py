"""Space of a drive: reservations of writers, and eviction where the drive or its file system is short."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError
from kvpool_sidecar.blocks.events import DriveIncident
from kvpool_sidecar.storage.local.held import URGENT_GRACE_S
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from kvpool_sidecar.storage.local.node_eviction import NodeEviction
    from kvpool_sidecar.storage.local.removal import BlockRemover
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["SpaceManager"]

_MAX_PENDING = 1024
_HELD_PART = 16


class SpaceManager:
    """Keeps a drive within its limits. Thread-safe; `maintain` is called by one thread."""

    def __init__(self, state: DriveState, node: NodeEviction, remover: BlockRemover) -> None:
        self._state = state
        self._node = node
        self._remover = remover

    def reconfigure(self, limits: quota.CapacityLimits) -> None:
        """Apply other limits. Returns immediately; the next `maintain`, due now, enforces them."""
        with self._state.lock:
            self._state.limits = limits
        self._state.due.set()

    def has_room(self, need: int) -> bool:
        """Return whether `need` bytes fit below the high watermark, as far as is known without I/O."""
        state = self._state
        if not state.is_usable:
            return False
        with state.lock:
            used = self._occupied + need
            limit = state.limits.capacity * state.limits.high_percent // 100
            return used <= (limit if state.available_bytes is None else min(limit, state.available_bytes))

    def fill_ratio(self) -> float:
        """Return the share of the capacity that is occupied."""
        with self._state.lock:
            return self._occupied / max(1, self._state.room_bytes)

    @property
    def _occupied(self) -> int:
        """Bytes of blocks, of victims that are not unlinked yet, and of writers. The lock is held."""
        return self._state.used_bytes + self._state.doomed_bytes + self._state.pending_bytes

    def headroom_bytes(self) -> int:
        """Return the bytes that fit below the low watermark and the file system's reserve; 0 or less: none."""
        if self._state.health.fenced or not self._state.scanned:
            return 0
        info = os.fstatvfs(self._state.directory.blocks)
        with self._state.lock:
            used = self._occupied
        return quota.headroom(used, info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize, self._state.limits)

    def holds_too_much(self, tenant: bytes) -> bool:
        """See Store.holds_too_much: a sixteenth of the capacity."""
        limit = self._state.limits.capacity // _HELD_PART
        if self._state.held.by_tenant().get(tenant, 0) <= limit:
            return False
        self._state.held.settle()
        return self._state.held.by_tenant().get(tenant, 0) > limit

    def require_room(self, need: int) -> None:
        """Raise TierFullError if not even eviction of everything would make room for `need` bytes. Evicts nothing."""
        with self._state.lock:
            used = self._state.used_bytes
            self._require_within_capacity(need)
        if self._fs_shortfall(need) > used:
            raise TierFullError("the file system has no space to spare", where=self._state.name)

    def reserve(self, need: int) -> None:
        """Reserve `need` bytes after at most one eviction each for capacity and file system. TierFullError."""
        self._remover.remove_doomed()
        with self._state.lock:
            over = self._require_within_capacity(need)
            if len(self._state.pending) >= _MAX_PENDING:
                raise TierFullError("too many blocks are being written", where=self._state.name)
        self._evict(over, "capacity")
        if short := self._fs_shortfall(need):
            self._evict_for_space(short)
            if self._fs_shortfall(need):
                raise TierFullError("the file system has no space to spare", where=self._state.name)
        with self._state.lock:
            if quota.bytes_over_capacity(self._occupied, 0, need, self._state.limits):
                raise TierFullError("over capacity", where=self._state.name)
            self._state.pending_bytes += need

    def maintain(self) -> None:
        """Remove victims, give space of the file system back, abort abandoned writes; the node has evicted before."""
        state = self._state
        state.due.clear()
        now = time.monotonic()
        with state.lock:
            late = [p for p in state.pending if now - p.created_at > state.settings.pending_max_age_s]
        for pending in late:
            if pending.abort():
                state.events.emit(DriveIncident("writers_given_up", 1))
        self._remover.remove_doomed()
        if not state.scanned:
            return
        state.held.settle()
        self._evict_for_space(self._fs_shortfall(0))
        while not state.closed and self._evict(self._over_capacity(), "capacity"):
            pass

    def _over_capacity(self) -> int:
        """Return the bytes to evict from a drive whose capacity was reduced, though the node has room."""
        with self._state.lock:
            used, pending, limits = self._state.used_bytes, self._state.pending_bytes, self._state.limits
        return quota.bytes_over_watermark(used, pending, limits) if used + pending > limits.capacity else 0

    def _require_within_capacity(self, need: int) -> int:
        """Return the bytes to evict for `need`; TierFullError if that cannot suffice. The lock is held."""
        over = quota.bytes_over_capacity(self._occupied, 0, need, self._state.limits)
        promised = need + self._state.pending_bytes
        if over > self._state.used_bytes or promised > quota.pending_limit(self._state.limits.capacity):
            raise TierFullError("too much is being written for this capacity", where=self._state.name)
        return over

    def _fs_shortfall(self, need: int) -> int:
        info = os.fstatvfs(self._state.directory.blocks)
        free, total = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
        with self._state.lock:
            self._state.available_bytes = self._occupied + free - quota.reserve(total, self._state.limits)
        return quota.fs_shortfall(free, total, need, self._state.limits)

    def _evict_for_space(self, short: int) -> None:
        """Evict for a full file system. Held files cost no tenant a block but those that hold them."""
        if short <= 0:
            return
        held = self._state.held
        held.settle(URGENT_GRACE_S)
        self._node.evict_held(held.by_tenant(), short, self._state.number)
        self._remover.remove_doomed()
        self._evict(short - held.total_bytes, "space")

    def _evict(self, need: int, cause: str) -> int:
        """Evict one batch of this drive's blocks in the node's order; return how many."""
        count = self._node.evict(need, cause, drive=self._state.number)
        if count:
            self._remover.remove_doomed()
        return count

    def enforce_quota(self, tenant: bytes) -> None:
        """Evict one batch of a tenant that is over its quota, before other tenants lose blocks."""
        if self._node.enforce_quota(tenant):
            self._remover.remove_doomed()
