"""A simulated node: the sidecar's own table, eviction and placement over drives that only count bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from kvpool.break_even import BreakEven
from kvpool_sidecar.blocks.events import BlockEvents, BlocksRemoved
from kvpool_sidecar.eviction import Entry, EvictionConfig
from kvpool_sidecar.replication.lookup_events import MAX_SEQUENCE
from kvpool_sidecar.storage.local import placement
from kvpool_sidecar.storage.local.health import DriveHealth
from kvpool_sidecar.storage.local.node_eviction import NodeEviction
from kvpool_sidecar.storage.local.node_table import NodeTable
from kvpool_sidecar.storage.local.writer import file_space
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpool_cli.simulator.settings import PoolSettings

__all__ = ["ServiceQueue", "SimulatedDrive", "SimulatedNode"]

_MAX_BLOCKS = 1 << 30
_EPOCH = 1_700_000_000.0  # Unix seconds of the first request; any time will do


class ServiceQueue:
    """A device that serves in the order of arrival. `rate`: units a second; work that waits is served later."""

    __slots__ = ("busy", "free_at", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.busy = 0.0

    def serve(self, now: float, units: float) -> float:
        """Add work; return when it ends."""
        seconds = units / self.rate
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        return self.free_at


class SimulatedDrive:
    """What the node's table requires of a drive (kvpool_sidecar.storage.local.node_table.TableDrive)."""

    is_usable = True
    reads_headers = False
    pending_bytes = 0
    walked = True

    def __init__(self, table: NodeTable, events: BlockEvents, room_bytes: int, queues: Sequence[ServiceQueue]) -> None:
        self.events = events
        self.health = DriveHealth("simulated", lambda: None)
        self.doomed: deque[tuple[bytes, int]] = deque()
        self.room_bytes = room_bytes
        self.reads, self.writes = queues
        self._table = table
        self.number = table.join(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks."""
        return self._table.policy.on_drive(self.number).total_bytes

    def header_of(self, block_key: bytes) -> None:
        """Return nothing: tables that need headers are not simulated."""

    def doom(self, victims: Iterable[tuple[bytes, Entry]]) -> None:
        """Free the space of victims: they are out of the table already."""


class SimulatedNode:
    """One node, its drives, its network and its engines. `number`: from 1 on. `on_removed`: gets evicted blocks."""

    def __init__(
        self,
        number: int,
        settings: PoolSettings,
        clock: Callable[[], float],
        on_removed: Callable[[SimulatedNode, Sequence[bytes]], None],
    ) -> None:
        hardware = settings.hardware
        self.number = number
        self.alive = True
        self.listed = True  # its lease holds
        self.life = 0  # grows with each failure
        self.avoided_by: set[int] = set()
        self.is_maintenance_due = False
        self.served_bytes = self.written_bytes = self.requests = self.evicted = 0
        self.receive, self.send = ServiceQueue(hardware.network), ServiceQueue(hardware.network)
        self.engine = ServiceQueue(hardware.prefill_rate)
        self.break_even = BreakEven(is_enabled=settings.break_even, clock=clock)
        self.limits = quota.CapacityLimits(hardware.drive_bytes, settings.high, settings.low, _MAX_BLOCKS)
        whole = self.limits._replace(capacity=hardware.drive_bytes * hardware.drives)
        self.table = NodeTable(whole, EvictionConfig(settings.policy), clock=lambda: _EPOCH + clock())
        self.eviction = NodeEviction(self.table)
        self._payload = settings.block_bytes
        self._size = file_space(settings.block_bytes)
        events = BlockEvents()
        events.subscribe(BlocksRemoved, lambda event: on_removed(self, event.block_keys))
        self.drives = [
            SimulatedDrive(
                self.table,
                events,
                hardware.drive_bytes,
                (ServiceQueue(hardware.drive_read), ServiceQueue(hardware.drive_write)),
            )
            for _ in range(hardware.drives)
        ]
        self._names = [f"nvme{n}" for n in range(hardware.drives)]
        self._weights = [hardware.drive_bytes] * hardware.drives

    def __contains__(self, key: bytes) -> bool:
        return key in self.table.policy

    def observe(self, keys: Sequence[bytes]) -> None:
        """Record the order of a prompt's blocks."""
        self.table.observe_sequence(keys[:MAX_SEQUENCE], b"")

    def open(self, key: bytes) -> SimulatedDrive | None:
        """Record a use of a block; return its drive."""
        policy = self.table.policy
        entry = policy.get(key)
        if entry is None:
            return None
        policy.touch(key, self.table.now())
        return self.drives[entry.drive]

    def target(self, key: bytes) -> SimulatedDrive:
        """Return the drive for a new block, as LocalStore does: its own, or the emptiest while that has no room."""
        home = self.drives[placement.choose(key, self._names, self._weights)]
        if len(self.drives) == 1 or self._has_room(home):
            return home
        others = [drive for drive in self.drives if self._has_room(drive)]
        return min(others, key=lambda drive: drive.used_bytes, default=home)

    def _has_room(self, drive: SimulatedDrive) -> bool:
        return drive.used_bytes + self._size <= drive.room_bytes * self.limits.high_percent // 100

    def store(self, key: bytes, drive: SimulatedDrive) -> bool:
        """Add a written block, after at most one eviction. False if it is there already or does not fit."""
        if key in self:
            return False
        self.eviction.evict(quota.bytes_over_capacity(drive.used_bytes, 0, self._size, self.limits), drive=drive.number)
        if drive.used_bytes + self._size > drive.room_bytes:
            return False
        now = self.table.now()
        self.table.policy.add(key, Entry(self._size, self._payload, now, created=now, drive=drive.number))
        self.written_bytes += self._size
        return True

    @property
    def is_over_watermark(self) -> bool:
        """True if maintenance will evict."""
        return quota.bytes_over_watermark(self.table.policy.total_bytes, 0, self.table.limits) > 0

    def status(self) -> dict[str, Any]:
        """Return counts of this node."""
        return {"node": self.number, "requests": self.requests, "served_bytes": self.served_bytes}
