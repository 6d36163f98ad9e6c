"""A shared directory and collectors without threads, for tests of shared GC."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from kvpool.protocol import block
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.shared_gc.filesystem_collector import FilesystemCollector, Schedule
from kvpool_sidecar.shared_gc.loop import CollectorSettings
from kvpool_sidecar.shared_gc.plan import CollectionLimits
from kvpool_sidecar.shared_gc.usage import UsageReport
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_testing.blocks import TAG, header, key, payload, write

SIZE = 20_000
FILE = SIZE + block.HEADER_BYTES
HOUR = 3600.0
DAY = 24 * HOUR
FAST = Schedule(lease_s=30.0, every_s=1e9, entries_per_s=1e9)


class Shared:
    """A pool's shared directory and the sidecars that use it, without threads."""

    def __init__(self, path, uid="pool-uid"):
        self.path = path
        self.uid = uid
        path.mkdir()
        self.store = FilesystemStore(str(path), pool_uid=uid)
        self.stats = Stats()
        self.swept = []
        self.stores = [self.store]

    def claim(self):
        """As the first use does."""
        self.store.contains(key(0))

    def sweeper(self, *, timing=FAST, own_store=False, models=tuple, **kw):
        limits = CollectionLimits(**{k: kw.pop(k) for k in list(kw) if k in CollectionLimits._fields})
        store = FilesystemStore(str(self.path), pool_uid=self.uid) if own_store else self.store
        self.stores.append(store)
        return FilesystemCollector(
            str(self.path),
            self.uid,
            limits,
            store,
            self.stats,
            CollectorSettings(schedule=timing, removed=self.swept.append, **kw),
            models,
        )

    def put(self, n, *, idle=0.0, made=None, tenant=TAG, fingerprint=b"f" * 32):
        data = payload(n, SIZE)
        head = replace(header(n, data), tenant_tag=tenant, fingerprint=fingerprint)
        head = replace(head, created_ms=int((time.time() - (idle if made is None else made)) * 1000))
        pending = self.store.begin(key(n), SIZE)
        write(pending, head, data)
        pending.commit()
        self.age(n, idle)

    def age(self, n, idle):
        os.utime(self.file(n), (time.time() - idle,) * 2)

    def file(self, n):
        name = key(n).hex()
        return self.path / "blocks" / name[:2] / name[2:4] / name

    def left(self, numbers):
        return [n for n in numbers if self.store.contains(key(n))]


def again(sweeper):
    """It is time for the next sweep."""
    sweeper._not_before, sweeper._report = 0.0, UsageReport()
    sweeper.step()
