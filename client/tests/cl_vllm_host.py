"""PoolTier above a stand-in for a sidecar, below a stand-in for vLLM: its primary tier and its scheduler."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any

import cl_vllm_stub as stub

sys.modules.pop("kvpool.engines.vllm.tier", None)
with stub.installed():
    from kvpool.engines.vllm import tier as engine_module

if TYPE_CHECKING:
    from cl_fake_sidecar import FakeSidecar

SIZE = 4096
SLOTS = 64
LookupResult = stub.LookupResult
__all__ = ["NAMES", "SIZE", "SLOTS", "Host", "LookupResult", "content", "engine_module", "until"]


def until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def content(name: bytes) -> bytes:
    return hashlib.sha256(name).digest() * (SIZE // 32)


class Host:
    """The primary tier and the scheduler of vLLM, as far as a tier meets them: slots, jobs, steps."""

    def __init__(self, sidecar: FakeSidecar, groups: int = 1, **settings: Any) -> None:
        self.memory = bytearray(SLOTS * SIZE)
        self.view = memoryview(self.memory).cast("B", (SLOTS, SIZE))
        deadlines = {"lookup_ms": 300, "load_min_ms": 400, "breaker_failures": 1000, "store_ms": 1000}
        self.tier = engine_module.PoolTier(
            stub.spec(groups), self.view, "PoolTier", socket=sidecar.path, connect_retry_ms=20, deadlines=deadlines,
            **settings,
        )  # fmt: skip
        self.free = list(range(SLOTS))
        self.jobs: dict[int, stub.TransferJob] = {}
        self.done: dict[int, stub.JobResult] = {}
        self.events: list[stub.OffloadingEvent] = []
        self.number = 0

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory)[number * SIZE : (number + 1) * SIZE]

    def submit(self, names: list[bytes], request: stub.ReqContext, *, load: bool) -> int:
        self.number += 1
        slots = [self.free.pop() for _ in names]
        job = self.jobs[self.number] = stub.TransferJob(self.number, names, slots, request, load)
        if load:
            for number in slots:
                self.slot(number)[:] = bytes(SIZE)
            self.tier.submit_load(job)
        else:
            for number, name in zip(slots, names, strict=True):
                self.slot(number)[:] = content(name)
            self.tier.submit_store(job)
        return job.job_id

    def step(self) -> None:
        self.tier.on_schedule_end(None)
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.done, "an outcome is reported once"
            job = self.jobs.pop(result.job_id)
            self.done[result.job_id] = result
            good = job.keys if result.success else result.successful_keys or ()
            assert set(good) <= set(job.keys)
            for number, name in zip(job.chunk_ids, job.keys, strict=True):
                if job.is_promotion and name in good:
                    assert self.slot(number) == content(name), "what counts as loaded is what was stored"
                self.free.append(number)
        self.events += self.tier.take_events()
        self.tier.get_stats()

    def wait(self) -> None:
        assert until(lambda: self.step() or not self.jobs), self.jobs
        assert not self.tier.has_pending_work()

    def look(self, names: list[bytes], request: stub.ReqContext) -> list[stub.LookupResult]:
        """As the scheduler does: each step all of them, until none says RETRY."""
        found: list[stub.LookupResult] = []

        def settled() -> bool:
            found[:] = [self.tier.lookup(name, request) for name in names]
            self.step()
            return LookupResult.RETRY not in found

        assert until(settled), "a question does not stay open"
        return found


NAMES = [stub.key(hashlib.sha256(bytes([i])).digest()) for i in range(40)]
