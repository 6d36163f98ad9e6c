"""The overlapping roll: when new sidecars start beside old ones, and that each node has one sidecar all the time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from op_operation_world import World as Operations
from op_pool_world import GOOD, NS, Reports, World
from op_samples import inputs, pool
from op_status_samples import message, observed, reported, status

from kvpool_operator.api.annotations import ANNOTATION_RESYNC
from kvpool_operator.desired import build
from kvpool_operator.desired.rollout import local_drives, max_surge
from kvpool_operator.desired.users import Drive
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe import sidecar_poll as asking
from kvpool_operator.observe.active_sidecar import active_sidecars, in_handover, stalled_rollover
from kvpool_operator.observe.sidecar_poll import poll_sidecars
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.secrets import nodes_without_new_password
from kvpool_operator.sidecars.status import SidecarStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.desired import Inputs
    from kvpool_operator.k8s.client import Manifest

RDMA = {"protocol": "Auto", "rdma": {"resources": [{"name": "rdma/hca"}]}}
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")
SERVING = replace(GOOD, phase="Serving")
STANDING_BY = SidecarStatus.parse({"phase": "StandingBy", "node": "node-0", "ready": False})
HANDED_OVER = SidecarStatus.parse({"phase": "HandedOver", "node": "node-0", "ready": False})


def daemonset(made: Inputs) -> Manifest:
    return next(m for m in build(made) if m["kind"] == "DaemonSet")


def rolling(made: Inputs) -> Manifest:
    update: Manifest = daemonset(made)["spec"]["updateStrategy"]["rollingUpdate"]
    return update


def waits_for_drives(made: Inputs) -> bool:
    (server,) = [c for c in daemonset(made)["spec"]["template"]["spec"]["containers"] if c["name"] == "server"]
    return {"name": "KVPOOL_ALLOW_TAKEOVER", "value": "true"} in server["env"]


# -- how the DaemonSet rolls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {"maxSurge": 1, "maxUnavailable": 0}),
        ({"nodes": {"update": {"maxUnavailable": 3}}}, {"maxSurge": 3, "maxUnavailable": 0}),
        ({"nodes": {"update": {"maxUnavailable": "10%"}}}, {"maxSurge": "10%", "maxUnavailable": 0}),
        ({"nodes": {"update": {"surge": False}}}, {"maxSurge": 0, "maxUnavailable": 1}),
        (
            {"nodes": {"update": {"surge": False, "maxUnavailable": "10%"}}},
            {"maxSurge": 0, "maxUnavailable": "10%"},
        ),
        ({"transport": RDMA}, {"maxSurge": 0, "maxUnavailable": 1}),
        ({"transport": {**RDMA, "protocol": "TCP"}}, {"maxSurge": 1, "maxUnavailable": 0}),
        ({"transport": {"protocol": "Auto"}}, {"maxSurge": 1, "maxUnavailable": 0}),
    ],
)
def test_a_new_sidecar_starts_beside_the_old_one_where_two_can_stand(spec: dict[str, Any], expected: dict[str, Any]):
    made = inputs(**spec)
    assert rolling(made) == expected
    assert waits_for_drives(made) == (expected["maxUnavailable"] == 0)
    assert max_surge(daemonset(made)) == expected["maxSurge"]


def pods_of(spec: dict[str, Any]) -> list[Manifest]:
    """A pod of that pool's template."""
    template = daemonset(inputs(**spec))["spec"]["template"]
    return [{"metadata": {"name": "p"}, "spec": template["spec"], "status": {"phase": "Running"}}]


def tier(name: str) -> dict[str, Any]:
    return {"name": name, "local": {"path": f"/mnt/{name}", "capacity": "1Gi"}}


def shared(path: str) -> dict[str, Any]:
    return {"name": "cold", "shared": {"hostPath": {"path": path}, "capacity": "1Ti"}}


