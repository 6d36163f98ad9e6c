"""Shared GC of an object store by listings alone: capacity by last use, idle time and maximum age. Reads no header.

An object's time is that of its store, or of its last touch where supported (S3, file). Objects without a block's name
are skipped.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.shared_gc.collection import CollectionStoppedError, LeaseLostError, entry_rate_limiter
from kvpool_sidecar.shared_gc.loop import CollectorSettings, LeasedLoop, Schedule
from kvpool_sidecar.shared_gc.object_lease import LeaseView, ObjectLease
from kvpool_sidecar.shared_gc.plan import CollectionLimits, Group, Inventory, make_plan
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.resilience.rate_limiter import RateLimiter
    from kvpool_sidecar.storage.buckets.base import Bucket
    from kvpool_sidecar.storage.shared.object_store import ObjectStore

__all__ = ["ObjectCollector"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{64}")
_BATCH = 32
_THREADS = 8
_DEFAULTS = CollectorSettings(schedule=Schedule(600.0, 3600.0, 10_000.0))


class _Object(NamedTuple):
    name: str
    key: bytes
    size: int
    age_s: float


class ObjectCollector(LeasedLoop):
    """See LeasedLoop. `entries_per_s` of the schedule bounds the listed entries."""

    def __init__(
        self,
        limits: CollectionLimits,
        store: ObjectStore,
        stats: Stats,
        settings: CollectorSettings = _DEFAULTS,
    ) -> None:
        super().__init__(limits, store, stats, settings)
        self._objects = store
        self._lease = ObjectLease(self._owner, settings.schedule.lease_s)
        self._renewed_at = 0.0

    @property
    def term(self) -> int:
        return self._lease.term

    def step(self) -> None:
        bucket, folder = self._objects.folder("sweep")
        was_held = self.term > 0
        view = self._heartbeat(bucket, folder)
        held = self._lease.hold(bucket, folder, view)
        self._problem = ""
        usages = {owner: beat.stored for owner, beat in view.beats.items()}
        if not held or not was_held:
            if was_held:
                log.info("another sidecar sweeps the object store now")
            self._apply_view(view)
        if not held:
            return
        if not was_held:
            log.info("this sidecar sweeps the object store from now on (term %d)", self.term)
            self._usage.reset(self._report.used, usages)
        self._usage.update(usages)
        if self._is_due():
            self._collect(bucket, folder, usages)
            view = self._heartbeat(bucket, folder)
        self._publish(bucket, folder, view)

    def resign(self) -> None:
        self._lease.release(*self._objects.folder("sweep"))

    def _heartbeat(self, bucket: Bucket, folder: str) -> LeaseView:
        view = self._lease.heartbeat(bucket, folder, StoredUsage(*self._store.stored))
        self._ahead_s = view.now - time.monotonic()
        self._renewed_at = time.monotonic()
        return view

    def _apply_view(self, view: LeaseView) -> None:
        if view.counted is not None:
            marks = {owner: beat.stored for owner, beat in view.beats.items()}
            self._apply_report(UsageReport(finished=view.counted.finished, used=view.counted.used, baselines=marks))

    def _publish(self, bucket: Bucket, folder: str, view: LeaseView) -> None:
        if self._lease.still_held(bucket, folder):
            self._report = self._report._replace(used=self._usage.used(), node=self._node)
            self._lease.publish(bucket, folder, view, self._report.finished, self._report.used)
            self._store.set_usage(*self._report.used)

    def _collect(self, bucket: Bucket, folder: str, marks: dict[str, StoredUsage]) -> None:
        started, self._collecting = time.monotonic(), True
        rate_limiter = entry_rate_limiter(
            self._schedule.entries_per_s, lambda seconds: self._wait_and_renew(bucket, folder, seconds)
        )
        removed = 0
        at = self._now()  # ages are counted up to here, in both walks

        def remove(found: Iterator[tuple[_Object, str]]) -> Iterator[_Object]:
            nonlocal removed
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="object-sweep") as pool:
                while batch := list(itertools.islice(found, _BATCH)):
                    if not self._lease.still_held(bucket, folder):
                        raise LeaseLostError
                    gone = pool.map(lambda one: bucket.delete(self._objects.object_name(one[0].key)), batch)
                    for (one, reason), did in zip(batch, gone, strict=True):
                        if did:
                            removed += 1
                            self._on_removed(reason, one.size, one.key)
                            yield one

        try:
            inventory = Inventory()
            for _ in remove(self._count(inventory, rate_limiter, at)):
                pass
            seen = self._usage.seen_during_walk(marks)
            plan = make_plan(inventory, self._limits, [], concurrent_writes=seen.bytes)
            used, blocks = inventory.bytes, inventory.blocks
            if plan:
                log.info("the object store holds %d blocks, %d bytes: making room", blocks, used)
                going = (
                    (o, why) for o in self._all(rate_limiter, at) if (why := plan.reason(Group(), o.size, o.age_s))
                )
                for one in remove(going):
                    used, blocks = used - one.size, blocks - 1
        except LeaseLostError:
            self._lease.term = 0
            log.warning("another sidecar has taken over the lease: sweep given up")
            return
        except CollectionStoppedError:
            return
        finally:
            self._collecting = False
        seconds = time.monotonic() - started
        self._not_before = time.monotonic() + min(seconds, self._schedule.every_s)
        if removed:
            log.info("swept the object store in %.1f s: %d blocks went, %d are left", seconds, removed, blocks)
        self._usage.reset(StoredUsage(used, blocks), marks, seen)
        self._report = UsageReport(finished=self._now(), seconds=seconds)

    def _count(self, inventory: Inventory, rate_limiter: RateLimiter, at: float) -> Iterator[tuple[_Object, str]]:
        """Yield expired blocks; count the rest."""
        limits = self._limits
        for one in self._all(rate_limiter, at):
            if limits.max_age_s and one.age_s > limits.max_age_s:
                yield one, "age"
            elif limits.idle_s and one.age_s > limits.idle_s + self._grace_s:
                yield one, "idle"
            else:
                inventory.add(one.size, one.age_s)

    def _all(self, rate_limiter: RateLimiter, now: float) -> Iterator[_Object]:
        """List one of 256 folders at a time."""
        for number in range(256):
            outer = f"{number:02x}"
            bucket, folder = self._objects.folder(f"blocks/{outer}")
            seen = 0
            for name, size, at in bucket.list(folder):
                seen += 1
                if _NAME.fullmatch(name) and name.startswith(outer) and size > HEADER_BYTES:
                    yield _Object(name, bytes.fromhex(name), size, 0.0 if at is None else now - at)
            rate_limiter.acquire(max(1, seen))

    def _wait_and_renew(self, bucket: Bucket, folder: str, seconds: float) -> bool:
        if self._task.sleep(seconds):
            return True
        if time.monotonic() - self._renewed_at > self._schedule.step_s:
            view = self._heartbeat(bucket, folder)
            if max(view.terms, default=0) != self.term:
                raise LeaseLostError
            self._usage.update({owner: beat.stored for owner, beat in view.beats.items()})
            self._publish(bucket, folder, view)
        return False
