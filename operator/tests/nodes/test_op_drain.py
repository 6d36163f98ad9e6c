"""Nodes that are to leave: what says so, what becomes of it, and a KVCacheNode for each node, seldom written."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from op_samples import SECRET, MemoryCluster, pool

from kvpool_operator.api.conditions import find
from kvpool_operator.api.node import DrainStatus
from kvpool_operator.errors import SidecarUnavailableError
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.k8s.rate_limiter import TokenBucket
from kvpool_operator.k8s.reflector import Store
from kvpool_operator.nodes.drain import DrainSettings, drain_signal, next_state, on_node_removed
from kvpool_operator.nodes.node_cache import NodeCache
from kvpool_operator.nodes.reconciler import NodeReconciler
from kvpool_operator.nodes.status import node_name
from kvpool_operator.observe.snapshot import Sidecar, Snapshot
from kvpool_operator.sidecars.status import DrainReport, SidecarStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

NOW = "2026-11-21T10:00:00Z"
LATER = "2026-11-21T10:09:59Z"
TOO_LATE = "2026-11-21T10:10:00Z"
EVACUATE = DrainSettings(evacuate=True, timeout_s=600)
STAYS = DrainReport()
MOVING = DrainReport(
    leaving=True, by_node=True, moved_blocks=3, moved_bytes=3 << 20, remaining_blocks=7, remaining_bytes=7 << 20
)
CLEAN = DrainReport(leaving=True, by_node=True, clean=True, moved_blocks=10, moved_bytes=10 << 20)


def node(name: str = "n", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec}


# -- what says that a node is to leave


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, ""),
        ({"unschedulable": True}, "it is cordoned"),
        ({"unschedulable": False}, ""),
        ({"taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]}, ""),
        ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "value": "1"}]}, "Cluster Autoscaler removes it"),
        ({"taints": [{"key": "DeletionCandidateOfClusterAutoscaler"}]}, "Cluster Autoscaler may remove it soon"),
        ({"taints": [{"key": "karpenter.sh/disrupted"}], "unschedulable": True}, "Karpenter removes it"),
        ({"taints": [{"key": "karpenter.sh/disruption", "value": "disrupting"}]}, "Karpenter removes it"),
        ({"taints": None}, ""),
    ],
)
def test_a_node_says_that_it_is_to_leave(spec: dict[str, Any], why: str):
    assert drain_signal(node(**spec)).reason == why


# -- from state to state


def state(name: str, **more: Any) -> DrainStatus:
    if name == "None":
        return DrainStatus()
    end = {"end_time": NOW} if name in ("Drained", "Abandoned") else {}
    return DrainStatus.model_validate({"state": name, "reason": "it is cordoned", "start_time": NOW, **end, **more})


@pytest.mark.parametrize(
    ("before", "leaving", "report", "now", "after", "command"),
    [
        ("None", "", STAYS, NOW, "None", None),
        ("None", "", None, NOW, "None", None),
        ("None", "", MOVING, NOW, "None", "remain"),
        ("None", "it is cordoned", None, NOW, "Requested", None),
        ("None", "it is cordoned", STAYS, NOW, "Requested", "evacuate"),
        ("None", "it is cordoned", MOVING, NOW, "Evacuating", None),
        ("Requested", "it is cordoned", STAYS, LATER, "Requested", "evacuate"),
        ("Requested", "it is cordoned", None, TOO_LATE, "Abandoned", None),
        ("Requested", "it is cordoned", MOVING, LATER, "Evacuating", None),
        ("Requested", "it is cordoned", CLEAN, LATER, "Drained", None),
        ("Requested", "", STAYS, NOW, "None", None),
        ("Evacuating", "it is cordoned", MOVING, LATER, "Evacuating", None),
        ("Evacuating", "it is cordoned", MOVING, TOO_LATE, "Abandoned", "remain"),
        ("Evacuating", "it is cordoned", None, LATER, "Requested", None),
        ("Evacuating", "it is cordoned", STAYS, LATER, "Requested", "evacuate"),  # the sidecar started again
        ("Evacuating", "it is cordoned", CLEAN, TOO_LATE, "Drained", None),
        ("Evacuating", "", MOVING, LATER, "None", "remain"),
        ("Drained", "it is cordoned", CLEAN, TOO_LATE, "Drained", None),
        ("Drained", "it is cordoned", MOVING, TOO_LATE, "Drained", None),  # a new block is on its way
        ("Drained", "it is cordoned", STAYS, TOO_LATE, "Drained", "evacuate"),
        ("Drained", "it is cordoned", None, TOO_LATE, "Drained", None),
        ("Drained", "", CLEAN, TOO_LATE, "None", "remain"),
        ("Abandoned", "it is cordoned", STAYS, TOO_LATE, "Abandoned", None),
        ("Abandoned", "it is cordoned", MOVING, TOO_LATE, "Abandoned", "remain"),
        ("Abandoned", "", STAYS, TOO_LATE, "None", None),
    ],
)
def test_from_state_to_state(before: str, leaving: str, report: Any, now: str, after: str, command: str | None):
    found, reported = next_state(state(before), leaving, EVACUATE, report, now)
    assert (found.state, reported) == (after, command)
    assert found.start_time == ("" if after == "None" else NOW)
    assert bool(found.end_time) == (after in ("Drained", "Abandoned"))


@pytest.mark.parametrize("report", [None, STAYS, MOVING])
def test_where_the_policy_is_to_abandon_nothing_is_moved(report: Any):
    found, reported = next_state(state("None"), "it is cordoned", DrainSettings(False, 600), report, NOW)
    assert found.state == "Abandoned"
    assert reported == ("remain" if report is MOVING else None)


def test_the_numbers_are_the_sidecars_and_stay_when_it_is_silent():
    found, _ = next_state(state("Requested"), "it is cordoned", EVACUATE, MOVING, LATER)
    assert (found.moved_blocks, found.moved, found.remaining_blocks, found.remaining) == (3, "3Mi", 7, "7Mi")
    silent, _ = next_state(found, "it is cordoned", EVACUATE, None, LATER)
    assert (silent.moved, silent.remaining, silent.message) == ("3Mi", "7Mi", "the sidecar does not answer")


def test_an_operations_drain_shows_and_is_not_ended():
    once = replace(MOVING, by_node=False)
    found, reported = next_state(DrainStatus(), "", EVACUATE, once, NOW)
    assert (found.state, found.reason, found.moved, reported) == (
        "Evacuating",
        "a KVCacheOperation moves its blocks off",
        "3Mi",
        None,
    )
    found, reported = next_state(found, "", EVACUATE, replace(once, clean=True), TOO_LATE)
    assert (found.state, found.start_time, reported) == ("Drained", NOW, None)
    # cordoned meanwhile: that drain begins now, whatever the other one did
    assert next_state(found, "it is cordoned", EVACUATE, once, TOO_LATE)[1] == "evacuate"
    assert next_state(found, "it is cordoned", EVACUATE, once, TOO_LATE)[0].start_time == TOO_LATE
    assert next_state(found, "", EVACUATE, STAYS, TOO_LATE) == (DrainStatus(), None)


def test_a_node_that_went_ends_its_drain():
    assert on_node_removed(state("Evacuating"), LATER).state == "Abandoned"
    assert on_node_removed(state("Drained"), LATER) == state("Drained")
    assert on_node_removed(DrainStatus(), LATER) == DrainStatus()


# -- KVCacheNodes


def test_no_two_pools_and_nodes_share_a_name():
    assert node_name("a", "b-c") != node_name("a-b", "c")
    long = [node_name("pool", "n" * 250 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 253


class Sidecars:
    """Does what it is told, like sidecars would."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, str, dict[str, Any]]] = []
        self.away = False

    async def start(self, secret: Any, to: Any, name: str, kind: str, params: Mapping[str, Any]) -> None:
        assert secret is SECRET
        if self.away:
            raise SidecarUnavailableError("nobody is there")
        self.reported.append((to.node, kind, dict(params)))


