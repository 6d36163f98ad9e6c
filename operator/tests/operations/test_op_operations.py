"""KVCacheOperations: what is asked of which node, in which order, and what the results say. The nodes are played."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from op_operation_world import LOCAL, NS, OP, SHARED, World
from op_samples import pool_manifest

from kvpool_operator.api.annotations import FINALIZER_OPERATION
from kvpool_operator.api.operation import KVCacheOperation
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.errors import ApiUnavailableError, InvalidPoolError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.operations.reconciler import CANCEL_TIMEOUT_S, OperationReconciler
from kvpool_operator.operations.steps import steps_of
from kvpool_operator.sidecars.operation import OperationProgress


def operation(**spec: Any) -> KVCacheOperation:
    meta = {"name": "tidy", "namespace": NS, "uid": "u", "creationTimestamp": "2026-11-20T10:00:00Z"}
    return KVCacheOperation.parse({"metadata": meta, "spec": {"poolRef": {"name": "chat"}, **spec}})


RED = "sha256:b1f51a511f1da0cd348b8f8598db32e61cb963e5fc69e2b41485bf99590ed75a"  # printf %s red | sha256sum


# -- what is asked


def test_a_purge_goes_over_the_drives_the_shared_tier_and_the_drives_again():
    pool = KVCachePool.parse(pool_manifest(tiers=[LOCAL, SHARED]))
    made = steps_of(operation(purge={"tenant": "team-a", "fingerprint": "ab" * 8, "olderThan": "1h"}), pool)
    assert [(s.params["tier"], s.everywhere, s.tier) for s in made] == [
        ("Local", True, "local"),
        ("Shared", False, "shared"),
        ("Local", True, "local"),
    ]
    before = int(datetime(2026, 11, 20, 9, tzinfo=UTC).timestamp() * 1000)  # by the operation's birth, not by the clock
    wanted = {"tenant": "team-a", "fingerprint": "ab" * 8, "made_before_ms": before}
    assert all({k: v for k, v in s.params.items() if k != "tier"} == wanted for s in made)


def test_nodes_confirm_that_the_key_of_a_deleted_tenant_is_gone():
    encrypted = {**SHARED, "shared": {**SHARED["shared"], "encryption": "AES256GCM"}}
    gone = f"kvt:acme:{'0' * 36}"
    for tier, tenant, wanted in ((encrypted, gone, 4), (encrypted, "team-a", 3), (SHARED, gone, 3)):
        pool = KVCachePool.parse(pool_manifest(tiers=[LOCAL, tier]))
        steps = steps_of(operation(purge={"tenant": tenant}), pool)
        assert len(steps) == wanted
    pool = KVCachePool.parse(pool_manifest(tiers=[LOCAL, encrypted]))
    last = steps_of(operation(purge={"tenant": gone}), pool)[-1]
    assert (last.kind, dict(last.params), last.everywhere) == ("confirm-key-forgotten", {"tenant": gone}, True)


def test_salts_are_asked_for_by_their_digests_with_all_else():
    pool = KVCachePool.parse(pool_manifest())
    digest = RED.removeprefix("sha256:")
    assert [dict(s.params) for s in steps_of(operation(purge={"salts": [RED]}), pool)] == [
        {"salts": [digest], "tier": "Local"}
    ] * 2
    both = steps_of(operation(purge={"salts": [RED], "tenant": "team-a"}), pool, "kvt:acme:0")
    assert both[0].params == {"salts": [digest], "tenant": "kvt:acme:0", "tier": "Local"}
    many = [f"sha256:{n:064x}" for n in range(64)]
    assert len(steps_of(operation(purge={"salts": many}), pool)[0].params["salts"]) == 64


def test_everything_is_asked_for_by_that_word_alone():
    pool = KVCachePool.parse(pool_manifest())
    assert [dict(s.params) for s in steps_of(operation(purge={"all": True}), pool)] == [
        {"all": True, "tier": "Local"}
    ] * 2


def test_bandwidths_are_bytes():
    pool = KVCachePool.parse(pool_manifest())
    assert [dict(s.params) for s in steps_of(operation(warm={"bandwidth": "1Mi"}), pool)] == [{"bytes_per_s": 1 << 20}]
    assert [s.params["bytes_per_s"] for s in steps_of(operation(verify={}), pool)] == [100 << 20]


@pytest.mark.parametrize("measure", [False, True])
def test_a_look_at_the_nodes_is_for_all_of_them(measure: bool):
    (step,) = steps_of(operation(preflight={"measure": measure}), KVCachePool.parse(pool_manifest()))
    assert (step.kind, dict(step.params), step.everywhere) == ("preflight", {"measure": measure}, True)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"purge": {"all": True}, "verify": {}},
        {"purge": {}},
        {"purge": {"all": True, "tenant": "a"}},
        {"purge": {"fingerprint": "xyz"}},
        {"purge": {"salts": []}},
        {"purge": {"salts": ["red"]}},
        {"purge": {"salts": ["ab" * 32]}},
        {"purge": {"salts": ["sha256:" + "AB" * 32]}},
        {"purge": {"salts": [f"sha256:{n:064x}" for n in range(65)]}},
        {"purge": {"all": True, "salts": [RED]}},
        {"purge": {"tenant": "A_b"}},
        {"purge": {"tenant": "kvt/"}},
        {"purge": {"tenant": "kvt:acme"}},
        {"purge": {"tenant": "a/b"}},
        {"verify": {"bandwidth": "1"}},
        {"warm": {}, "timeout": "0s"},
    ],
)
def test_what_makes_no_sense_is_not_understood(spec: dict[str, Any]):
    with pytest.raises(InvalidPoolError):
        operation(**spec)


# -- how it goes


async def test_a_drain_is_for_its_node_alone():
    world = World(drain={"node": "node-1", "bandwidth": "2Mi"}, timeout="10m")
    status = await world.run()
    ((node, _),) = world.nodes.requests
    assert node == "node-1"
    assert list(world.nodes.requests.values()) == [("evacuate", {"bandwidth": 2 << 20, "wait_s": 600})]
    assert status["nodes"] == {"total": 1, "done": 1, "failed": 0, "summary": "1/1"}
    assert status["results"] == {"local": {"blocks": 2, "bytes": 100}}


async def test_a_drain_of_a_node_that_is_not_there_fails_when_its_time_is_over():
    world = World(drain={"node": "node-9"}, timeout="10s")
    status = await world.run("Failed")
    assert status["failures"][0]["node"] == "node-9"
    assert status["nodes"] == {"total": 1, "done": 0, "failed": 1, "summary": "0/1"}
    assert world.nodes.requests == {}


async def test_each_step_begins_when_the_one_before_has_ended_everywhere():
    world = World(tiers=[LOCAL, SHARED])
    world.nodes.endless.add("node-1")
    for _ in range(5):
        await world.look()
    assert set(world.nodes.heard) == {("node-0", "Local"), ("node-1", "Local")}
    assert world.status["phase"] == "Running"
    assert "step 1 of 3" in world.status["message"]
    world.nodes.endless.clear()
    status = await world.run()
    tiers = [tier for _, tier in world.nodes.heard]
    assert tiers == ["Local", "Local", "Shared", "Local", "Local"]
    assert status["nodes"] == {"total": 2, "done": 2, "failed": 0, "summary": "2/2"}
    assert status["results"] == {"local": {"blocks": 8, "bytes": 400}, "shared": {"blocks": 2, "bytes": 100}}
    assert status["startTime"] < status["completionTime"]
    (condition,) = status["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Complete", "True", "Succeeded")


def tenant(name: str, pool: str = "chat", **status: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": NS, "uid": f"00000000-0000-0000-0000-{len(name):012d}"}
    spec = {"poolRef": {"name": pool}, "members": {"namespaces": ["team-a"]}}
    kind = {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCacheTenant"}
    return {**kind, "metadata": meta, "spec": spec, "status": status}


async def test_a_tenant_of_several_namespaces_is_known_to_sidecars_by_its_uid():
    world = World(purge={"tenant": "kvt/acme"})
    world.cluster.put(tenant("acme"))
    await world.run()
    assert {params["tenant"] for _, params in world.nodes.requests.values()} == {
        "kvt:acme:00000000-0000-0000-0000-000000000004"
    }


async def test_one_that_is_gone_is_named_by_what_it_was():
    gone = "kvt:acme:00000000-0000-0000-0000-000000000004"
    world = World(purge={"tenant": gone})
    await world.run()
    assert {params["tenant"] for _, params in world.nodes.requests.values()} == {gone}


@pytest.mark.parametrize("pool", ["", "other"])
async def test_a_tenant_that_the_pool_does_not_have_is_not_said_to_be_purged(pool: str):
    world = World(purge={"tenant": "kvt/acme"})
    if pool:
        world.cluster.put(tenant("acme", pool))
    status = await world.run("Failed")
    assert "no KVCacheTenant acme" in status["message"]
    assert world.nodes.heard == []


async def test_a_namespace_that_stores_as_a_member_is_told_so():
    world = World(purge={"tenant": "team-a"})
    world.cluster.put(tenant("acme", members=["team-a", "team-z"]))
    status = await world.run()
    assert status["message"] == "every node finished; team-a is a member of kvt/acme, whose blocks stay"
    assert {params["tenant"] for _, params in world.nodes.requests.values()} == {"team-a"}


@pytest.mark.parametrize(
    ("purge", "is_on", "reported"),
    [
        ({"salts": [RED]}, True, ""),
        ({"salts": [RED]}, False, "spec.tenancy.saltTags is off"),
        ({"salts": [RED], "tenant": "team-a"}, False, "whose blocks stay; spec.tenancy.saltTags is off"),
        ({"tenant": "team-b"}, False, ""),
    ],
)
async def test_a_purge_by_salt_says_that_the_pool_stores_no_tags(purge: dict[str, Any], is_on: bool, reported: str):
    world = World(purge=purge)
    world.cluster.put(pool_manifest(tiers=[LOCAL], tenancy={"saltTags": is_on}))
    world.cluster.put(tenant("acme"))
    message = (await world.run())["message"]
    assert reported in message
    assert message.startswith("every node finished;" if reported else "every node finished")
    assert bool(reported) == ("saltTags" in message)


async def test_a_sidecar_that_does_not_know_salts_is_named():
    world = World(purge={"salts": [RED]})
    world.nodes.answers["node-1"] = OperationProgress("Failed", message="purge: this sidecar does not know salts")
    status = await world.run("Failed")
    assert status["failures"] == [
        {"node": "node-1", "message": "purging the nodes' drives: purge: this sidecar does not know salts"}
    ]


async def test_nothing_is_asked_before_the_finalizer_is_there_and_it_goes_with_the_end():
    world = World()
    await world.look()
    assert world.meta["finalizers"] == [FINALIZER_OPERATION]
    assert world.nodes.heard == []
    await world.run()
    await world.look()
    assert world.meta["finalizers"] == []


async def test_an_operator_that_starts_anew_learns_from_the_nodes_what_they_did():
    world = World()
    world.nodes.endless.add("node-1")
    for _ in range(4):
        await world.look()
    world.reconciler = OperationReconciler(world.cluster, world.nodes, world.reports, now=lambda: world.now)
    world.nodes.endless.clear()
    status = await world.run()
    assert status["results"]["local"] == {"blocks": 8, "bytes": 400}
    assert len(world.nodes.requests) == 4  # two steps, two nodes: none of them twice under another name


async def test_a_sidecar_that_restarts_is_asked_again():
    world = World()
    world.nodes.endless |= {"node-0", "node-1"}
    for _ in range(3):
        await world.look()
    for at in [at for at in world.nodes.states if at[0] == "node-1"]:
        world.nodes.states[at] = OperationProgress("Running", total=10, counts={"blocks": 7, "bytes": 350})
    await world.look()
    world.nodes.restart("node-1")
    await world.look()
    world.nodes.endless.clear()
    status = await world.run()
    assert [n for n, _ in world.nodes.heard].count("node-1") == 3
    assert status["results"]["local"] == {"blocks": 8 + 7, "bytes": 400 + 350}  # what was gone before is not forgotten


async def test_one_that_was_cut_short_by_its_sidecars_end_is_not_failed():
    world = World()
    world.nodes.answers["node-1"] = OperationProgress("Failed", "cancelled")
    for _ in range(6):
        await world.look()
    assert world.status["phase"] == "Running"
    world.nodes.answers.clear()
    world.nodes.restart("node-1")
    await world.run()


async def test_a_node_that_does_not_answer_is_named_when_the_time_is_over_and_the_others_are_done():
    world = World(nodes=3, timeout="30s", verify={})
    world.nodes.silent.add("node-1")
    await world.look()
    await world.look()
    await world.look()
    assert "waiting for node-1" in world.status["message"]
    status = await world.run("Failed")
    assert status["failures"] == [
        {"node": "node-1", "message": "verifying the nodes' drives: the sidecar does not answer: no answer within 5 s"}
    ]
    assert status["nodes"] == {"total": 3, "done": 2, "failed": 1, "summary": "2/3"}
    assert status["results"]["local"] == {"blocks": 4, "bytes": 200}
    assert "node-1" in status["message"]
    assert len(world.nodes.cancelled) == 2  # what may still run elsewhere is ended


async def test_a_node_without_an_address_is_waited_for():
    world = World(nodes=1, timeout="20s", verify={})
    world.pod("node-9", "")
    status = await world.run("Failed")
    assert status["failures"] == [
        {"node": "node-9", "message": "verifying the nodes' drives: the sidecar has no address"}
    ]


@pytest.mark.parametrize("how", ["fails", "refuses"])
async def test_a_node_that_fails_does_not_keep_the_others(how: str):
    world = World(tiers=[LOCAL, SHARED])
    if how == "fails":
        world.nodes.answers["node-0"] = OperationProgress("Failed", "the drive is gone", counts={"blocks": 1})
    else:
        world.nodes.refusing.add("node-0")
    status = await world.run("Failed")
    assert [f["node"] for f in status["failures"]] == ["node-0"]
    assert status["failures"][0]["message"].startswith("purging the nodes' drives: ")
    assert [n for n, tier in world.nodes.heard if tier == "Shared"] == ["node-1"]  # by one that is able
    assert status["nodes"]["done"] == 1


async def test_what_one_node_does_for_all_is_done_by_another_when_it_falls_silent():
    world = World(tiers=[LOCAL, SHARED], verify={})
    world.nodes.endless.add("node-0")
    for _ in range(3):
        await world.look()
    world.nodes.endless.clear()
    while ("node-0", "Shared") not in world.nodes.heard:
        await world.look()
    world.nodes.silent.add("node-0")
    status = await world.run()
    assert ("node-1", "Shared") in world.nodes.heard
    assert status["nodes"]["done"] == 2


async def until_shared(world: World) -> None:
    while not any(tier == "Shared" for _, tier in world.nodes.heard):
        await world.look()


async def test_what_one_node_fails_to_do_for_all_another_one_does():
    world = World(nodes=3, tiers=[LOCAL, SHARED])
    await until_shared(world)
    world.nodes.answers["node-0"] = OperationProgress("Failed", "the shared tier is not available")
    await world.look()
    world.nodes.answers.clear()
    status = await world.run()
    assert [n for n, tier in world.nodes.heard if tier == "Shared"] == ["node-0", "node-1"]
    assert status["nodes"]["summary"] == "3/3"  # that node's drives were gone over twice, as all others


async def test_what_no_node_can_do_for_all_is_a_failure_after_a_few():
    world = World(nodes=5, tiers=[LOCAL, SHARED], verify={})
    await until_shared(world)
    for n in range(5):
        world.nodes.answers[f"node-{n}"] = OperationProgress("Failed", "the shared tier is not available")
    status = await world.run("Failed")
    assert [n for n, tier in world.nodes.heard if tier == "Shared"] == ["node-0", "node-1", "node-2"]
    assert [f["node"] for f in status["failures"]] == ["node-0", "node-1", "node-2"]


async def test_failures_that_are_told_are_bounded():
    world = World(nodes=40, verify={})
    world.nodes.refusing |= {f"node-{n}" for n in range(40)}
    status = await world.run("Failed")
    assert len(status["failures"]) == 16
    assert status["nodes"]["failed"] == 40


async def test_an_operation_waits_for_its_pool_and_for_its_first_node():
    world = World(nodes=0)
    pool = world.cluster.objects.pop(ObjectRef("KVCachePool", NS, "chat"))
    await world.look()
    await world.look()
    assert (world.status["phase"], world.status["message"]) == (
        "Pending",
        "KVCachePool chat does not exist in this namespace",
    )
    world.cluster.put(pool)
    await world.look()
    assert world.status["message"] == "the pool has no sidecar yet"
    world.pod("node-0", "10.0.0.1")
    await world.run()


async def test_no_pool_and_no_node_ever_is_a_failure():
    world = World(nodes=0, timeout="10s")
    assert (await world.run("Failed"))["message"] == "0 of 0 nodes did not finish: the pool has no node"
    world = World(timeout="10s")
    del world.cluster.objects[ObjectRef("KVCachePool", NS, "chat")]
    assert "does not exist" in (await world.run("Failed"))["message"]


async def test_an_operation_on_a_pool_that_goes_is_cancelled():
    world = World()
    world.cluster.objects[ObjectRef("KVCachePool", NS, "chat")]["metadata"]["deletionTimestamp"] = (
        "2026-11-20T10:00:00Z"
    )
    await world.run("Cancelled")
    assert world.nodes.heard == []


async def test_numbers_that_go_up_are_written_now_and_then():
    world = World()
    world.nodes.endless |= {"node-0", "node-1"}
    for _ in range(4):
        await world.look()
    world.cluster.calls.clear()
    for n in range(20):
        for at in world.nodes.states:
            world.nodes.states[at] = OperationProgress("Running", done=n, total=40, unit="blocks", counts={"blocks": n})
        await world.look()
    assert 3 <= len(world.cluster.writes()) <= 5  # in twenty seconds
    assert "step 1 of 2), " in world.status["message"]
    assert "of 80 blocks" in world.status["message"]


async def test_status_is_written_when_it_changes_and_not_otherwise():
    world = World()
    world.nodes.endless |= {"node-0", "node-1"}
    for _ in range(4):
        await world.look()
    world.cluster.calls.clear()
    for _ in range(5):
        await world.look()
    assert world.cluster.writes() == []


# -- its end


async def test_a_deleted_one_is_cancelled_on_the_nodes_and_let_go():
    world = World()
    world.nodes.endless |= {"node-0", "node-1"}
    for _ in range(3):
        await world.look()
    world.meta["deletionTimestamp"] = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    await world.look()
    assert {node for node, _ in world.nodes.cancelled} == {"node-0", "node-1"}
    assert world.meta["finalizers"] == []
    assert world.status["phase"] == "Cancelled"


async def test_a_deleted_one_does_not_wait_for_ever_for_a_node_that_is_silent():
    world = World()
    world.nodes.endless |= {"node-0", "node-1"}
    for _ in range(3):
        await world.look()
    world.nodes.silent.add("node-1")
    world.meta["deletionTimestamp"] = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    result = await world.look()
    assert result.requeue_after_s is not None
    assert world.meta["finalizers"] == [FINALIZER_OPERATION]
    await world.look(CANCEL_TIMEOUT_S)
    assert world.meta["finalizers"] == []


async def test_a_deleted_one_that_never_began_goes_at_once():
    world = World()
    await world.look()
    world.meta["deletionTimestamp"] = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    await world.look()
    assert world.meta["finalizers"] == []
    assert world.nodes.cancelled == []


async def test_a_finished_one_is_kept_and_removed_when_its_time_has_come():
    world = World(ttlSecondsAfterFinished=100)
    await world.run()
    result = await world.look()
    assert result.requeue_after_s is not None
    assert 90 < result.requeue_after_s <= 102
    assert OP in world.cluster.objects
    await world.look(101)
    assert OP not in world.cluster.objects
    assert (await world.look()).gone


async def test_one_of_the_same_name_is_another_one():
    world = World(verify={})
    await world.run()
    first = set(world.nodes.requests)
    world.operation(verify={})
    await world.run()
    assert len(set(world.nodes.requests) - first) == 2


async def test_an_api_server_that_refuses_is_tried_again_and_nothing_is_lost():
    world = World()
    world.cluster.refuse["KVCacheOperation"] = ApiUnavailableError("429")
    with pytest.raises(ApiUnavailableError):
        await world.look()
    world.cluster.refuse.clear()
    await world.run()


@pytest.mark.parametrize("mode", ["Paused", "DryRun"])
async def test_nothing_begins_on_a_pool_that_is_not_to_be_changed(mode: str):
    world = World(verify={}, timeout="1m")
    spec = world.cluster.objects[ObjectRef("KVCachePool", NS, "chat")]["spec"]
    spec["mode"] = mode
    for _ in range(3):
        await world.look(120)
    assert world.nodes.heard == []
    assert world.status["phase"] == "Pending"
    assert f"is {mode}: the operation starts when it is Enforce" in world.status["message"]
    spec["mode"] = "Enforce"
    await world.run()
