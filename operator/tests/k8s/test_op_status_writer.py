"""Throttled status writes."""

from __future__ import annotations

from typing import Any

from op_samples import MemoryCluster

from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.k8s.rate_limiter import TokenBucket
from kvpool_operator.k8s.status_writer import StatusParts, StatusWriter, without

POOL = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "chat", "namespace": "ns"},
    "spec": {},
}
REF = ObjectRef("KVCachePool", "ns", "chat")


class World:
    def __init__(self, **kwargs: Any) -> None:
        self.cluster = MemoryCluster()
        self.clock = 0.0
        self.writer = StatusWriter(self.cluster, StatusParts(without(("used",))), clock=lambda: self.clock, **kwargs)

    async def write(self, after_s: float = 0.0, *, create: bool = False, **status: Any) -> bool:
        self.clock += after_s
        return await self.writer.write(POOL, status, create=create) is not None


async def test_transitions_are_written_at_once_and_counters_once_per_interval():
    world = World()
    world.cluster.put(POOL)
    assert await world.write(phase="Ready", used=1)
    assert not await world.write(100, phase="Ready", used=1), "nothing differs"
    assert await world.write(0, phase="Ready", used=2)
    assert not await world.write(29, phase="Ready", used=3)
    assert await world.write(0, phase="Failed", used=3), "a transition does not wait"
    assert not await world.write(29, phase="Failed", used=4)
    assert await world.write(1, phase="Failed", used=4)
    assert world.cluster.objects[REF]["status"] == {"phase": "Failed", "used": 4}


async def test_a_status_that_was_read_is_not_written_again():
    world = World()
    world.cluster.put(POOL)
    world.writer.record(REF, {"phase": "Ready", "used": 1})
    assert world.writer.is_recorded(REF)
    assert not await world.write(phase="Ready", used=1)
    world.writer.invalidate(REF)
    assert await world.write(phase="Ready", used=1)
    world.writer.forget(REF)
    assert not world.writer.is_recorded(REF)
    world.writer.record(REF, {})
    assert await world.write(phase="Ready", used=1), "an empty status was never written"


async def test_a_missing_object_is_created_only_if_asked_to():
    world = World()
    assert not await world.write(phase="Ready")
    assert not world.cluster.objects
    assert await world.write(create=True, phase="Ready")
    assert ref(world.cluster.objects[REF]) == REF
    del world.cluster.objects[REF]
    assert not await world.write(phase="Failed"), "deleted in between"
    assert await world.write(create=True, phase="Failed"), "and created by the next write"


async def test_a_status_of_another_schema_is_replaced():
    world = World()
    world.cluster.put(POOL)
    world.writer = StatusWriter(world.cluster, StatusParts(lambda s: [c["type"] for c in s["conditions"]]))
    world.writer.record(REF, {"conditions": "none"})
    assert await world.write(conditions=[])


async def test_the_bucket_bounds_counters_before_transitions():
    world = World(bucket=TokenBucket(rate_per_s=0.0, burst=4.0, clock=lambda: 0.0), interval_s=0.0)
    world.cluster.put(POOL)
    assert await world.write(phase="a", used=0)
    assert await world.write(phase="a", used=1)
    assert not await world.write(phase="a", used=2), "the rest is for transitions"
    assert await world.write(phase="b", used=2)
    assert await world.write(phase="c", used=2)
    assert not await world.write(phase="d", used=2)


async def test_a_map_that_becomes_empty_is_left_out():
    """Applied as {}, it becomes null at a real API server, which rejects the status."""
    world = World()
    world.cluster.put(POOL)
    assert await world.write(phase="Ready", pods={"skipped": 1, "skipReasons": {"other": 1}})
    assert await world.write(phase="Ready", pods={"skipped": 0, "skipReasons": {}})
    assert world.cluster.objects[REF]["status"] == {"phase": "Ready", "pods": {"skipped": 0}}
    world.writer.record(REF, world.cluster.objects[REF]["status"])
    assert not await world.write(phase="Ready", pods={"skipped": 0, "skipReasons": {}}), "nothing differs"
