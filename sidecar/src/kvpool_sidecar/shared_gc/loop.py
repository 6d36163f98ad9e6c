"""Base of the collectors: a thread that steps periodically under a lease, and its status."""

from __future__ import annotations

import abc
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.errors import KVPoolError
from kvpool_sidecar.resilience.worker import PeriodicTask
from kvpool_sidecar.shared_gc.metadata import UnclaimedError
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageEstimator, UsageReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.shared_gc.plan import CollectionLimits

__all__ = ["CollectorSettings", "LeasedLoop", "Schedule", "SweepTarget"]

log = logging.getLogger(__name__)

_RETRY_S = 2.0
_OTHERS_FOLLOW_S = 120.0  # sidecars take a new configuration within so long of each other


class Schedule(NamedTuple):
    """`every_s`: between collections without pressure; `entries_per_s`: scan rate of a collection."""

    lease_s: float = 60.0
    every_s: float = 600.0
    entries_per_s: float = 2000.0

    @property
    def step_s(self) -> float:
        return self.lease_s / 4


class SweepTarget(Protocol):
    """The store whose blocks are collected."""

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored since the process started."""

    def set_usage(self, used_bytes: int, blocks: int) -> None:
        """Set the usage, including that of this process."""

    def set_clock_offset(self, ahead_s: float) -> None:
        """Set by how much the mount's clock is ahead of the monotonic one."""


@dataclass(frozen=True)
class CollectorSettings:
    """`removed(key)` is called for each removed block. While `available()` is False no step is tried."""

    schedule: Schedule = Schedule()
    node: str = ""
    grace_s: float = 0.0  # precision of access times
    available: Callable[[], bool] = lambda: True
    removed: Callable[[bytes], None] = lambda _key: None


class LeasedLoop(abc.ABC):
    """Steps in a thread; collects when due while this sidecar holds the lease."""

    def __init__(self, limits: CollectionLimits, store: SweepTarget, stats: Stats, settings: CollectorSettings) -> None:
        self._limits = limits
        self._grace_s = settings.grace_s
        self._store = store
        self._stats = stats
        self._node = settings.node
        self._schedule = settings.schedule
        self._available = settings.available
        self._removed = settings.removed
        self._owner = os.urandom(8).hex()
        self._usage = UsageEstimator()
        self._report = UsageReport()
        self._ahead_s = 0.0
        self._not_before = 0.0
        self._collecting = False
        self._run_now = False
        self._problem = ""
        self._task = PeriodicTask("shared-sweep", self._run, self._schedule.step_s, on_stop=self._end)

    def start(self) -> None:
        self._task.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Release the lease, also during a collection."""
        self._task.stop(timeout_s)

    def reconfigure(self, limits: CollectionLimits, grace_s: float) -> None:
        """Apply limits from the next collection on, which is due with the next step. `grace_s`: precision of access
        times.

        If access times become more precise, blocks in use get time to be recorded before the next collection.
        """
        if grace_s < self._grace_s:
            self._not_before = time.monotonic() + min(self._grace_s, 4 * grace_s + _OTHERS_FOLLOW_S)
        self._limits, self._grace_s = limits, grace_s
        self._run_now = True

    def status(self) -> dict[str, Any]:
        """For /status: JSON values; tenants by the tag of their blocks."""
        summary = self._report
        return {
            "holder": self.term > 0,
            "term": self.term,
            "sweeping": self._collecting,
            "problem": self._problem,
            "swept_by": summary.node,
            "last_seconds": round(summary.seconds, 3),
            "last_s_ago": round(max(0.0, self._now() - summary.finished), 1) if summary.finished else None,
            "capacity_bytes": self._limits.capacity,
            "used_bytes": summary.used.bytes,
            "blocks": summary.used.blocks,
            "tenants": summary.tenants,
            "touched": self._stats.whole("touches").get("touched", 0),
            "removed": self._stats.whole("swept"),
            "removed_bytes": self._stats.whole("swept_bytes"),
        }

    @property
    @abc.abstractmethod
    def term(self) -> int:
        """Term of the lease while this sidecar holds it; else 0."""

    @abc.abstractmethod
    def step(self) -> None:
        """Run one step. OSError, KVPoolError."""

    @abc.abstractmethod
    def resign(self) -> None:
        """Release the lease, so that the next sidecar need not wait. OSError, KVPoolError."""

    def _run(self) -> float:
        done = self._available() and self._attempt(self.step)
        return self._schedule.step_s if done else min(_RETRY_S, self._schedule.step_s)

    def _end(self) -> None:
        if self._available():
            self._attempt(self.resign)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except UnclaimedError:
            self._problem = ""
        except (KVPoolError, OSError) as e:
            if str(e) != self._problem:
                log.warning("housekeeping of the shared tier: %s", e)
            self._problem = str(e)
        except Exception as e:
            log.exception("housekeeping of the shared tier")
            self._problem = type(e).__name__
        return False

    def _now(self) -> float:
        """The mount's time."""
        return time.monotonic() + self._ahead_s

    def _apply_report(self, summary: UsageReport) -> None:
        """Apply the holder's report, plus what was stored here since."""
        self._report = summary
        own, seen = StoredUsage(*self._store.stored), summary.baselines.get(self._owner, StoredUsage())
        self._store.set_usage(
            summary.used.bytes + max(0, own.bytes - seen.bytes), summary.used.blocks + max(0, own.blocks - seen.blocks)
        )

    def _is_due(self) -> bool:
        if time.monotonic() < self._not_before:
            return False
        if self._run_now:
            self._run_now = False
            return True
        since = self._now() - self._report.finished
        if since < 0 or since >= max(self._schedule.every_s, 2 * self._report.seconds):
            return True
        return bool(self._limits.capacity) and self._usage.used().bytes > self._limits.high

    def _on_removed(self, reason: str, size: int, block_key: bytes | None) -> None:
        self._stats.add("swept", reason)
        self._stats.add("swept_bytes", reason, size)
        if block_key is not None:
            self._usage.subtract(size)
            self._removed(block_key)
