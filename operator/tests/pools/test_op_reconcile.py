"""Whole passes over a pool, with the cluster in memory: from nothing to Ready, drift, deletion, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from op_pool_world import NAME, NS, POOL, WEBHOOK, World
from op_samples import LOCAL, pool_manifest

from kvpool_operator.errors import ApiUnavailableError, ConflictError, RejectedError
from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.sidecars.status import SidecarStatus


async def test_from_nothing_to_ready_and_then_to_rest():
    world = World()
    first = await world.look()
    assert [verb for verb, _ in world.cluster.writes()] == ["patch", "apply status", "create"]
    assert world.phase_events() == ["phase is Pending"]
    assert world.pool["metadata"]["finalizers"] == ["kvpool.dev/cleanup"]
    assert first.requeue_after_s is not None
    await world.settle()
    assert world.condition("Ready")["status"] == "False"
    world.run()
    await world.settle()
    assert world.condition("Ready")["status"] == "True"
    assert world.pool["status"]["phase"] == "Ready"
    assert world.phase_events()[1:] == [
        "phase changed from Pending to Provisioning",
        "phase changed from Provisioning to Ready",
    ]
    await world.look()
    assert world.cluster.writes() == []


async def test_a_pool_that_is_gone_is_forgotten():
    world = World()
    del world.cluster.objects[POOL]
    assert await world.look() == Result(gone=True)
    assert world.cluster.writes() == []


async def test_the_token_of_routers_comes_and_goes_with_the_events():
    world = World()
    token = ObjectRef("Secret", NS, "chat-events")
    world.pool["spec"]["events"] = {"enabled": True}
    await world.settle()
    first = world.cluster.objects[token]["data"]["token"]
    world.pool["spec"]["events"]["tokenRevision"] = 1
    await world.settle()
    assert world.cluster.objects[token]["data"]["token"] != first
    del world.pool["spec"]["events"]
    await world.settle()
    assert token not in world.cluster.objects
    assert ObjectRef("Secret", NS, "chat-secret") in world.cluster.objects


async def test_somebody_elses_secret_of_that_name_stays_and_the_rest_is_made():
    world = World()
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-events", "namespace": NS}, "data": {}}
    world.cluster.put(theirs)
    world.pool["spec"]["events"] = {"enabled": True}
    for _ in range(5):
        await world.look()
    assert world.cluster.objects[ObjectRef("Secret", NS, "chat-events")]["data"] == {}
    assert ObjectRef("DaemonSet", NS, "chat-sidecar") in world.cluster.objects
    assert "chat-events" in world.condition("Ready")["message"]


async def test_random_values_are_made_once():
    world = World()
    await world.settle()
    secret = copy.deepcopy(world.cluster.objects[ObjectRef("Secret", NS, "chat-secret")])
    world.pool["spec"]["cache"] = {"maxBlockSize": "128Mi"}
    await world.settle()
    assert world.cluster.objects[ObjectRef("Secret", NS, "chat-secret")]["data"] == secret["data"]


async def test_of_two_who_make_the_secret_one_loses():
    world = World()
    await world.settle()
    theirs = world.cluster.objects.pop(ObjectRef("Secret", NS, "chat-secret"))
    real_get, looks = world.cluster.get, 0

    async def get(target: ObjectRef) -> Any:
        nonlocal looks
        found = await real_get(target)
        if target == ObjectRef("Secret", NS, "chat-secret") and found is None:
            looks += 1
            if looks == 2:  # made by somebody else right after the last look
                world.cluster.put(theirs)
        return found

    world.cluster.get = get  # type: ignore[method-assign]
    with pytest.raises(ConflictError):
        await world.look()
    assert looks == 2
    assert world.cluster.objects[ObjectRef("Secret", NS, "chat-secret")]["data"] == theirs["data"]


async def test_a_spec_that_cannot_be_understood_changes_nothing_and_is_told():
    world = World()
    await world.settle()
    before = {r: o for r, o in world.cluster.objects.items() if r != POOL and r.kind != "Event"}
    world.pool["spec"]["tiers"] = [{**LOCAL, "bogus": 1}]
    await world.settle()
    assert {r: o for r, o in world.cluster.objects.items() if r != POOL and r.kind != "Event"} == before
    assert world.condition("Ready")["reason"] == "InvalidSpec"
    assert "spec.tiers[0].bogus: no such field: remove it" in world.condition("Ready")["message"]


@pytest.mark.parametrize("spec", [None, "text", [], {"tiers": "x"}, {"tiers": [{"name": "a" * 10_000}]}])
async def test_a_hostile_spec_is_a_condition_not_a_crash(spec: Any):
    world = World()
    world.pool["spec"] = spec
    await world.settle()
    assert world.condition("Ready")["reason"] == "InvalidSpec"
    world.delete()
    world.pool["metadata"]["finalizers"] = ["kvpool.dev/cleanup"]
    assert (await world.settle()).gone


async def test_a_refused_object_does_not_keep_the_others_away():
    world = World()
    world.cluster.refuse["DaemonSet"] = RejectedError("daemonsets are forbidden", 403)
    for _ in range(3):
        await world.look()
    assert ObjectRef("Service", NS, "chat-index") in world.cluster.objects
    assert world.condition("Ready")["reason"] == "Rejected"
    assert "daemonsets are forbidden" in world.condition("Progressing")["message"]
    world.cluster.refuse.clear()
    await world.settle()
    assert world.condition("Ready")["reason"] != "Rejected"


async def test_without_its_secret_nothing_that_reads_it_is_made():
    world = World()
    world.cluster.refuse["Secret"] = RejectedError("secrets are forbidden", 403)
    for _ in range(3):
        await world.look()
    assert ObjectRef("DaemonSet", NS, "chat-sidecar") not in world.cluster.objects


async def test_an_api_that_is_away_ends_the_pass():
    world = World()
    world.cluster.refuse["Service"] = ApiUnavailableError("503")
    await world.look()
    with pytest.raises(ApiUnavailableError):
        await world.look()


async def test_somebody_elses_object_stays_as_it_is():
    world = World()
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chat-config", "namespace": NS}, "data": {}}
    world.cluster.put(theirs)
    for _ in range(3):
        await world.look()
    assert "labels" not in world.cluster.objects[ref(theirs)]["metadata"]
    assert "exists and is not this pool's" in world.condition("Ready")["message"]


async def test_a_paused_pool_is_only_told_about():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    world.pool["spec"]["mode"] = "Paused"
    del world.cluster.objects[ObjectRef("Service", NS, "chat-index")]
    await world.settle()
    assert ObjectRef("Service", NS, "chat-index") not in world.cluster.objects
    assert world.pool["status"]["phase"] == "Paused"


async def test_numbers_are_written_every_half_minute_at_most():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    writes = 0
    for i in range(9):  # 90 seconds
        world.reports.reported["10.0.0.0"] = SidecarStatus(
            ready=True, capacity_bytes=2**30, index_connected=True, transport="TCP", hits={"local": i + 1}
        )
        await world.look()
        writes += len(world.cluster.writes())
    assert 2 <= writes <= 3


async def test_retain_and_take_over():
    world = World()
    await world.settle()
    data = world.cluster.objects[ObjectRef("Secret", NS, "chat-secret")]["data"]
    world.delete()
    assert (await world.settle()).gone
    assert world.pool["metadata"]["finalizers"] == []
    left = [r for r in world.cluster.objects if r.kind not in ("KVCachePool", "Namespace", "Event")]
    assert left == [ObjectRef("Secret", NS, "chat-secret")]
    assert world.cluster.objects[left[0]]["metadata"]["labels"]["kvpool.dev/retained"] == "true"
    world.cluster.put(pool_manifest())
    await world.settle()
    secret = world.cluster.objects[left[0]]
    assert secret["data"] == data
    assert "kvpool.dev/retained" not in secret["metadata"]["labels"]


async def test_delete_stops_wipes_and_removes():
    world = World(deletionPolicy="Delete")
    await world.settle()
    world.delete()
    await world.look()
    assert ObjectRef("DaemonSet", NS, "chat-sidecar") not in world.cluster.objects
    await world.look()
    assert ObjectRef("DaemonSet", NS, "chat-wipe") in world.cluster.objects
    world.run(nodes=2, ready=1)
    await world.look()
    assert "the wipe of 1 of 2 nodes" in world.condition("Progressing")["message"]
    assert world.pool["status"]["phase"] == "Deleting"
    world.run()
    for pod in [r for r in world.cluster.objects if r.kind == "Pod"]:
        del world.cluster.objects[pod]
    assert (await world.settle()).gone
    assert {r.kind for r in world.cluster.objects} - {"Event"} == {"KVCachePool", "Namespace"}


async def test_a_deletion_does_not_wait_for_ever():
    world = World(deletionPolicy="Delete", cleanupTimeout="1m")
    await world.settle()
    world.delete()
    await world.look()
    await world.look()
    world.run(nodes=2, ready=1)
    result = Result()
    for _ in range(6):
        result = await world.look()
    assert result.gone
    events = [o for r, o in world.cluster.objects.items() if r.kind == "Event" and o["reason"] != "PhaseChanged"]
    assert [e["reason"] for e in events] == ["CleanupTimedOut"]
    assert "1 of 2 nodes wiped" in events[0]["message"]


async def test_namespaces_are_resolved_and_the_pools_own_is_always_served():
    world = World(injection={"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}})
    for name in ("team-z", "team-b"):
        world.cluster.put(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"team": "a"}}}
        )
    world.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
    await world.settle()
    config = world.cluster.objects[ObjectRef("ConfigMap", NS, "chat-config")]["data"]["pool.json"]
    assert '"allowed_namespaces": [\n    "kvpool-system",\n    "team-b",\n    "team-z"\n  ]' in config


async def test_what_is_the_same_for_all_pools_is_read_once_in_a_while():
    world = World()
    await world.settle()
    world.clock -= 10
    world.cluster.calls.clear()
    for _ in range(3):
        await world.reconciler.reconcile(NS, NAME)
    lists = [r for verb, r in world.cluster.calls if verb == "list" and r.kind == "Pod" and not r.namespace]
    assert len(lists) <= 1


async def test_pods_that_were_missed_are_told_of_counted_and_evicted_where_that_is_asked_for():
    world = World(injection={"watchdog": "Restart", "restartEvery": "20s"})
    world.cluster.put({"apiVersion": "admissionregistration.k8s.io/v1", **WEBHOOK})
    world.run()
    await world.settle()
    owner = {"kind": "ReplicaSet", "name": "e", "uid": "rs", "controller": True}
    metadata = {
        "name": "engine",
        "namespace": "team",
        "uid": "u-1",
        "labels": {"kvpool.dev/inject": "true"},
        "annotations": {"kvpool.dev/pool": f"{NS}/{NAME}"},
        "ownerReferences": [owner],
    }
    world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    pod = ObjectRef("Pod", "team", "engine")
    results = []
    while pod in world.cluster.objects:
        results.append(await world.look())
        assert len(results) < 5
    assert results[-1].restarts == ("evicted",)
    assert (results[-1].status or {})["pods"]["notInjected"] == 1
    assert world.condition("InjectionReady")["reason"] == "PodsNotInjected"
    reported = {o["reason"] for r, o in world.cluster.objects.items() if r.kind == "Event" and r.namespace == "team"}
    assert reported == {"NotInjected", "EvictedForInjection"}
