"""Eviction of a node: watermarks, quotas, expiry, and the change of the eviction order. Table operations only."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from array import array
from itertools import islice
from typing import TYPE_CHECKING

from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks.events import DriveIncident
from kvpool_sidecar.eviction import Entry, EvictionConfig, PerTenant
from kvpool_sidecar.storage.local.victims import AT_A_TIME, EVICT_BATCH, pop_victims, prefer_clean
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_sidecar.eviction import EvictionPolicy
    from kvpool_sidecar.storage.local.node_table import NodeTable

__all__ = ["NodeEviction"]

log = logging.getLogger(__name__)

_MAX_ROUNDS = 1 << 12
_EXPIRY_BATCH = 512
_FEW_CHANGES = 128
_RUN = 1 << 15  # blocks that are sorted together


_MAX_WAITING = 1 << 15  # victims that are not unlinked yet; the next turn evicts further


class NodeEviction:
    """Keeps a node within its limits. Thread-safe. Victims are removed by their drives (BlockRemover.remove_doomed)."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self._rebuild = False
        self._rebuilding = threading.Lock()
        self._settled_at = float("-inf")
        self._expire_at = 0.0

    def reconfigure(self, limits: quota.CapacityLimits, order: EvictionConfig) -> None:
        """Apply other limits and another order. Returns immediately; the next `maintain` enforces them."""
        table = self.table
        with table.lock:
            self._rebuild |= evict.requires_rebuild(order, limits, table.config, table.limits)
            table.limits, table.config = limits, order
            self._settled_at, self._expire_at = time.monotonic(), 0.0
            if not self._rebuild:
                evict.reconfigure(table.policy, order, limits)

    @property
    def settled(self) -> bool:
        """False while the table has not been rebuilt after the last `reconfigure`."""
        return not self._rebuild

    def maintain(self) -> None:
        """Enforce the limits down to the low watermark."""
        self._enforce_block_limit()
        if not any(drive.is_usable for drive in self.table.drives):
            return
        if self._rebuild and self._rebuilding.acquire(blocking=False):
            try:
                self._rebuild_policy()
            finally:
                self._rebuilding.release()
        self._expire(time.monotonic())
        self._enforce_quotas()
        for _ in range(_MAX_ROUNDS):
            waiting = sum(len(drive.doomed) for drive in self.table.drives if drive.is_usable)
            if waiting > _MAX_WAITING or not self.evict(self._surplus_bytes(), may_wait=True):
                return

    def _enforce_block_limit(self) -> None:
        """Evict blocks for which the table has no memory, also during a scan, in the order known until then."""
        for _ in range(_MAX_ROUNDS):
            with self.table.lock:
                too_many = len(self.table.policy) - self.table.limits.max_blocks
            if not self.evict(0, "memory", at_least=too_many, may_wait=True):
                return

    def evict(
        self,
        need: int,
        cause: str = "capacity",
        *,
        at_least: int = 0,
        may_wait: bool = False,
        drive: int | None = None,
    ) -> int:
        """Evict one batch in the policy's order; return how many blocks. `may_wait`: for copies of dirty blocks."""
        if need <= 0 and at_least <= 0:
            return 0
        table = self.table
        drive = drive if len(table.drives) > 1 else None
        victims = pop_victims(table, need, at_least, drive)
        victims = prefer_clean(table, victims, need, at_least, may_wait=may_wait, drive=drive)
        return table.doom(victims, cause)

    def enforce_quota(self, tenant: bytes) -> int:
        """Evict one batch of a tenant that is over its quota, before other tenants lose blocks."""
        table = self.table
        victims: list[tuple[bytes, Entry]] = []
        while len(victims) < EVICT_BATCH:
            with table.lock:
                policy, room = table.policy, table.limits.of(tenant).bytes
                if not isinstance(policy, PerTenant) or not room:
                    break
                some = policy.pop_victims_of(tenant, policy.bytes_of(tenant) - room, AT_A_TIME)
                table.over_quota[tenant] += len(some)
            if not some:
                break
            victims += some
        if victims:
            table.doom(victims, "quota")
            table.drives[0].events.emit(DriveIncident("over_quota", len(victims)))
        return len(victims)

    def evict_held(self, held: dict[bytes, int], short: int, drive: int) -> None:
        """Evict blocks of the tenants that keep removed files of this drive open, by tag: bytes."""
        table = self.table
        victims: list[tuple[bytes, Entry]] = []
        for tag, size in held.items():
            need, count = min(size, short), 0
            while need > 0 and count < EVICT_BATCH:
                with table.lock:
                    policy = table.policy
                    some = (
                        policy.pop_victims_of(tag, need, AT_A_TIME, drive=drive)
                        if isinstance(policy, PerTenant)
                        else []
                    )
                if not some:
                    break
                victims += some
                count += len(some)
                need -= sum(entry.size for _, entry in some)
        table.doom(victims, "space")

    def _surplus_bytes(self) -> int:
        """Return the bytes to evict: of the drives that work, as the others free nothing."""
        with self.table.lock:
            working = [drive for drive in self.table.drives if drive.is_usable]
            used = sum(drive.used_bytes + drive.pending_bytes for drive in working)
            limits = self.table.limits._replace(capacity=sum(drive.room_bytes for drive in working))
            return quota.bytes_over_watermark(used, 0, limits)

    def _enforce_quotas(self) -> None:
        """Enforce quotas that were reduced since a tenant's last store."""
        with self.table.lock:
            policy = self.table.policy
            tenants = list(policy.policies()) if isinstance(policy, PerTenant) else []
        for tenant in tenants:
            while self.enforce_quota(tenant):
                pass

    def _expire(self, now: float) -> None:
        """Remove blocks that are idle for too long or too old. `now`: monotonic seconds."""
        table = self.table
        limits = table.limits
        every = (limits.of(b""), *limits.tenants.values())
        shortest = min((t for one in every for t in (one.idle_s, one.max_age_s) if t), default=0.0)
        if not shortest or now < self._expire_at:
            return
        self._expire_at = now + min(60.0, shortest / 10)
        wall = table.now()
        with table.lock:
            expiries = evict.expiries(table.policy, limits, wall, now - self._settled_at)
        for policy, idle_since, created_before in expiries:
            for start in range(0, policy.slots, _EXPIRY_BATCH):
                with table.lock:
                    slots = range(start, min(start + _EXPIRY_BATCH, policy.slots))
                    late = policy.expired(idle_since, created_before, slots)
                self._remove_expired(late)

    def _remove_expired(self, late: list[bytes]) -> None:
        table = self.table
        for start in range(0, len(late), EVICT_BATCH):
            with table.lock:
                some = [(k, e) for k in late[start : start + EVICT_BATCH] if (e := table.policy.get(k)) is not None]
                for key, _ in some:
                    table.policy.discard(key)
            if table.doom(some, "expired"):
                table.drives[0].events.emit(DriveIncident("expired", len(some)))

    def sort(self) -> None:
        """Order the blocks by their last uses, once after the scan."""
        with self._rebuilding:
            self._rebuild_policy()

    def _rebuild_policy(self) -> None:
        """Replace the policy by one with the same blocks in the order of their last uses, as after a restart.

        It is built beside the one in use; changes meanwhile are journaled there and applied at the end.
        """
        node = self.table
        with node.lock:
            order, limits, self._rebuild = node.config, node.limits, False
            old = node.policy
            old.journal = {}
        table = evict.create(order, limits)
        slots = self._by_last_use(old)
        while some := list(islice(slots, _FEW_CHANGES)):
            with node.lock:
                found = [(k, e._replace(uses=old.uses(k))) for k, e in old.entries_in(some)]
            for key, entry in found:
                table.add(key, self._attributed(key, entry))
        while not self._replace(old, table):
            pass
        log.info("%d blocks in the order of %s from now on", len(table), order.policy)

    def _by_last_use(self, old: EvictionPolicy) -> Iterator[int]:
        """Return the slots of a table's blocks in the order of their last uses: sorted in runs, 12 bytes a block."""
        runs: list[tuple[array[float], array[int]]] = []
        for start in range(0, old.slots, _RUN):
            found: list[tuple[float, int]] = []
            for first in range(start, min(start + _RUN, old.slots), _FEW_CHANGES):
                with self.table.lock:
                    found += old.last_uses_in(range(first, min(first + _FEW_CHANGES, old.slots)))
            found.sort()
            runs.append((array("d", [when for when, _ in found]), array("I", [slot for _, slot in found])))
        return (slot for _, slot in heapq.merge(*(zip(*run, strict=True) for run in runs)))

    def _replace(self, old: EvictionPolicy, table: EvictionPolicy) -> bool:
        """Apply what changed in `old` since the last call; use `table` instead, unless that was too much for now."""
        node = self.table
        with node.lock:
            changed, old.journal = list(old.journal or ()), {}
            if is_last := len(changed) <= _FEW_CHANGES:
                self._apply(changed, old, table)
                old.journal, node.policy = None, table
                if not self._rebuild:
                    evict.reconfigure(table, node.config, node.limits)
        if not is_last:
            for start in range(0, len(changed), _FEW_CHANGES):
                with node.lock:
                    self._apply(changed[start : start + _FEW_CHANGES], old, table)
        return is_last

    @staticmethod
    def _apply(changed: list[bytes], old: EvictionPolicy, table: EvictionPolicy) -> None:
        for key in changed:
            was, now = table.get(key), old.get(key)
            table.discard(key)
            if now is not None:
                table.add(
                    key, now if was is None or now.tenant else now._replace(tenant=was.tenant, created=was.created)
                )

    def _attributed(self, block_key: bytes, entry: Entry) -> Entry:
        """Return the entry with the header's fields, if they are unknown and needed."""
        drive = self.table.drives[entry.drive]
        if entry.tenant or not drive.reads_headers or drive.health.fenced:
            return entry
        if (header := drive.header_of(block_key)) is None:
            return entry
        return entry._replace(tenant=header.tenant_tag, created=min(header.created_ms / 1000, entry.persisted_at))