@pytest.mark.parametrize(
    ("runs", "wanted", "overlaps"),
    [
        ([tier("a")], [tier("a")], True),
        ([tier("a")], [tier("b")], False),
        ([tier("a"), tier("b")], [tier("b"), tier("c")], True),
        ([tier("a"), tier("b")], [tier("c"), tier("d")], False),
        # what all nodes share is no drive of theirs
        ([tier("a"), shared("/mnt/cold")], [tier("b"), shared("/mnt/cold")], False),
        ([tier("a"), shared("/mnt/b")], [tier("b")], False),
    ],
)
def test_sidecars_without_a_common_drive_do_not_overlap(
    runs: list[dict[str, Any]], wanted: list[dict[str, Any]], overlaps: bool
):
    made = replace(inputs(tiers=wanted), drives=local_drives(pods_of({"tiers": runs})))
    assert (max_surge(daemonset(made)) == 1) == overlaps
    calm = inputs(tiers=wanted)
    assert daemonset(made)["spec"]["template"] == daemonset(calm)["spec"]["template"]  # what runs rolls nothing
    one_left = replace(calm, drives=(*local_drives(pods_of({"tiers": wanted})), *made.drives))
    assert (max_surge(daemonset(one_left)) == 1) == overlaps


def test_a_pod_that_has_ended_has_no_drives_and_one_on_its_way_out_has():
    (pod,) = pods_of({"tiers": [tier("a")]})
    assert local_drives([{**pod, "status": {"phase": "Failed"}}]) == ()
    leaving = {**pod, "metadata": {"name": "p", "deletionTimestamp": "2026-11-20T10:00:00Z"}}
    user = pod["spec"]["containers"][0]["securityContext"]["runAsUser"]
    assert local_drives([leaving]) == (frozenset({Drive("/mnt/a", user)}),)


def test_while_a_sidecar_runs_as_another_user_the_old_one_is_stopped_first():
    """The new one changes the owner of the drive before it starts, so the old one must not serve from it."""
    wanted = inputs(tiers=[tier("a")])
    before = replace(wanted, drives=local_drives(pods_of({"tiers": [tier("a")], "nodes": {"runAsUser": 65532}})))
    assert max_surge(daemonset(wanted)) == 1
    assert max_surge(daemonset(before)) == 0
    assert daemonset(before)["spec"]["template"] == daemonset(wanted)["spec"]["template"]


async def test_while_drives_are_replaced_by_others_the_old_sidecar_is_stopped_first():
    world = World(tiers=[tier("a")])
    await world.settle()
    world.run()
    old, new = (pods_of({"tiers": [tier(name)]})[0]["spec"] for name in "ab")
    pods = [r for r in world.cluster.objects if r.kind == "Pod"]
    for r in pods:
        world.cluster.objects[r]["spec"] |= {k: old[k] for k in ("volumes", "containers")}
    await world.settle()
    assert max_surge(world.cluster.objects[SIDECARS]) == 1
    world.pool["spec"]["tiers"] = [tier("b")]
    for r in pods:
        await world.settle()
        assert max_surge(world.cluster.objects[SIDECARS]) == 0
        world.cluster.objects[r]["spec"] |= {k: new[k] for k in ("volumes", "containers")}
    template = world.cluster.objects[SIDECARS]["spec"]["template"]
    await world.settle()
    assert max_surge(world.cluster.objects[SIDECARS]) == 1
    assert world.cluster.objects[SIDECARS]["spec"]["template"] == template


# -- one sidecar per node ---------------------------------------------------------------------------------------------


def pod(
    name: str, made: str, *, ready: bool, node: str = "node-0", leaving: bool = False, problem: str = ""
) -> Manifest:
    waiting = {"reason": "ErrImagePull", "message": problem}
    meta = {"name": name, "creationTimestamp": f"2026-11-20T10:00:{made}Z"}
    return {
        "metadata": meta | ({"deletionTimestamp": "2026-11-20T11:00:00Z"} if leaving else {}),
        "spec": {"nodeName": node},
        "status": {
            "phase": "Pending" if problem else "Running",
            "podIP": name,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "server", "state": {"waiting": waiting}}] if problem else [],
        },
    }


