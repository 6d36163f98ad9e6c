"""Background maintenance of the tiers: eviction and scans of each drive, drive health, and the shared tier."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from kvpool_sidecar.events.feed import EventFeed
    from kvpool_sidecar.storage.local.drive import Drive
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["DriveMaintenance", "SharedMaintenance"]

log = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_HEALTH_INTERVAL_S = 1.0
_SAMPLE_BLOCKS = 32  # published blocks of the shared tier that are checked each time


class DriveMaintenance:
    """Maintains each drive in a thread of its own, so that a drive that hangs does not stop the others."""

    def __init__(self, local: LocalStore) -> None:
        self._local = local
        self._tasks = [
            PeriodicTask(f"housekeeping-{drive.name}", functools.partial(self._maintain, drive), 0.0)
            for drive in local.drives
        ]
        self._health = PeriodicTask("drives", self._check_health, _HEALTH_INTERVAL_S, run_at_once=False)

    def start(self) -> None:
        for task in self._tasks:
            task.start()
        self._health.start()

    def stop(self) -> None:
        """End the threads; one that hangs with its drive is left behind."""
        for task in (*self._tasks, self._health):
            task.stop(0.0)

    def _maintain(self, drive: Drive) -> None:
        drive.due.wait(_INTERVAL_S)
        drive.maintain()

    def _check_health(self) -> None:
        for drive in self._local.drives:
            drive.health.tick()


class SharedMaintenance:
    """Maintains the shared tier in a thread of its own, which may hang with the mount.

    With `feed`, it checks a sample of the published blocks, so that routers learn what other nodes have deleted.
    """

    def __init__(self, shared: SharedTier, feed: EventFeed | None) -> None:
        self._shared = shared
        self._feed = feed
        self._task = PeriodicTask("housekeeping-shared", self._maintain, _INTERVAL_S, run_at_once=False)

    def start(self) -> None:
        self._task.start()

    def stop(self) -> None:
        """End the thread; one that hangs with the mount is left behind."""
        self._task.stop(0.0)

    def _maintain(self) -> None:
        if not self._shared.available:
            return
        try:
            self._shared.store.maintain()
            if self._feed is not None:
                self._check_published(self._feed.sample_shared(_SAMPLE_BLOCKS))
        except Exception as e:
            log.warning("maintenance of the shared tier failed; retrying: %s", e)

    def _check_published(self, keys: list[bytes]) -> None:
        """Query these blocks again; the tier emits SharedBlocksAbsent for those that are gone."""
        for key in keys:
            self._shared.mark_absent(key)
        self._shared.contains_many(keys, _INTERVAL_S)
