"""Requests of a reconcile: watched objects are read from the reflectors' stores, not from the API server."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from op_pool_world import NS, POOL, World
from op_samples import MemoryLister

from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.k8s.reflector import Store
from kvpool_operator.observe.observer import CLUSTER_SCOPED_KINDS, NAMESPACED_KINDS

ACCOUNT = ObjectRef("ServiceAccount", NS, "chat-sidecar")
OWNED = {*NAMESPACED_KINDS, *CLUSTER_SCOPED_KINDS}


class Counting(World):
    """Counts requests; remembers the versions that the operator wrote itself."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.versions: list[str] = []
        self.namespaces = Store()
        self.restart()

    def restart(self, **observed: Any) -> None:
        self.start(wrote=lambda _, version: self.versions.append(version), **observed)

    def requests(self) -> Counter[str]:
        return Counter(f"{verb} {r.kind}" for verb, r in self.cluster.calls if verb in ("get", "list"))

    async def serve(self) -> None:
        await self.settle()
        self.run()
        await self.settle()


async def test_a_reconcile_without_changes_costs_a_few_requests():
    world = Counting()
    await world.serve()
    for _ in range(12):
        await world.look()
        assert world.cluster.writes() == []
        webhook = {"get MutatingWebhookConfiguration": 1, "get Deployment": 1}
        assert world.requests() == {"get KVCachePool": 1, "get Secret": 4, "list KVCacheTenant": 1, **webhook}


async def test_a_removed_object_is_recreated_by_the_next_reconcile():
    world = Counting()
    await world.serve()
    del world.cluster.objects[ACCOUNT]
    await world.look()
    assert ("apply", ACCOUNT) in world.cluster.writes()
    await world.settle()
    assert ("apply", ACCOUNT) not in world.cluster.writes()


async def test_objects_of_a_deleted_pool_are_listed_from_the_api():
    """An object that a lagging watch hides would stay forever."""
    world = Counting()
    await world.serve()
    world.restart(owned={kind: MemoryLister(type(world.cluster)(), kind) for kind in OWNED})  # the watches lag
    world.delete()
    for _ in range(3):
        await world.look()
        assert all(world.requests()[f"list {k}"] == 1 for k in OWNED)
        if world.cluster.writes():
            break
    assert world.cluster.writes()


async def test_a_namespace_is_queried_only_if_the_watch_does_not_have_it():
    world = Counting()
    world.restart(namespaces=world.namespaces)
    await world.look()
    assert world.requests()["get Namespace"] == 1
    live = {"metadata": {"name": NS, "uid": "1"}}
    world.namespaces.upsert(live)
    await world.serve()
    await world.look()
    assert world.requests()["get Namespace"] == 0
    world.namespaces.upsert({"metadata": {**live["metadata"], "deletionTimestamp": "2026-11-20T10:00:00Z"}})
    del world.cluster.objects[ObjectRef("ConfigMap", NS, "chat-config")]
    await world.look()
    assert all(r.kind == "KVCachePool" for _, r in world.cluster.writes()), "nothing can be created there any more"
    world.namespaces.delete(NamespacedName("", NS))
    await world.look()
    assert world.requests()["get Namespace"] == 1


async def test_a_status_that_was_written_here_is_no_news():
    world = Counting()
    await world.serve()
    version = world.pool["metadata"]["resourceVersion"]
    assert world.versions[-1:] == [version]
    world.pool["spec"]["cleanupTimeout"] = "77s"
    world.pool["metadata"]["generation"] += 1
    await world.look()
    assert world.pool["metadata"]["resourceVersion"] != version
    assert world.versions[-1] == world.pool["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"team": "other"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"deletionTimestamp": "2026-11-20T10:00:00Z"}},
        {"metadata": {"generation": 99}, "spec": {"cleanupTimeout": "78s"}},
    ],
    ids=lambda c: ",".join(c["metadata"]),
)
async def test_a_change_that_came_while_the_status_was_written_is_news(change: dict[str, Any]):
    world = Counting()
    await world.serve()
    reported = list(world.versions)
    world.pool["spec"]["cleanupTimeout"] = "77s"
    world.pool["metadata"]["generation"] += 1
    write = world.cluster.apply

    async def apply(manifest: dict[str, Any], *, subresource: str = "") -> dict[str, Any]:
        if manifest["kind"] == POOL.kind and subresource:
            live = copy.deepcopy(world.pool)
            for part, fields in change.items():
                live[part].update(fields)
            world.cluster.objects[POOL] = live
        return await write(manifest, subresource=subresource)

    world.cluster.apply = apply  # type: ignore[method-assign]
    await world.look()
    assert world.versions == reported