def the_one(pods: Iterable[Manifest], reports: dict[str, SidecarStatus]) -> Sidecar:
    """Whatever the order in which pods are listed."""
    (sidecar,), *others = (active_sidecars(order, reports) for order in itertools.permutations(pods))
    assert all(other == (sidecar,) for other in others)
    return sidecar


def test_phases_are_read_and_a_short_report_is_a_report():
    assert (SERVING.phase, STANDING_BY.phase, HANDED_OVER.phase) == ("Serving", "StandingBy", "HandedOver")
    assert SidecarStatus.parse({"phase": "Serving", "ready": True}).ready
    for odd in ({}, {"phase": "Sleeping"}, {"phase": 5}, {"phase": None}, {"phase": ["Serving"]}, [], None):
        assert SidecarStatus.parse(odd).phase == ""


@pytest.mark.parametrize(
    ("old", "new", "chosen", "is_ready"),
    [
        # (its pod is ready, what it says); the new pod's readiness probe comes seconds after it serves
        ((True, SERVING), (False, None), "old", True),
        ((True, SERVING), (False, STANDING_BY), "old", True),
        ((True, GOOD), (False, STANDING_BY), "old", True),
        ((True, GOOD), (True, STANDING_BY), "old", True),
        ((True, HANDED_OVER), (False, SERVING), "new", True),
        ((True, HANDED_OVER), (True, SERVING), "new", True),
        ((True, HANDED_OVER), (False, replace(SERVING, ready=False)), "new", False),
        ((True, SERVING), (False, HANDED_OVER), "old", True),  # it took the drives back
        ((False, None), (True, SERVING), "new", True),
        ((True, None), (False, STANDING_BY), "old", True),  # silent at this look
        ((False, None), (True, STANDING_BY), "new", False),
        ((True, HANDED_OVER), (False, STANDING_BY), "new", False),
        ((True, HANDED_OVER), (False, None), "new", False),
        ((False, replace(GOOD, ready=False)), (False, None), "new", False),
    ],
)
def test_of_two_pods_on_a_node_one_is_the_sidecar(
    old: tuple[bool, SidecarStatus | None], new: tuple[bool, SidecarStatus | None], chosen: str, is_ready: bool
):
    pods = [pod("old", "01", ready=old[0]), pod("new", "02", ready=new[0])]
    reports = {name: r for name, (_, r) in (("old", old), ("new", new)) if r is not None}
    found = the_one(pods, reports)
    said = {"old": old, "new": new}[chosen][1]
    serves = said is not None and said.phase in ("", "Serving")
    assert found.ready == is_ready
    assert found.report == (said if serves else None)
    assert found.address == (chosen if said is None or serves else "")
    assert found.ready_delta == found.ready - old[0]
    assert found.successor_problem == ""


def test_a_pod_alone_is_the_sidecar_and_says_why_it_does_not_serve():
    alone = [pod("only", "01", ready=True)]
    assert the_one(alone, {"only": GOOD}) == Sidecar("node-0", True, "", GOOD, "only")
    assert the_one(alone, {}) == Sidecar("node-0", True, "", None, "only")
    waits = the_one(alone, {"only": STANDING_BY})
    assert (waits.ready, waits.report, waits.address, waits.ready_delta) == (False, None, "", -1)
    assert "another process owns the drives" in waits.problem
    assert "handed over its drives" in the_one(alone, {"only": HANDED_OVER}).problem


def test_a_pod_on_its_way_out_is_no_sidecar_but_counts_for_the_numbers():
    shell, new = pod("old", "01", ready=False, leaving=True), pod("new", "02", ready=True)
    assert the_one([shell, new], {"new": SERVING}) == Sidecar("node-0", True, "", SERVING, "new", ready_delta=1)
    assert active_sidecars([shell], {"old": SERVING}) == ()
    assert active_sidecars([], {}) == ()


