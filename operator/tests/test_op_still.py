"""What is asked of the API server in a pass: everything now and then, in between only what can have changed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from test_op_reconcile import NS, POOL, World

from kvpool_operator.errors import ApiUnavailableError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.k8s.namespace_cache import Namespaces
from kvpool_operator.observe.observer import CLUSTER_SCOPED_KINDS, UNWATCHED_KINDS, WATCHED_KINDS
from kvpool_operator.runtime.ttl_cache import TTLCache

ACCOUNT = ObjectRef("ServiceAccount", NS, "chat-sidecar")
UNWATCHED = {*UNWATCHED_KINDS, *CLUSTER_SCOPED_KINDS}


class Remembering(World):
    """What nobody watches is remembered for a minute; a look is each 10 s."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.namespaces = Namespaces()
        self.versions: list[str] = []
        self.start(
            wrote=lambda _, version: self.versions.append(version),
            namespaces=self.namespaces,
            still_s=lambda: 60.0,
        )

    def asked(self) -> Counter[str]:
        return Counter(f"{verb} {r.kind}" for verb, r in self.cluster.calls if verb in ("get", "list"))

    async def serve(self) -> None:
        await self.settle()
        self.run()
        await self.settle()


async def test_what_nobody_watches_is_asked_for_now_and_then():
    world = Remembering()
    await world.serve()
    asked = []
    for _ in range(12):
        await world.look()
        assert world.cluster.writes() == []
        seen = world.asked()
        assert all(seen[f"list {k}"] == 1 for k in WATCHED_KINDS), "these may change at any time"
        whole = {k for k in UNWATCHED if seen[f"list {k}"]}
        assert whole in (set(), UNWATCHED)
        assert seen["get Secret"] == (3 if whole else 1)
        asked.append(bool(whole))
    assert sum(asked) == 2, "two minutes"


async def test_what_was_removed_unseen_comes_back_when_all_is_looked_at():
    world = Remembering()
    await world.serve()
    await world.look()
    del world.cluster.objects[ACCOUNT]
    looks = 0
    while ACCOUNT not in world.cluster.objects:
        await world.look()
        looks += 1
        assert looks < 8
    await world.look()
    assert ("apply", ACCOUNT) not in world.cluster.writes(), "what was made is seen, not made again"


async def test_what_this_operator_wrote_is_asked_for_again():
    world = Remembering()
    await world.serve()
    await world.look()
    assert not world.asked()["list ServiceAccount"]
    world.pool["spec"]["events"] = {"enabled": True}
    world.pool["metadata"]["generation"] += 1
    await world.look()
    assert ("create", ObjectRef("Secret", NS, "chat-events")) in world.cluster.writes()
    await world.look()
    assert world.asked()["list ServiceAccount"] == 1


async def test_a_change_that_running_sidecars_take_asks_for_nothing_more():
    world = Remembering()
    await world.serve()
    await world.look()
    world.pool["spec"]["cleanupTimeout"] = "77s"
    world.pool["metadata"]["generation"] += 1
    await world.look()
    assert ("apply", ObjectRef("ConfigMap", NS, "chat-config")) in world.cluster.writes()
    await world.look()
    assert not world.asked()["list ServiceAccount"]


async def test_a_pool_that_goes_is_looked_at_whole():
    world = Remembering()
    await world.serve()
    await world.look()
    world.delete()
    for _ in range(3):
        await world.look()
        assert all(world.asked()[f"list {k}"] == 1 for k in UNWATCHED)


async def test_a_look_that_failed_is_not_remembered():
    cache, calls = TTLCache(lambda: 60.0, lambda: 0.0), []

    async def read() -> list[dict[str, Any]]:
        calls.append(1)
        if len(calls) == 1:
            raise ApiUnavailableError("away")
        return [{"kind": "ServiceAccount", "metadata": {"name": "a", "managedFields": [{"manager": "x"}]}}]

    with pytest.raises(ApiUnavailableError):
        await cache.get(("ns", "a"), read, bypass=False)
    await cache.get(("ns", "a"), read, bypass=False)
    found = await cache.get(("ns", "a"), read, bypass=False)
    assert found == [{"kind": "ServiceAccount", "metadata": {"name": "a"}}], "without what nobody reads"
    assert len(calls) == 2
    await cache.get(("ns", "b"), read, bypass=False)
    assert len(calls) == 3, "of one pool"


async def test_a_namespace_that_the_watch_told_of_is_not_asked_for():
    world = Remembering()
    await world.look()
    assert world.asked()["get Namespace"] == 1
    world.namespaces.changed(None, NS, {}, going=False)
    await world.serve()
    await world.look()
    assert world.asked()["get Namespace"] == 0
    world.namespaces.changed("MODIFIED", NS, {}, going=True)
    del world.cluster.objects[ObjectRef("ConfigMap", NS, "chat-config")]
    await world.look()
    assert all(r.kind == "KVCachePool" for _, r in world.cluster.writes()), "nothing can be made there any more"
    world.namespaces.changed("DELETED", NS, {}, going=True)
    await world.look()
    assert world.asked()["get Namespace"] == 1


async def test_a_status_that_was_written_here_is_no_news():
    world = Remembering()
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
    world = Remembering()
    await world.serve()
    told = list(world.versions)
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
    assert world.versions == told
