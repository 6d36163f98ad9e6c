"""Statuses of a pool and of its tenants: what is written when, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from op_samples import MemoryCluster, pool, pool_manifest
from op_status_samples import observed, status

from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.pools.status_reporter import StatusReporter
from kvpool_operator.tenants.resolver import ResolvedTenant

NS = "kvpool-system"
KEY = NamespacedName(NS, "chat")
POOL = ObjectRef("KVCachePool", NS, "chat")


class World:
    """A pool in memory, and the versions that the reporter called its own writes."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.cluster.put(pool_manifest())
        self.clock = 0.0
        self.own: list[NamespacedName] = []
        self.reporter = StatusReporter(self.cluster, lambda: self.clock, lambda key, _: self.own.append(key))

    async def report(self, *, is_progress: bool = True, raw: Any = None, **kwargs: Any) -> list[str]:
        """Report a status; the write requests that it took."""
        self.cluster.calls.clear()
        snapshot = observed(raw=raw or self.cluster.objects[POOL], **kwargs)
        made = status(snapshot)
        await self.reporter.report_pool(pool().metadata, snapshot, made, is_progress=is_progress)
        return [verb for verb, _ in self.cluster.writes()]


async def test_a_first_status_is_written_with_an_event_and_an_equal_one_is_not():
    world = World()
    assert await world.report() == ["apply status", "create"]
    assert await world.report() == []
    assert await world.report(ready=1) == ["apply status", "create"]


async def test_a_write_is_an_own_write_only_if_nothing_else_changed():
    world = World()
    await world.report(is_progress=False)
    assert world.own == []
    await world.report(ready=1)
    assert world.own == [KEY]
    old = world.cluster.objects[POOL]
    await world.report(raw={**old, "metadata": {**old["metadata"], "labels": {"a": "b"}}})
    assert world.own == [KEY]


async def test_tenants_are_written_once_and_forgotten_when_they_are_gone():
    world = World()
    raws = [
        {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCacheTenant", "metadata": {"name": name, "namespace": NS}}
        for name in ("a", "b")
    ]
    for raw in raws:
        world.cluster.put(raw)
    both = replace(observed(), tenants=tuple(ResolvedTenant(raw, None) for raw in raws))
    world.cluster.calls.clear()
    await world.reporter.report_tenants(pool(), both, "d", "s", "2026-11-20T10:00:00Z")
    assert [r.name for _, r in world.cluster.writes()] == ["a", "b"]
    one = replace(both, tenants=both.tenants[:1])
    await world.reporter.report_tenants(pool(), one, "d", "s", "2026-11-20T10:00:00Z")
    assert not world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "b"))
    assert world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "a"))
    world.reporter.forget(KEY)
    assert not world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "a"))