def test_nodes_are_apart_and_pods_without_a_node_too():
    pods = [pod("b", "01", ready=True, node="b"), pod("a", "02", ready=True, node="a")]
    lost = [pod(name, "03", ready=False, node="") for name in ("x", "y")]
    found = active_sidecars([*pods, *lost], {"a": SERVING, "b": GOOD})
    assert [s.node for s in found] == ["", "", "a", "b"]


def test_a_successor_that_waits_for_a_place_belongs_to_the_node_that_it_is_for():
    field = {"key": "metadata.name", "operator": "In", "values": ["node-0"]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    place = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: Insufficient memory"}
    # by the clock of another API server it is older
    waits = {"metadata": {"name": "new", "creationTimestamp": "2026-11-20T09:00:00Z"}, "spec": {"affinity": place}}
    waits["status"] = {"phase": "Pending", "conditions": [no_room]}
    found = the_one([pod("old", "01", ready=True), waits], {"old": SERVING})
    assert (found.ready, found.report, found.address, found.ready_delta) == (True, SERVING, "old", 0)
    assert found.successor_problem == "cannot be scheduled: 0/3 nodes are available: Insufficient memory"


def test_trouble_of_a_pod_that_was_replaced_is_none_of_a_successor():
    pods = [pod("old", "01", ready=False, problem="gone"), pod("new", "02", ready=True)]
    assert the_one(pods, {"new": SERVING}).successor_problem == ""


NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


def ready_for(name: str, created: int, seconds: float | None, node: str = "node-0") -> Manifest:
    since = (NOW - timedelta(seconds=seconds or 0)).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"type": "Ready", "status": "False" if seconds is None else "True", "lastTransitionTime": since}
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-11-21T11:00:{created:02d}Z"},
        "spec": {"nodeName": node},
        "status": {"conditions": [state]},
    }


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([ready_for("old", 0, 999), ready_for("new", 1, 26)], "new,1"),
        ([ready_for("old", 0, 999), ready_for("new", 1, 24)], ""),
        ([ready_for("old", 0, 999), ready_for("new", 1, 26 + 30)], "new,2"),
        ([ready_for("old", 0, 999), ready_for("new", 1, None)], ""),
        ([ready_for("alone", 0, 999)], ""),
        ([ready_for("old", 0, 999), ready_for("other", 1, 999, "node-1")], ""),
        ([ready_for(n, k, 999 if k else 30, f"node-{n[-1]}") for n in ("b1", "a0") for k in (0, 1)], "a0,b1,33"),
    ],
)
def test_pods_that_have_lasted_while_the_ones_before_them_stay_are_overdue(pods: list[Manifest], expected: str):
    assert stalled_rollover(pods, 20.0, NOW) == expected
    leaving = [{**p, "metadata": {**p["metadata"], "deletionTimestamp": "x"}} for p in pods[:1]]
    if len(pods) == 2:
        assert stalled_rollover([*leaving, *pods[1:]], 20.0, NOW) == ""


def test_a_daemonset_is_changed_and_not_its_pods_while_pods_are_overdue():
    plain, late, later = (daemonset(replace(inputs(), resync_token=o)) for o in ("", "chat-x,1", "chat-x,2"))
    assert ANNOTATION_RESYNC not in plain["metadata"].get("annotations", {})
    assert late["metadata"]["annotations"][ANNOTATION_RESYNC] != later["metadata"]["annotations"][ANNOTATION_RESYNC]
    assert plain["spec"] == late["spec"] == later["spec"]


def test_a_password_is_not_believed_to_be_shown_by_who_only_stands_by():
    (sidecar,) = active_sidecars([pod("only", "01", ready=True)], {"only": STANDING_BY})
    assert nodes_without_new_password(inputs().secret, [sidecar]) == ["node-0"]


