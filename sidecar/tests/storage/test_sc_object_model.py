"""Object stores against a model: whatever happens, a block is what was stored under its key, or a miss."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule
from test_sc_store_model import BLOCKS, CAPACITY, SIZE, StoreModel

from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings
from kvpool_testing.blocks import key, payload, read
from kvpool_testing.faulty_store import FaultyStore


class DirectoryModel(StoreModel):
    """A store without eviction: what is over the capacity is refused."""

    def open(self):
        self.real = ObjectStore(self.bucket(), ObjectStoreSettings("r", 1 << 20, capacity_bytes=CAPACITY, recount_s=0))
        self.real.maintain()
        self.store = FaultyStore(self.real)

    def bucket(self):
        return FsspecBucket(f"file://{self.directory}")

    @rule(n=BLOCKS)
    def rot(self, n):
        bucket, name = self.bucket(), f"r/blocks/{key(n).hex()[:2]}/{key(n).hex()}"
        size = bucket.size(name)
        if size is None:
            return
        fd = os.memfd_create("rot")
        bucket.get_to_fd(name, fd, size)
        os.pwrite(fd, b"rot", 20_000)
        bucket.delete(name)
        assert bucket.put(name, fd, size)
        os.close(fd)
        assert not self.store.verify(key(n))
        self.stored.discard(n)
        assert read(self.store, n) is None

    @rule(n=BLOCKS)
    def read_from_another_node(self, n):
        local = MemoryStore(1 << 20)
        near = ObjectStore(self.bucket(), ObjectStoreSettings("r", 1 << 20), local=local)
        data = read(near, n)
        assert data is None or (n in self.stored and data == payload(n, SIZE))
        assert read(local, n) == data
        near.close()
        local.close()

    @rule()
    def restart(self):
        for pending in self.pending.values():
            pending.abort()
        self.pending.clear()
        before = {n for n in self.stored if self.store.contains(key(n))}
        self.real.close()
        self.open()
        assert {n for n in range(8) if self.store.contains(key(n))} == before

    @invariant()
    def the_table_the_drive_and_the_limits_agree(self):
        if not hasattr(self, "real"):
            return
        assert {k for k, _ in self.store.keys()} <= {key(n) for n in self.stored}  # noqa: SIM118
        promised = sum(p.reserved for p in self.pending.values())
        assert self.real._space.promised_bytes == self.real._space.in_flight_bytes == promised
        self.real.maintain()
        assert self.real.usage().used_bytes + promised <= CAPACITY


class MemoryModel(DirectoryModel):
    """The same at memory://."""

    def bucket(self):
        return FsspecBucket(f"memory://{self.directory}")


TestDirectoryModel = DirectoryModel.TestCase
TestMemoryModel = MemoryModel.TestCase
TestDirectoryModel.settings = TestMemoryModel.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