class World:
    def __init__(self, bucket: TokenBucket | None = None, **spec: Any) -> None:
        self.cluster = MemoryCluster()
        self.pool = pool(**spec)
        self.sidecars = Sidecars()
        self.clock = 0.0
        self.now = datetime(2026, 11, 21, 10, tzinfo=UTC)
        self.found: dict[str, Sidecar] = {}
        self.start(bucket)

    def start(self, bucket: TokenBucket | None = None) -> None:
        """An operator starts."""
        self.nodes = Store()
        self.keeper = NodeReconciler(
            self.cluster,
            NodeCache(self.nodes),
            self.sidecars,
            bucket=bucket,
            clock=lambda: self.clock,
            now=lambda: self.now,
        )  # type: ignore[arg-type]

    def serve(self, name: str, **spec: Any) -> None:
        """A node with a sidecar that serves."""
        self.cluster.put(node(name, **spec))
        self.report(name)

    def report(self, name: str, **report: Any) -> None:
        values: dict[str, Any] = {
            "ready": True,
            "capacity_bytes": 1 << 30,
            "used_bytes": 1 << 20,
            "blocks": 1,
            "node_generation": 7,
        }
        self.found[name] = Sidecar(
            name,
            True,
            "",
            SidecarStatus(**{**values, "index_connected": True, "transport": "TCP", **report}),
            f"10.0.0.{name}",
        )

    def mark(self, name: str, **spec: Any) -> None:
        """The watch lists a change."""
        self.nodes.upsert(self.cluster.put(node(name, **spec)))

    async def look(self, after_s: float = 10) -> float | None:
        self.cluster.calls.clear()
        self.clock += after_s
        self.now += timedelta(seconds=after_s)
        return await self.keeper.reconcile(self.pool, Snapshot(raw={}, sidecars=tuple(self.found.values())), SECRET)

    def status(self, name: str) -> dict[str, Any]:
        found = self.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", f"chat.{name}")]
        return dict(found["status"])

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        found = find(self.status(name)["conditions"], kind)
        assert found is not None
        return found["status"], found["reason"]