# -- while the drives change hands ------------------------------------------------------------------------------------


class Turns(Reports):
    """Answers that change from look to look."""

    def __init__(self, *turns: dict[str, SidecarStatus]) -> None:
        super().__init__()
        self.turns = list(turns)
        self.asked: list[list[str]] = []

    async def get_all(self, addresses: Iterable[str], port: int) -> dict[str, SidecarStatus]:
        self.asked.append(sorted(addresses))
        self.reported = self.turns.pop(0) if self.turns else self.reported
        return await super().get_all(self.asked[-1], port)


async def test_who_is_met_while_drives_change_hands_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "RETRY_INTERVAL_S", 0.0)
    pods = [pod("old", "01", ready=True), pod("new", "02", ready=False), pod("far", "01", ready=True, node="node-1")]
    calm = {"far": SERVING, "old": HANDED_OVER}
    scraper = Turns(calm | {"new": STANDING_BY}, {"old": HANDED_OVER}, {"old": HANDED_OVER, "new": SERVING})
    reports = await poll_sidecars(scraper, pods)
    assert scraper.asked == [["far", "new", "old"], ["new", "old"], ["new", "old"]]
    assert reports == calm | {"new": SERVING}
    gone = Turns(calm | {"new": STANDING_BY}, {"new": SERVING})
    assert await poll_sidecars(gone, pods) == {"far": SERVING, "new": SERVING}
    dead = Turns(calm | {"new": STANDING_BY})
    await poll_sidecars(dead, pods)
    assert len(dead.asked) == 1 + asking.MAX_RETRIES


@pytest.mark.parametrize(
    ("old", "new", "changing"),
    [
        (SERVING, STANDING_BY, False),
        (GOOD, STANDING_BY, False),
        (HANDED_OVER, SERVING, False),
        (HANDED_OVER, STANDING_BY, True),
        (None, STANDING_BY, True),  # it lets go
        (HANDED_OVER, None, True),
        (None, None, True),
    ],
)
def test_drives_change_hands_where_nobody_says_that_it_serves(
    old: SidecarStatus | None, new: SidecarStatus | None, changing: bool
):
    pods = [pod("old", "01", ready=True), pod("new", "02", ready=False)]
    said = {name: r for name, r in (("old", old), ("new", new)) if r is not None}
    assert in_handover(pods, said) == (["old", "new"] if changing else [])
    assert in_handover([pods[0]], said) == []
    assert in_handover([{**pods[0], "status": {}}, pods[1]], said) == []
    dead = [pod("old", "01", ready=False), pods[1]]
    assert in_handover(dead, {n: r for n, r in said.items() if n == "new"}) == []


# -- what users are told ----------------------------------------------------------------------------------------------


def two(successor_problem: str = "", **more: Any) -> tuple[Sidecar, ...]:
    return tuple(
        Sidecar(f"node-{i}", True, "", GOOD, successor_problem=successor_problem if i else "", **more) for i in range(2)
    )


def test_trouble_of_a_successor_is_told_while_the_old_one_serves():
    made = status(observed(updated=1, sidecars=two("cannot be scheduled: Insufficient memory")))
    assert reported(made, "Ready") == ("True", "Serving")
    assert reported(made, "StorageReady") == ("True", "AllNodesReady")
    assert reported(made, "Progressing") == ("True", "RolloutStuck")
    words = message(made, "Progressing")
    assert words.startswith("1 of 2 nodes run the current spec; node-1: new sidecar: cannot be scheduled: Insuff")
    assert "surge: false" in words
    assert made["phase"] == "Updating"
    assert reported(status(observed(updated=1, sidecars=two())), "Progressing") == ("True", "RollingOut")
    refused = status(observed(updated=1, sidecars=two(), successor_rejection="exceeded quota: compute"))
    assert reported(refused, "StorageReady") == ("True", "AllNodesReady")
    assert reported(refused, "Progressing") == ("True", "RolloutStuck")
    assert "rejects the new sidecars' pods: exceeded quota: compute" in message(refused, "Progressing")


