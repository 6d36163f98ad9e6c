"""A store against a model of it: whatever happens, a block is what was stored under its key, or a miss."""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.errors import TierFullError
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import header, key, payload, put, read, write
from kvpool_testing.faulty_store import FaultyStore

BLOCKS = st.integers(0, 7)
SIZE = 50_000
CAPACITY = 6 * 57_344  # room for some of them only


class StoreModel(RuleBasedStateMachine):
    """`stored` is what may be there; the store may lose any of it, and never has anything else."""

    def __init__(self):
        super().__init__()
        self.stored: set[int] = set()
        self.pending: dict[int, object] = {}

    @initialize()
    def start(self):
        self.directory = tempfile.mkdtemp()
        self.open()

    def open(self):
        self.real = Drive("nvme", f"{self.directory}/r", quota.CapacityLimits(CAPACITY, 85, 60, 5), pool_uid="u")
        self.real.scan()
        self.store = FaultyStore(self.real)

    @rule(n=BLOCKS)
    def put(self, n):
        if self.store.contains(key(n)):
            assert n in self.stored
            return
        try:
            assert put(self.store, n, SIZE) == CommitOutcome.STORED
        except TierFullError:
            return
        self.stored.add(n)

    @rule(n=BLOCKS)
    def begin(self, n):
        if n in self.pending or len(self.pending) > 1:
            return
        try:
            pending = self.store.begin(key(n), SIZE)
        except TierFullError:
            return
        if pending is not None:
            write(pending, header(n, payload(n, SIZE)), payload(n, SIZE))
            self.pending[n] = pending

    @rule(n=BLOCKS, abort=st.booleans())
    def finish(self, n, abort):
        pending = self.pending.pop(n, None)
        if pending is None:
            return
        if abort:
            pending.abort()
        else:
            pending.commit()
            self.stored.add(n)

    @rule(n=BLOCKS)
    def get(self, n):
        data = read(self.store, n)
        assert data is None or (n in self.stored and data == payload(n, SIZE))

    @rule(n=BLOCKS)
    def remove(self, n):
        self.store.delete(key(n))
        self.stored.discard(n)
        assert read(self.store, n) is None

    @rule(n=BLOCKS)
    def rot(self, n):
        path = f"{self.directory}/r/blocks/{key(n).hex()[:2]}/{key(n).hex()[2:4]}/{key(n).hex()}"
        if os.path.exists(path):
            os.chmod(path, 0o600)
            with open(path, "r+b") as file:
                file.seek(20_000)
                file.write(b"rot")
            assert not self.store.verify(key(n))
            self.stored.discard(n)
            assert read(self.store, n) is None

    @rule(n=BLOCKS, operation=st.sampled_from(["open", "create", "seal", "publish"]))
    def fault(self, n, operation):
        self.store.fail(operation, 1, OSError(5, "Input/output error"))
        try:
            put(self.store, n, SIZE)
            read(self.store, n)
        except (OSError, AssertionError, TierFullError):
            pass
        self.store._errors.clear()
        if self.store.contains(key(n)):
            self.stored.add(n)

    @rule()
    def housekeep(self):
        self.store.maintain()

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
        usage = self.store.usage()
        assert usage.used_bytes + self.real._state.pending_bytes <= CAPACITY + self.real._state.quarantine_bytes
        on_drive = [f for _, _, files in os.walk(f"{self.directory}/r/blocks") for f in files]
        assert sorted(on_drive) == sorted(k.hex() for k, _ in self.store.keys())  # noqa: SIM118
        assert {k for k, _ in self.store.keys()} <= {key(n) for n in self.stored}  # noqa: SIM118
        assert self.real._state.pending_bytes == sum(p.reserved for p in self.pending.values())

    def teardown(self):
        if hasattr(self, "real"):
            self.real.close()
            shutil.rmtree(self.directory)


class MemoryModel(StoreModel):
    """The same against the store that tests use as a model elsewhere."""

    def open(self):
        if not hasattr(self, "store"):
            self.real = MemoryStore(CAPACITY)
            self.store = FaultyStore(self.real)

    @rule()
    def restart(self):
        pass

    @rule(n=BLOCKS)
    def rot(self, n):
        pass

    @invariant()
    def the_table_the_drive_and_the_limits_agree(self):
        if hasattr(self, "real"):
            assert self.store.usage().used_bytes <= CAPACITY


TestStoreModel = StoreModel.TestCase
TestMemoryModel = MemoryModel.TestCase
TestStoreModel.settings = TestMemoryModel.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