async def test_each_node_has_one_that_goes_with_the_pool():
    world = World()
    world.serve("a")
    world.serve("b")
    assert await world.look() is None
    live = world.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", "chat.a")]
    assert live["spec"] == {"pool": "chat", "node": "a"}
    assert live["metadata"]["ownerReferences"][0]["uid"] == world.pool.metadata.uid
    status = world.status("a")
    assert (status["capacity"], status["used"], status["blocks"], status["generation"]) == ("1Gi", "1Mi", 1, 7)
    assert status["devices"] == [{"name": "nvme", "path": "/mnt/nvme/kv", "health": "OK"}]
    assert [world.condition("a", k) for k in ("Ready", "DiskHealthy", "IndexConnected")] == [
        ("True", "Serving"), ("True", "DrivesHealthy"), ("True", "Connected"),
    ]  # fmt: skip
    await world.look()
    assert world.cluster.writes() == []


async def test_numbers_are_written_twice_a_minute_and_what_flips_at_once():
    world = World()
    world.serve("a")
    await world.look()
    writes = []
    for n in range(12):
        world.report("a", blocks=n)
        await world.look(after_s=5)
        writes += world.cluster.writes()
    assert len(writes) == 2
    world.report("a", blocks=99, failing_drives=("nvme",))
    await world.look(after_s=1)
    assert world.cluster.writes() == [("apply status", ObjectRef("KVCacheNode", "kvpool-system", "chat.a"))]
    assert world.condition("a", "DiskHealthy") == ("False", "DriveErrors")
    assert world.status("a")["devices"][0]["health"] == "Failing"
    assert world.status("a")["blocks"] == 99