@pytest.mark.parametrize(
    ("counted", "ready_delta", "ready"), [(1, 1, "2/2"), (2, 1, "2/2"), (2, -1, "1/2"), (0, -1, "0/2"), (1, 0, "1/2")]
)
def test_the_nodes_that_serve_are_counted_and_not_the_oldest_pods(counted: int, ready_delta: int, ready: str):
    sidecars = (replace(two()[0], ready_delta=ready_delta), two()[1])
    assert status(observed(ready=counted, sidecars=sidecars))["nodes"]["summary"] == ready


async def test_refused_successors_are_told_until_a_pod_is_made():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    world.cluster.objects[SIDECARS]["status"]["updatedNumberScheduled"] = 1
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": NS},
        "involvedObject": {"uid": world.cluster.objects[SIDECARS]["metadata"]["uid"]},
        "lastTimestamp": "2026-11-20T10:05:00Z",
        "message": "exceeded quota: compute",
    }
    world.cluster.put(event)
    await world.look()
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Progressing")["reason"] == "RolloutStuck"
    assert "exceeded quota: compute" in world.condition("Progressing")["message"]
    made = world.cluster.objects[ObjectRef("Pod", NS, "chat-sidecar-0")]["metadata"]
    made["creationTimestamp"] = "2026-11-20T10:06:00Z"
    await world.look()
    assert world.condition("Progressing")["reason"] == "RollingOut"


async def test_a_pool_with_two_pods_on_a_node_is_told_as_with_one():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    before = world.pool["status"]
    first = world.cluster.objects[ObjectRef("Pod", NS, "chat-sidecar-0")]
    first["metadata"]["creationTimestamp"] = "2026-11-20T10:00:00Z"
    beside = {**first, "metadata": {**first["metadata"], "name": "next", "creationTimestamp": "2026-11-20T10:00:09Z"}}
    beside["status"] = {"phase": "Running", "podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "False"}]}
    world.cluster.put(beside)
    for old, new in ((SERVING, None), (SERVING, STANDING_BY), (HANDED_OVER, SERVING)):
        said = {"10.0.0.0": old, "10.0.0.9": new, "10.0.0.1": GOOD}
        world.reports.reported = {address: report for address, report in said.items() if report is not None}
        await world.look()
        assert world.pool["status"] == before
        assert world.cluster.writes() == []


# -- operations -------------------------------------------------------------------------------------------------------


async def test_an_operation_goes_to_the_pod_that_serves():
    world = Operations()
    target = ObjectRef("Pod", NS, "chat-sidecar-node-0")
    old = world.cluster.objects[target]
    beside = {
        **old,
        "metadata": {**old["metadata"], "name": "next"},
        "status": {"phase": "Running", "podIP": "10.1.0.0"},
    }
    old["metadata"]["creationTimestamp"] = "2026-11-20T10:00:00Z"
    beside["metadata"]["creationTimestamp"] = "2026-11-20T10:00:09Z"
    world.cluster.put(beside)

    async def targets() -> dict[str, str]:
        return {t.node: t.address for t in await world.reconciler._pools.sidecars(pool())}

    world.reports.reported = {"10.0.0.0": SERVING, "10.1.0.0": STANDING_BY}
    assert await targets() == {"node-0": "10.0.0.0", "node-1": "10.0.0.1"}
    world.reports.reported = {"10.0.0.0": HANDED_OVER, "10.1.0.0": SERVING}
    assert await targets() == {"node-0": "10.1.0.0", "node-1": "10.0.0.1"}
    del world.cluster.objects[ObjectRef("Pod", NS, "next")]
    old["metadata"]["deletionTimestamp"] = "2026-11-20T10:01:00Z"
    assert await targets() == {"node-0": "", "node-1": "10.0.0.1"}
