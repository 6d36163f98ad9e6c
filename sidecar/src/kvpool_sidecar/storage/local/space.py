"""Space of a drive: reservations of writers, eviction, quotas, expiry, and the change of the eviction order."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks.events import BlocksEvicted, BlocksRemoved, DriveIncident
from kvpool_sidecar.eviction import Entry, EvictionConfig, PerTenant
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.local.held import URGENT_GRACE_S
from kvpool_sidecar.storage.local.victims import EVICT_BATCH, prefer_clean
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["MAX_BLOCKS", "SpaceManager"]

log = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 20  # bounds the table's memory: about 300 bytes each
_MAX_PENDING = 1024
_HELD_PART = 16


class SpaceManager:
    """Keeps a drive within its limits. Thread-safe; `maintain` is called by one thread."""

    def __init__(self, state: DriveState) -> None:
        self._state = state
        self.due = threading.Event()  # `maintain` has work to do
        self._rebuild = False
        self._settled_at = float("-inf")
        self._expire_at = 0.0

    def reconfigure(self, limits: quota.CapacityLimits, order: EvictionConfig) -> None:
        """Apply other limits and another order. Returns immediately; the next `maintain`, due now, enforces them."""
        with self._state.lock:
            self._rebuild |= evict.requires_rebuild(order, limits, self._state.config, self._state.limits)
            self._state.limits, self._state.config = limits, order
            self._settled_at, self._expire_at = time.monotonic(), 0.0
            if not self._rebuild:
                evict.reconfigure(self._state.policy, order, limits)
        self.due.set()

    @property
    def settled(self) -> bool:
        """False while the table has not been rebuilt after the last `reconfigure`."""
        return not self._rebuild

    def headroom_bytes(self) -> int:
        """Return the bytes that fit below the low watermark and the file system's reserve; 0 or less: none."""
        if self._state.health.fenced or not self._state.scanned:
            return 0
        info = os.fstatvfs(self._state.directory.blocks)
        with self._state.lock:
            used = self._state.used_bytes + self._state.pending_bytes
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
            self._require_within_capacity(used, need)
        if self._fs_shortfall(need) > used:
            raise TierFullError("the file system has no space to spare", where=self._state.name)

    def reserve(self, need: int) -> None:
        """Reserve `need` bytes after at most one eviction each for capacity and file system. TierFullError."""
        with self._state.lock:
            used = self._state.used_bytes
            over = self._require_within_capacity(used, need)
            if len(self._state.pending) >= _MAX_PENDING:
                raise TierFullError("too many blocks are being written", where=self._state.name)
        self._evict(over)
        if short := self._fs_shortfall(need):
            self._evict_for_space(short)
            if self._fs_shortfall(need):
                raise TierFullError("the file system has no space to spare", where=self._state.name)
        with self._state.lock:
            if quota.bytes_over_capacity(self._state.used_bytes, self._state.pending_bytes, need, self._state.limits):
                raise TierFullError("over capacity", where=self._state.name)
            self._state.pending_bytes += need

    def maintain(self) -> None:
        """Enforce limits down to the low watermark and the file system's reserve; abort abandoned writes."""
        self.due.clear()
        now = time.monotonic()
        with self._state.lock:
            late = [p for p in self._state.pending if now - p.created_at > self._state.settings.pending_max_age_s]
        for pending in late:
            if pending.abort():
                self._state.events.emit(DriveIncident("writers_given_up", 1))
        if not self._state.scanned:
            return
        if self._rebuild:
            self._rebuild_policy()
        self._expire(now)
        self._enforce_quotas()
        self._state.held.settle()
        self._evict_for_space(self._fs_shortfall(0))
        for _ in range(MAX_BLOCKS // EVICT_BATCH):
            with self._state.lock:
                over = quota.bytes_over_watermark(self._state.used_bytes, self._state.pending_bytes, self._state.limits)
                too_many = len(self._state.policy) - self._state.limits.max_blocks
            if self._state.closed or not self._evict(over, at_least=too_many, may_wait=True):
                return

    def _require_within_capacity(self, used: int, need: int) -> int:
        """Return the bytes to evict for `need`; TierFullError if that cannot suffice. The lock is held."""
        over = quota.bytes_over_capacity(used, self._state.pending_bytes, need, self._state.limits)
        if over > used or need + self._state.pending_bytes > quota.pending_limit(self._state.limits.capacity):
            raise TierFullError("too much is being written for this capacity", where=self._state.name)
        return over

    def _fs_shortfall(self, need: int) -> int:
        info = os.fstatvfs(self._state.directory.blocks)
        return quota.fs_shortfall(
            info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize, need, self._state.limits
        )

    def _evict_for_space(self, short: int) -> None:
        """Evict for a full file system. Held files cost no tenant a block but those that hold them."""
        if short <= 0:
            return
        self._state.held.settle(URGENT_GRACE_S)
        held = self._state.held.by_tenant()
        with self._state.lock:
            policy = self._state.policy
            victims = (
                [policy.pop_victims_of(tag, min(size, short), EVICT_BATCH) for tag, size in held.items()]
                if isinstance(policy, PerTenant)
                else []
            )
        for some in victims:
            self._remove_victims(some, "space")
        self._evict(short - self._state.held.total_bytes, "space")

    def _evict(self, need: int, cause: str = "capacity", *, at_least: int = 0, may_wait: bool = False) -> int:
        """Evict one batch in the policy's order; return how many blocks. `may_wait`: for copies of dirty blocks."""
        if need <= 0 and at_least <= 0:
            return 0
        with self._state.lock:
            victims = self._state.policy.pop_victims(need, EVICT_BATCH, at_least=at_least)
        victims = prefer_clean(self._state, victims, need, at_least, may_wait=may_wait)
        return self._remove_victims(victims, cause)

    def enforce_quota(self, tenant: bytes) -> int:
        """Evict one batch of a tenant that is over its quota, before other tenants lose blocks."""
        with self._state.lock:
            room = self._state.limits.of(tenant).bytes
            if not isinstance(self._state.policy, PerTenant) or not room:
                return 0
            victims = self._state.policy.pop_victims_of(tenant, self._state.policy.bytes_of(tenant) - room, EVICT_BATCH)
        if removed := self._remove_victims(victims, "quota"):
            self._state.events.emit(DriveIncident("over_quota", removed))
            with self._state.lock:
                self._state.over_quota[tenant] += removed
        return removed

    def _enforce_quotas(self) -> None:
        """Enforce quotas that were reduced since a tenant's last store."""
        with self._state.lock:
            policy = self._state.policy
            tenants = list(policy.policies()) if isinstance(policy, PerTenant) else []
        for tenant in tenants:
            while not self._state.closed and self.enforce_quota(tenant):
                pass

    def _expire(self, now: float) -> None:
        """Remove blocks that are idle for too long or too old. `now`: monotonic seconds."""
        limits = self._state.limits
        every = (limits.of(b""), *limits.tenants.values())
        shortest = min((t for one in every for t in (one.idle_s, one.max_age_s) if t), default=0.0)
        if not shortest or now < self._expire_at:
            return
        self._expire_at = now + min(60.0, shortest / 10)
        wall = self._state.now()
        with self._state.lock:
            late = evict.expired(self._state.policy, limits, wall, now - self._settled_at)
        for start in range(0, len(late), EVICT_BATCH):
            with self._state.lock:
                some = [
                    (k, e) for k in late[start : start + EVICT_BATCH] if (e := self._state.policy.get(k)) is not None
                ]
                for key, _ in some:
                    self._state.policy.discard(key)
            self._state.events.emit(DriveIncident("expired", self._remove_victims(some, "expired")))

    def _rebuild_policy(self) -> None:
        """Replace the policy by one with the same blocks in the order of their last uses, as after a restart.

        It is built beside the one in use; changes meanwhile are journaled there and applied at the end.
        """
        with self._state.lock:
            order, limits, self._rebuild = self._state.config, self._state.limits, False
            old = self._state.policy
            old.journal = {}
            keys = list(old)
        found: list[tuple[bytes, Entry]] = []
        for start in range(0, len(keys), EVICT_BATCH):
            with self._state.lock:
                some = [(k, e, old.uses(k)) for k in keys[start : start + EVICT_BATCH] if (e := old.get(k)) is not None]
            found += [(k, self._attributed(k, e)._replace(uses=uses)) for k, e, uses in some]
            if self._state.closed:
                return
        found.sort(key=lambda item: item[1].persisted_at)
        table = evict.create(order, limits)
        for key, entry in found:
            table.add(key, entry)
        with self._state.lock:
            changed, old.journal = old.journal, None
            for key in changed:
                was, now = table.get(key), old.get(key)
                table.discard(key)
                if now is not None:
                    table.add(
                        key, now if was is None or now.tenant else now._replace(tenant=was.tenant, created=was.created)
                    )
            self._state.policy = table
            if not self._rebuild:
                evict.reconfigure(table, self._state.config, self._state.limits)
        log.info("tier %s: %d blocks in the order of %s from now on", self._state.name, len(table), order.policy)

    def _attributed(self, block_key: bytes, entry: Entry) -> Entry:
        """Return the entry with the header's fields, if they are unknown and needed."""
        if entry.tenant or not self._state.reads_headers or (header := self._state.header_of(block_key)) is None:
            return entry
        return entry._replace(tenant=header.tenant_tag, created=min(header.created_ms / 1000, entry.persisted_at))

    def _remove_victims(self, victims: list[tuple[bytes, Entry]], cause: str) -> int:
        """Unlink victims; return how many. `cause`: see BlocksEvicted."""
        gone: list[bytes] = []
        for key, entry in victims:
            try:
                with self._state.health:
                    self._state.held.unlink(key, names.block_path(key), self._state.directory.blocks)
            except FileNotFoundError:
                pass
            except OSError as e:
                self._state.record_error(e)
                with self._state.lock:
                    self._state.policy.reinsert(key, entry)
                continue
            gone.append(key)
        if gone:
            self._state.events.emit(DriveIncident("evicted", len(gone)))
            self._state.events.emit(BlocksEvicted(cause, len(gone)))
            self._state.events.emit(BlocksRemoved(gone, cause))
        return len(gone)