async def test_a_change_of_the_pool_alone_is_not_written_to_each_node():
    world = World()
    world.serve("a")
    await world.look()
    world.pool = world.pool.model_copy(
        update={"metadata": world.pool.metadata.model_copy(update={"generation": world.pool.metadata.generation + 1})}
    )
    for _ in range(5):
        await world.look(after_s=60)
        assert world.cluster.writes() == []
    world.report("a", failing_drives=("nvme",))
    await world.look()
    assert {c["observedGeneration"] for c in world.status("a")["conditions"]} == {world.pool.metadata.generation}


async def test_many_nodes_do_not_flood_the_api_server():
    world = World()
    world.start(TokenBucket(rate_per_s=2, burst=20, clock=lambda: world.clock))
    names = [str(n) for n in range(200)]
    for name in names:
        world.serve(name)
    writes = 0
    for _ in range(30):
        await world.look()
        writes += sum(verb == "apply status" for verb, _ in world.cluster.writes())
    assert 200 <= writes <= 20 + 300 * 2
    for name in names:
        world.report(name, blocks=5)
    await world.look(after_s=60)
    assert len(world.cluster.writes()) <= 10  # half of the bucket is for what flips
    world.report("0", index_connected=False)
    world.report("1", index_connected=False)
    await world.look(after_s=0)
    assert world.condition("0", "IndexConnected")[0] == world.condition("1", "IndexConnected")[0] == "False"


async def test_a_cordoned_node_is_drained_and_uncordoned_stays():
    world = World(nodes={"drain": {"bandwidth": "8Mi"}})
    world.serve("a")
    world.serve("b")
    await world.look()
    world.mark("a", unschedulable=True)
    assert await world.look() == 2.0
    assert world.sidecars.reported == [("a", "evacuate", {"bandwidth": 8 << 20})]
    assert world.status("a")["drain"]["state"] == "Requested"
    world.report("a", drain=MOVING)
    assert await world.look(after_s=2) == 2.0
    assert world.status("a")["drain"] | {"startTime": "", "reason": ""} == {
        "state": "Evacuating", "reason": "", "startTime": "", "endTime": "", "movedBlocks": 3, "moved": "3Mi",
        "remainingBlocks": 7, "remaining": "7Mi", "message": "",
    }  # fmt: skip
    world.report("a", drain=CLEAN)
    assert await world.look(after_s=2) is None
    assert world.status("a")["drain"]["state"] == "Drained"
    assert world.status("b")["drain"]["state"] == "None"
    world.mark("a")
    await world.look()
    assert world.sidecars.reported[1:] == [("a", "remain", {})]
    assert world.status("a")["drain"]["state"] == "None"


async def test_a_sidecar_that_does_not_listen_is_told_again_until_the_time_is_over():
    world = World(nodes={"drain": {"timeout": "30s"}})
    world.serve("a", unschedulable=True)
    world.sidecars.away = True
    await world.look()
    assert world.status("a")["drain"]["state"] == "Requested"
    world.sidecars.away = False
    await world.look(after_s=2)
    assert world.sidecars.reported == []  # the last request failed a moment ago
    await world.look(after_s=10)
    await world.look(after_s=2)
    assert [kind for _, kind, _ in world.sidecars.reported] == ["evacuate"]
    await world.look(after_s=30)
    assert world.status("a")["drain"]["state"] == "Abandoned"
    assert await world.look() is None


async def test_an_operator_that_starts_anew_goes_on_with_a_drain():
    world = World(nodes={"drain": {"timeout": "1m"}})
    world.serve("a", unschedulable=True)
    await world.look()
    began = world.status("a")["drain"]["startTime"]
    world.report("a", drain=MOVING)
    world.start()
    await world.look(after_s=20)
    assert world.status("a")["drain"]["startTime"] == began
    await world.look(after_s=50)
    assert world.status("a")["drain"]["state"] == "Abandoned"


