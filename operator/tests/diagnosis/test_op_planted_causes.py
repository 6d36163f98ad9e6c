"""Twenty causes of missing hits, planted one at a time in documents of a healthy pool: each is named with its fix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from op_diagnosis_world import UNIX, World, engine_pod
from op_planted_causes import DENY_ALL, PLANTED, limit_range, skewed_clock

from kvpool_operator.diagnosis import ClusterObjects

if TYPE_CHECKING:
    from kvpool_operator.diagnosis import PoolFinding


def found(world: World) -> dict[tuple[str, str], PoolFinding]:
    return {(one.code.value, one.subject): one for one in world.findings()}


def test_there_are_twenty():
    assert len(PLANTED) == 20


def test_a_healthy_pool_has_no_findings():
    assert found(World()) == {}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_with_its_subject_and_its_fix(name: str):
    plant, code, subject, fix = PLANTED[name]
    world = World()
    plant(world)
    findings = found(world)
    assert (code, subject) in findings, list(findings)
    one = findings[code, subject]
    assert fix in one.fix
    assert one.cause
    assert one.effect
    assert one.summary


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_the_first_finding_of_its_severity_and_no_other_error_appears(name: str):
    plant, code, *_ = PLANTED[name]
    world = World()
    plant(world)
    errors = [one.code.value for one in world.findings() if one.severity.value == "Error"]
    assert set(errors) <= {code}


def test_a_clock_far_off_is_an_error_and_two_minutes_are_a_warning():
    world = World()
    skewed_clock(world)
    assert found(world)["KVP0404", "Node node-1"].severity.value == "Error"
    world.statuses["node-1"]["time"] = UNIX + 120
    assert found(world)["KVP0404", "Node node-1"].severity.value == "Warning"
    world.statuses["node-1"]["time"] = UNIX + 30
    assert not found(world)


def test_a_policy_beside_one_that_admits_the_ports_blocks_nothing():
    world = World()
    ports = [{"port": port, "protocol": "TCP"} for port in (7421, 6379)]
    admits = {
        **DENY_ALL,
        "metadata": {"name": "ok", "namespace": "kvpool-system"},
        "spec": {"ingress": [{"ports": ports}]},
    }
    world.cluster = ClusterObjects(network_policies=(DENY_ALL, admits))
    assert not found(world)
    elsewhere = {**DENY_ALL, "metadata": {"name": "deny-all", "namespace": "team-a"}}
    world.cluster = ClusterObjects(network_policies=(elsewhere,))
    assert not found(world)


def test_a_sidecar_that_is_ready_and_silent_is_named_by_its_node():
    world = World(silent_nodes={"node-1"})
    assert ("KVP0401", "Node node-1") in found(world)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("ReplicaSet", {"replicas": 0}, {"replicas": 1}),
        ("DaemonSet", {"desiredNumberScheduled": 2, "currentNumberScheduled": 1}, {"desiredNumberScheduled": 0}),
        ("Job", {}, {"active": 1}),
    ],
)
def test_a_rejection_that_is_over_is_not_a_finding(kind: str, before: dict[str, int], after: dict[str, int]):
    world = World()
    limit_range(world)
    event = world.cluster.events[0]
    about = {**event["involvedObject"], "kind": kind}
    for status, expected in ((before, 1), (after, 0)):
        workload = {**world.cluster.workloads[0], "kind": kind, "status": status}
        events = ({**event, "involvedObject": about},)
        world.cluster = replace(world.cluster, workloads=(workload,), events=events)
        assert len(found(world)) == expected


def test_a_small_share_of_misses_is_information():
    world = World()
    world.set_misses("node-0", expired=5_000)
    assert found(world)["KVP0502", "KVCachePool kvpool-system/chat"].severity.value == "Info"
    world.set_misses("node-0", expired=100)
    assert not found(world)


def test_prompts_that_are_never_found_while_blocks_are_stored_are_a_finding():
    world = World()
    for node in world.statuses.values():
        for window in node["cache"]["models"][0]["windows"]:
            window |= {"tokensFound": 0, "misses": {"never-stored": 100_000}}
    assert "cache_salt" in found(world)["KVP0206", "Model llama"].fix


def test_pods_of_one_owner_are_one_finding():
    world = World()
    for number in range(50):
        pod = engine_pod(f"skipped-{number}", "node-0")
        notes = pod["metadata"]["annotations"]
        del notes["kvpool.dev/injected"]
        notes["kvpool.dev/skip-reason"] = "connector-present: the engine has a connector"
        pod["metadata"]["ownerReferences"] = [{"controller": True, "kind": "ReplicaSet", "name": "r", "uid": "r"}]
        world.pods.append(pod)
    assert [one.code.value for one in world.findings()] == ["KVP0103"]
