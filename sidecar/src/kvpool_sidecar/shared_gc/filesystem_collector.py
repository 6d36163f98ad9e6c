"""Shared GC of a directory: each sidecar publishes its usage at each step, and the lease holder collects when due.

The mount may hang at any call; then only this thread hangs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.shared_gc.collection import (
    Collection,
    CollectionContext,
    CollectionStoppedError,
    LeaseLostError,
    entry_rate_limiter,
)
from kvpool_sidecar.shared_gc.file_lease import Lease
from kvpool_sidecar.shared_gc.loop import CollectorSettings, LeasedLoop, Schedule, SweepTarget
from kvpool_sidecar.shared_gc.metadata import TierMetadata
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageReport, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.shared_gc.plan import CollectionLimits

__all__ = ["FilesystemCollector", "Schedule", "SweepTarget"]

log = logging.getLogger(__name__)

_MODEL_EVERY_S = 3600.0
_MOST_MODELS = 256
_DEFAULTS = CollectorSettings()


class FilesystemCollector(LeasedLoop):
    """See LeasedLoop. `models()` yields fingerprints and model names that engines reported here."""

    def __init__(
        self,
        path: str,
        pool_uid: str,
        limits: CollectionLimits,
        store: SweepTarget,
        stats: Stats,
        settings: CollectorSettings = _DEFAULTS,
        models: Callable[[], Iterable[tuple[bytes, str]]] = tuple,
    ) -> None:
        super().__init__(limits, store, stats, settings)
        self._path = path
        self._pool_uid = pool_uid
        self._models = models
        self._lease = Lease(settings.schedule.lease_s)
        self._renewed_at = 0.0
        self._noted: dict[bytes, float] = {}

    @property
    def term(self) -> int:
        return self._lease.term if self._lease.held else 0

    def step(self) -> None:
        with TierMetadata(self._path, self._pool_uid) as tier:
            self._publish_usage(tier)
            self._note_models(tier)
            was_held = self._lease.held
            held = self._lease.hold(tier.sweep, self._now())
            self._renewed_at = time.monotonic()
            self._problem = ""
            if not held:
                if was_held:
                    log.info("another sidecar sweeps the shared tier now")
                self._apply_report(UsageReport.from_json(folder.read_note(tier.sweep, folder.SUMMARY)))
                return
            if not was_held:
                log.info("this sidecar sweeps the shared tier from now on (term %d)", self._lease.term)
                self._apply_report(UsageReport.from_json(folder.read_note(tier.sweep, folder.SUMMARY)))
                self._usage.reset(self._report.used, self._report.baselines)
            usages = self._read_usages(tier)
            self._usage.update(usages)
            if self._is_due():
                self._collect(tier, usages)
            self._publish(tier)

    def resign(self) -> None:
        with TierMetadata(self._path, self._pool_uid) as tier:
            self._lease.release(tier.sweep)
            folder.remove_note(tier.sweep, f"node-{self._owner}")

    def _publish_usage(self, tier: TierMetadata) -> None:
        """Publish what was stored here, and read the mount's clock."""
        name = f"node-{self._owner}"
        now = folder.write_note(tier.sweep, name, {"stored": self._store.stored, "node": self._node})
        self._ahead_s = now - time.monotonic()
        self._store.set_clock_offset(self._ahead_s)

    def _read_usages(self, tier: TierMetadata) -> dict[str, StoredUsage]:
        """Read the reports of all sidecars. Only the lease holder reads that many files."""
        usages: dict[str, StoredUsage] = {}
        for name, owner, _ in folder.notes(tier.sweep, folder.NODE):
            try:
                usages[owner] = stored(folder.read_note(tier.sweep, name).get("stored"))
            except (TypeError, ValueError):
                continue
        return usages

    def _note_models(self, tier: TierMetadata) -> None:
        now = time.monotonic()
        for fingerprint, model in self._models():
            if now - self._noted.get(fingerprint, float("-inf")) < _MODEL_EVERY_S or len(self._noted) >= _MOST_MODELS:
                continue
            name = f"model-{fingerprint.hex()}"
            if not folder.touch_note(tier.sweep, name):
                if sum(1 for _ in folder.notes(tier.sweep, folder.MODEL)) >= folder.MAX_NOTES:
                    return
                folder.write_note(tier.sweep, name, {"model": hashlib.sha256(model.encode()).hexdigest()})
            self._noted[fingerprint] = now

    def _collect(self, tier: TierMetadata, marks: dict[str, StoredUsage]) -> None:
        started, self._collecting = time.monotonic(), True
        context = CollectionContext(
            now=self._now,
            is_lease_held=lambda: self._lease.still_held(tier.sweep),
            rate_limiter=entry_rate_limiter(
                self._schedule.entries_per_s, lambda seconds: self._wait_and_renew(tier, seconds)
            ),
            on_removed=self._on_removed,
        )
        collection = Collection(tier, self._limits, context, expected=self._report.used.blocks, grace_s=self._grace_s)
        seen = StoredUsage()

        def concurrent_writes() -> int:
            nonlocal seen
            self._publish_usage(tier)
            self._usage.update(self._read_usages(tier))
            seen = self._usage.seen_during_walk(marks)
            return seen.bytes

        try:
            done = collection.run(concurrent_writes)
        except LeaseLostError:
            log.warning("another sidecar has taken over the lease: sweep given up")
            return
        except CollectionStoppedError:
            return
        finally:
            self._collecting = False
        seconds = time.monotonic() - started
        self._not_before = time.monotonic() + min(seconds, self._schedule.every_s)
        if done.removed_blocks:
            log.info(
                "swept the shared tier in %.1f s: %d blocks, %d bytes went; %d blocks, %d bytes are left",
                *(seconds, done.removed_blocks, done.removed_bytes, done.blocks, done.used),
            )
        self._usage.reset(StoredUsage(done.used, done.blocks), marks, seen)
        self._report = UsageReport(
            finished=self._now(),
            seconds=seconds,
            tenants={tenant.hex(): size for tenant, size in done.tenants.items() if tenant},
        )

    def _wait_and_renew(self, tier: TierMetadata, seconds: float) -> bool:
        """Wait while renewing the lease. LeaseLostError."""
        if self._task.sleep(seconds):
            return True
        if time.monotonic() - self._renewed_at > self._schedule.step_s:
            if not self._lease.still_held(tier.sweep):
                raise LeaseLostError
            self._renewed_at = time.monotonic()
            self._publish_usage(tier)
            self._usage.update(self._read_usages(tier))
            self._publish(tier)
        return False

    def _publish(self, tier: TierMetadata) -> None:
        if not self._lease.still_held(tier.sweep):
            return
        self._report = self._report._replace(used=self._usage.used(), baselines=self._usage.latest, node=self._node)
        folder.write_note(tier.sweep, folder.SUMMARY, self._report.to_json())
        self._store.set_usage(*self._report.used)