async def test_an_operator_that_starts_anew_writes_only_what_is_new():
    world = World()
    for name in ("a", "b", "c"):
        world.serve(name)
    await world.look()
    broken = world.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", "chat.b")]
    broken["status"]["conditions"] = ["of another make"]
    world.report("c", failing_drives=("nvme",))
    world.start()
    await world.look()
    changed = {("apply status", ObjectRef("KVCacheNode", "kvpool-system", f"chat.{name}")) for name in "bc"}
    assert set(world.cluster.writes()) == changed
    assert world.condition("b", "Ready") == ("True", "Serving")


async def test_a_paused_pool_is_told_of_and_not_drained():
    world = World(mode="Paused")
    world.serve("a", unschedulable=True)
    await world.look()
    assert world.sidecars.reported == []
    assert world.condition("a", "Ready") == ("True", "Serving")


async def test_a_node_that_is_gone_is_remembered_as_long_as_the_index_does():
    world = World(index={"nodeExpiry": "5m"})
    world.serve("a", unschedulable=True)
    world.report("a", drain=MOVING)
    await world.look()
    del world.found["a"], world.cluster.objects[ObjectRef("Node", "", "a")]
    world.nodes.delete(NamespacedName("", "a"))
    await world.look()
    assert world.condition("a", "Ready") == ("False", "NodeNotFound")
    assert world.status("a")["drain"]["state"] == "Abandoned"
    assert world.status("a")["blocks"] == 1  # as it was told last
    await world.look(after_s=280)
    assert world.condition("a", "Ready") == ("False", "NodeNotFound")
    await world.look(after_s=40)
    assert not [r for r in world.cluster.objects if r.kind == "KVCacheNode"]


async def test_a_node_that_comes_back_goes_on_with_its_own():
    world = World()
    world.serve("a")
    await world.look()
    sidecar = world.found.pop("a")
    await world.look()
    assert world.condition("a", "Ready") == ("False", "SidecarNotFound")
    world.found["a"] = replace(sidecar, ready=False, report=None, problem="container server failed: no drive")
    await world.look()
    assert world.condition("a", "Ready") == ("False", "NodesNotReady")
    world.report("a", node_generation=8)
    await world.look()
    assert world.condition("a", "Ready") == ("True", "Serving")
    assert world.status("a")["generation"] == 8


async def test_one_that_somebody_removed_is_made_anew():
    world = World()
    world.serve("a")
    await world.look()
    del world.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", "chat.a")]
    await world.look(after_s=301)
    assert world.status("a")["blocks"] == 1


async def test_what_another_pool_of_that_name_left_is_made_anew():
    world = World()
    world.serve("a", unschedulable=True)
    await world.look()
    manifest = world.pool.model_dump(by_alias=True)
    manifest["metadata"]["uid"] = "another"
    world.pool = type(world.pool).parse(manifest)
    await world.look()
    live = world.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", "chat.a")]
    assert live["metadata"]["ownerReferences"][0]["uid"] == "another"
    # the one before went late, with its owner
    del world.cluster.objects[ObjectRef("KVCacheNode", "kvpool-system", "chat.a")]
    world.report("a", index_connected=False)
    await world.look()
    await world.look()
    assert world.condition("a", "IndexConnected")[0] == "False"


def test_only_pools_with_a_sidecar_there_are_concerned():
    one, two = NamespacedName("ns", "one"), NamespacedName("ns", "two")
    book = NodeCache(Store())
    book.set_pool_nodes(one, ["a", "b"])
    book.set_pool_nodes(two, ["b"])
    assert book.pools_on("a") == [one]
    assert sorted(book.pools_on("b")) == [one, two]
    book.set_pool_nodes(one, [])
    assert book.pools_on("a") == []
