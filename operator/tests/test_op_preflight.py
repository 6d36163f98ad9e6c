"""The look at nodes before a roll-out: the decision, what it makes, and whole passes with the cluster in memory."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from op_samples import ENV, LOCAL, SECRET, inputs, pool
from test_op_reconcile import NS, World

from kvpool.config import PoolConfig, loads
from kvpool_operator.api.conditions import first_verdict
from kvpool_operator.api.pool.status import NodesStatus, PoolStatus
from kvpool_operator.desired import ExternalIndexUrl, Inputs
from kvpool_operator.desired.dry_run import HIDDEN, dry_run_configmap
from kvpool_operator.desired.preflight import build_preflight, preflight_spec
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.snapshot import Snapshot
from kvpool_operator.pools.conditions import ConditionInput, ReconcileOutcome
from kvpool_operator.pools.conditions.preflight import PREFLIGHT_PASSED
from kvpool_operator.preflight.gate import GRACE_S, WAIT_S, PreflightResult
from kvpool_operator.preflight.results import Finding, NodePreflight, PreflightRun, parse

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)
LOOK = ObjectRef("DaemonSet", NS, "chat-preflight")
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")
CONFIG = ObjectRef("ConfigMap", NS, "chat-config")
SHOWN = ObjectRef("ConfigMap", NS, "chat-plan")


def answer(passed: bool = True, **finding: Any) -> dict[str, Any]:
    listed = [{"check": "Speed", "level": "Ok", "message": "fast"}]
    if finding:
        listed.insert(
            0, {"check": "Directory", "level": "Fail", "message": "it is full", "advice": "mend it", **finding}
        )
    return {"preflight": {"version": 1, "passed": passed, "findings": listed}}


BAD = answer(passed=False, tier="nvme")


def looks(*passed: bool | None, desired: int | None = -1) -> PreflightRun:
    nodes = tuple(
        NodePreflight(
            f"node-{i}", p, (Finding("Directory", "Fail", "it is full", node=f"node-{i}"),) if p is False else ()
        )
        for i, p in enumerate(passed)
    )
    return PreflightRun(len(passed) if desired == -1 else desired, nodes, "s")


def told(gate: Any) -> dict[str, Any]:
    """What status.preflight holds after a pass."""
    status = gate.to_status()
    return status.model_dump(by_alias=True) if status is not None else {}


# -- the decision


@pytest.mark.parametrize(
    ("policy", "passed", "state", "is_open"),
    [
        ("Warn", [True, True], "Done", True),
        ("Warn", [True, False], "Done", True),
        ("Warn", [False, False], "Held", False),
        ("Warn", [True, None], "Checking", False),
        ("Warn", [False, None], "Checking", False),
        ("Require", [True, True], "Done", True),
        ("Require", [True, False], "Held", False),
        ("Require", [True, None], "Checking", False),
        ("Skip", [None, None], "Skipped", True),
        ("Warn", [], "Done", True),
        ("Require", [], "Done", True),
    ],
)
def test_what_is_rolled_out(policy: str, passed: list[bool | None], state: str, is_open: bool):
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    assert (gate.state, gate.is_open) == (state, is_open)


@pytest.mark.parametrize(
    ("policy", "passed", "after", "state", "is_open"),
    [
        ("Warn", [True, None], GRACE_S + 1, "Done", True),
        ("Warn", [False, None], GRACE_S + 1, "Checking", False),
        ("Warn", [False, None], WAIT_S + 1, "Held", False),
        ("Warn", [None, None], WAIT_S + 1, "Done", True),
        ("Require", [True, None], WAIT_S + 1, "Held", False),
        ("Require", [None, None], WAIT_S + 1, "Held", False),
    ],
)
def test_nodes_that_do_not_answer_are_waited_for_so_long(
    policy: str, passed: list[bool | None], after: float, state: str, is_open: bool
):
    first = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    later = PreflightResult.evaluate(policy, "s", looks(*passed), told(first), NOW + timedelta(seconds=after))
    assert (later.state, later.is_open) == (state, is_open)


def test_a_look_is_not_over_before_it_is_known_how_many_nodes_there_are():
    assert PreflightResult.evaluate("Warn", "s", looks(True, desired=None), {}, NOW).state == "Checking"


def test_a_verdict_is_remembered_until_something_else_is_asked():
    done = told(PreflightResult.evaluate("Warn", "s", looks(True, False), {}, NOW))
    again = PreflightResult.evaluate("Warn", "s", PreflightRun(), done, NOW)
    assert (again.state, again.is_open, again.passed, again.failed) == ("Done", True, 1, 1)
    assert again.findings[0].message == "it is full"
    assert told(again) == done
    assert PreflightResult.evaluate("Warn", "other", PreflightRun(), done, NOW).state == "Checking"
    assert (
        PreflightResult.evaluate("Require", "s", PreflightRun(), done, NOW).state == "Checking"
    )  # was good enough for Warn alone


def test_a_dry_run_ends_also_when_nothing_would_be_rolled_out():
    gate = PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW, dry_run=True)
    assert (gate.state, gate.is_open) == ("Done", False)
    assert PreflightResult.evaluate("Warn", "s", PreflightRun(), told(gate), NOW, dry_run=True).state == "Done"
    assert PreflightResult.evaluate("Warn", "s", PreflightRun(), told(gate), NOW).state == "Checking"


def test_what_is_held_goes_on_when_it_is_mended_however_late():
    held = told(PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW))
    later = NOW + timedelta(days=2)
    assert PreflightResult.evaluate("Warn", "s", looks(False), held, later).state == "Held"
    assert PreflightResult.evaluate("Warn", "s", looks(True), held, later).state == "Done"


def test_where_nothing_may_be_done_what_is_known_is_told():
    held = told(PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW))
    assert (PreflightResult.from_status("Warn", held).state, PreflightResult.from_status("Warn", held).is_open) == (
        "Held",
        False,
    )
    assert PreflightResult.from_status("Warn", {}).state == "Unknown"
    assert PreflightResult.from_status("Skip", held).state == "Skipped"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["preflight", "passed", "findings", "check", "level", "message", "spec", "state", "nodes"]
                ),
                x,
            )
        ),
    )
)
def test_odd_answers_and_statuses_are_no_answers(raw: Any):
    look = parse(raw, "node")
    assert look.passed in (None, True, False)
    status = raw if isinstance(raw, dict) else {}
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(1, (look,), "s"), status, NOW)
    PoolStatus(preflight=gate.to_status()).dump()


def test_long_answers_are_cut_and_the_worst_is_told_first():
    listed = [{"check": "C" * 999, "level": "Warn", "message": "m" * 9999}] * 5000
    noisy = parse({"preflight": {"passed": True, "findings": listed}}, "node-a")
    failing = parse(BAD, "node-b")
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(2, (noisy, failing), "s"), {}, NOW)
    status = gate.to_status()
    assert status is not None
    assert len(status.findings) == 8
    assert (status.findings[0].node, status.findings[0].tier) == ("node-b", "nvme")
    assert len(json.dumps(status.model_dump())) < 8192


def test_one_kind_of_failure_on_many_nodes_hides_no_other():
    many = [NodePreflight(f"n{i}", False, (Finding("Index", "Fail", "away", node=f"n{i}"),)) for i in range(50)]
    other = NodePreflight("z", False, (Finding("Directory", "Fail", "full", node="z"),))
    found = PreflightResult.evaluate("Warn", "s", PreflightRun(51, (*many, other), "s"), {}, NOW).findings
    assert {f.check for f in found} == {"Index", "Directory"}


def measured(node: str, tier: str, **values: float) -> NodePreflight:
    return parse({"preflight": {"passed": True, "findings": [{"level": "Ok", "tier": tier, "values": values}]}}, node)


def test_of_what_was_measured_the_worst_is_told_and_remembered():
    nodes = (
        measured("a", "nvme", write_mb_s=900.2, read_mb_s=3000.0),
        measured("b", "nvme", write_mb_s=800.0, read_mb_s=0.4),
        measured("a", "nfs", round_trip_ms=1.5),
        measured("b", "nfs", round_trip_ms=20.1),
    )
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(4, nodes, "s"), {}, NOW)
    status = told(gate)
    assert [{k: v for k, v in m.items() if v} for m in status["measured"]] == [
        {"tier": "nfs", "roundTripMs": 21, "slowestNode": "b"},
        {"tier": "nvme", "writeMBps": 800, "readMBps": 1, "slowestNode": "b"},
    ]
    assert told(PreflightResult.evaluate("Warn", "s", PreflightRun(), status, NOW)) == status


@pytest.mark.parametrize("value", [None, "9", True, -1, float("inf"), float("nan"), 2**60, [1]])
def test_odd_measures_are_none(value: Any):
    assert measured("a", "nvme", read_mb_s=value).measures == ()


@pytest.mark.parametrize(
    ("policy", "passed", "after", "status", "reason", "words"),
    [
        ("Skip", [], 0, "Unknown", "PreflightSkipped", "Skip"),
        ("Warn", [True, None], 0, "Unknown", "PreflightRunning", "1 of 2"),
        ("Warn", [True, True], 0, "True", "NodesPassed", "2 of 2"),
        ("Warn", [True, False], 0, "False", "NodesFailed", "1 of 2 nodes passed; node-1: Directory: it is full"),
        ("Warn", [False], 0, "False", "NodesFailed", "nothing is rolled out"),
        ("Warn", [True, None], 99, "Unknown", "NodesUnresponsive", "1 did not report"),
        ("Warn", [], 0, "Unknown", "NoMatchingNodes", "spec.nodes"),
    ],
)
def test_what_is_told(policy: str, passed: list[bool | None], after: int, status: str, reason: str, words: str):
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), told(gate), NOW + timedelta(seconds=after))
    outcome = ReconcileOutcome(preflight=gate)
    verdict = first_verdict(PREFLIGHT_PASSED, ConditionInput(pool(), Snapshot(raw={}), NodesStatus(), outcome))
    assert (verdict.status, verdict.reason) == (status, reason)
    assert words in verdict.message


# -- what it makes


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ({"tiers": [LOCAL, {"name": "b", "local": {"path": "/mnt/b", "capacity": "1Gi"}}]}, True),
        ({"transport": {"protocol": "RDMA"}}, True),
        ({"nodes": {"selector": {"matchLabels": {"a": "b"}}}}, True),
        ({"cache": {"eviction": {"highWatermark": 90}}}, False),
        ({"preflight": "Require"}, False),
        ({"tiers": [{"name": "nvme", "local": LOCAL["local"] | {"capacity": "99Gi", "reserveFree": "9%"}}]}, False),
        ({"tiers": [{"name": "nvme", "local": LOCAL["local"] | {"dedicatedFilesystem": "Require"}}]}, True),
        ({"transport": {"streams": 4}}, False),
    ],
    ids=str,
)
def test_what_is_looked_at_again(changed: dict[str, Any], is_other: bool):
    assert (preflight_spec(inputs(**changed)) != preflight_spec(inputs())) is is_other


def test_an_annotation_has_the_nodes_looked_at_again():
    asked = pool()
    again = asked.model_copy(
        update={"metadata": asked.metadata.model_copy(update={"annotations": {"kvpool.dev/preflight": "2"}})}
    )
    assert preflight_spec(Inputs(again, ENV, SECRET)) != preflight_spec(inputs())


EXTERNAL = Inputs(
    pool(index={"external": {"urlSecretRef": {"name": "redis"}}}),
    ENV,
    SECRET,
    external=ExternalIndexUrl("rediss://r:6380/2", "me", "their-password", {"index-ca.crt": "their-ca"}),
)


@pytest.mark.parametrize("asked", [inputs(), EXTERNAL], ids=["managed", "external"])
def test_the_objects_are_valid_and_hold_no_secret_in_the_open(asked: Inputs):
    made = build_preflight(asked)
    for manifest in made:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
        if manifest["kind"] != "Secret":
            assert "their-password" not in json.dumps(manifest)
            assert asked.secret.pool_secret not in json.dumps(manifest)
    config = next(m for m in made if m["kind"] == "ConfigMap")["data"]["pool.json"]
    assert loads(PoolConfig, config).index.url == ("rediss://r:6380/2" if asked.external else "")


def test_its_pods_are_let_in_to_where_policies_are_wanted():
    wanted = replace(ENV, network_policies=True)
    (policy,) = [m for m in build_preflight(Inputs(pool(), wanted, SECRET)) if m["kind"] == "NetworkPolicy"]
    kubernetes_validate.validate(policy, "1.34", strict=True)
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "preflight"
    assert policy["spec"]["ingress"] == [{"ports": [{"port": 7422, "protocol": "TCP"}]}]
    unwanted = replace(ENV, network_policies=False)
    assert not [m for m in build_preflight(Inputs(pool(), unwanted, SECRET)) if m["kind"] == "NetworkPolicy"]


def test_its_pods_have_no_more_rights_than_the_sidecars():
    (daemonset,) = [m for m in build_preflight(inputs()) if m["kind"] == "DaemonSet"]
    pod = daemonset["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (look,) = pod["containers"]
    assert look["securityContext"]["runAsNonRoot"] is True
    assert look["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (prepare,) = pod["initContainers"]
    assert prepare["securityContext"]["capabilities"]["add"] == ["CHOWN"]


def test_devices_are_asked_for_only_where_they_may_be_used():
    rdma = {"resources": [{"name": "rdma/hca"}]}
    for protocol, has in (("TCP", False), ("Auto", True), ("RDMA", True)):
        (found,) = [
            m
            for m in build_preflight(inputs(transport={"protocol": protocol, "rdma": rdma}))
            if m["kind"] == "DaemonSet"
        ]
        (look,) = found["spec"]["template"]["spec"]["containers"]
        assert ("rdma/hca" in look["resources"]["limits"]) is has


# -- whole passes


class Looking(World):
    """A world whose nodes are looked at; `answers` are what the pods say."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**{"preflight": "Warn", **spec})

    def look_at(self, *answers: Any, desired: int | None = None) -> None:
        """What the DaemonSet's controller and kubelets do: a pod on each node; None: it does not answer yet."""
        daemonset = self.cluster.objects[LOOK]
        count = len(answers) if desired is None else desired
        daemonset["status"] = {"observedGeneration": 1, "desiredNumberScheduled": count}
        template = daemonset["spec"]["template"]["metadata"]
        for i, told in enumerate(answers):
            self.cluster.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": f"look-{i}", "namespace": NS, **copy.deepcopy(template)},
                    "spec": {"nodeName": f"node-{i}"},
                    "status": {"phase": "Running", "podIP": f"10.1.0.{i}"},
                }
            )
            self.reports.looks.pop(f"10.1.0.{i}", None)
            if told is not None:
                self.reports.looks[f"10.1.0.{i}"] = told

    async def until_looking(self) -> None:
        for _ in range(4):
            await self.look()
            if LOOK in self.cluster.objects:
                return
        raise AssertionError(self.cluster.calls)


async def test_a_new_pool_is_looked_at_before_its_sidecars_are_made():
    world = Looking()
    await world.until_looking()
    assert SIDECARS not in world.cluster.objects
    assert ObjectRef("StatefulSet", NS, "chat-index") in world.cluster.objects  # it starts meanwhile
    assert world.condition("PreflightPassed")["reason"] == "PreflightRunning"
    assert world.condition("Ready")["reason"] == "PreflightRunning"
    world.look_at(answer(), answer())
    await world.settle()
    assert SIDECARS in world.cluster.objects
    assert not [r for r in world.cluster.objects if r.name == "chat-preflight"]
    assert world.condition("PreflightPassed")["status"] == "True"
    world.run()
    await world.settle()
    assert world.condition("Ready")["status"] == "True"
    await world.look()
    assert world.cluster.writes() == []


async def test_while_no_node_passes_nothing_is_rolled_out_and_mending_one_suffices():
    world = Looking()
    await world.until_looking()
    world.look_at(BAD, BAD)
    assert (await world.settle()).requeue_after_s is None  # the refresh looks again, nobody spins
    assert SIDECARS not in world.cluster.objects
    assert LOOK in world.cluster.objects
    assert world.pool["status"]["preflight"]["state"] == "Held"
    assert "nothing is rolled out" in world.condition("Ready")["message"]
    assert "node-0: Directory nvme: it is full (mend it)" in world.condition("Progressing")["message"]
    await world.look()
    assert world.cluster.writes() == []
    world.look_at(answer(), BAD)
    await world.settle()
    assert SIDECARS in world.cluster.objects
    assert world.condition("PreflightPassed")["status"] == "False"
    assert world.pool["status"]["preflight"]["findings"][0]["node"] == "node-1"


async def test_required_nodes_must_all_pass():
    world = Looking(preflight="Require")
    await world.until_looking()
    world.look_at(answer(), BAD)
    await world.settle()
    assert SIDECARS not in world.cluster.objects
    world.look_at(answer(), answer())
    await world.settle()
    assert SIDECARS in world.cluster.objects


async def test_running_sidecars_keep_their_configuration_until_the_nodes_have_passed():
    world = Looking()
    await world.until_looking()
    world.look_at(answer(), answer())
    await world.settle()
    world.run()
    await world.settle()
    before = {r: copy.deepcopy(world.cluster.objects[r]) for r in (SIDECARS, CONFIG)}
    world.pool["spec"]["tiers"] = [LOCAL, {"name": "new", "local": {"path": "/mnt/new", "capacity": "1Gi"}}]
    await world.until_looking()
    world.look_at(BAD, BAD)
    await world.settle()
    assert {r: world.cluster.objects[r] for r in before} == before
    assert world.condition("Ready")["status"] == "True"  # what runs, runs
    assert "/tiers/new" in world.cluster.objects[ObjectRef("ConfigMap", NS, "chat-preflight")]["data"]["pool.json"]
    world.look_at(answer(), answer())
    await world.settle()
    assert world.cluster.objects[SIDECARS]["spec"] != before[SIDECARS]["spec"]
    assert LOOK not in world.cluster.objects


async def test_running_sidecars_keep_the_password_of_their_index_until_the_nodes_reach_another():
    world = Looking()
    await world.until_looking()
    world.look_at(answer())
    await world.settle()
    world.run(1, 1)
    await world.settle()
    secret = ObjectRef("Secret", NS, "chat-secret")
    before = copy.deepcopy(world.cluster.objects[secret]["data"])
    data = {"url": base64.b64encode(b"redis://u:another-password@redis:6379/0").decode()}
    meta = {"name": "redis", "namespace": NS}
    world.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
    world.pool["spec"]["index"] = {"external": {"urlSecretRef": {"name": "redis"}}}
    await world.until_looking()
    world.look_at(BAD)
    await world.settle()
    assert world.cluster.objects[secret]["data"] == before
    of_the_look = world.cluster.objects[ObjectRef("Secret", NS, "chat-preflight")]["data"]
    assert base64.b64decode(of_the_look["index-password"]) == b"another-password"
    del world.cluster.objects[secret]  # lost meanwhile: made anew at once, or no sidecar could start
    await world.look()
    assert secret in world.cluster.objects
    world.look_at(answer())
    await world.settle()
    assert base64.b64decode(world.cluster.objects[secret]["data"]["index-password"]) == b"another-password"


async def test_answers_to_an_earlier_question_do_not_count():
    world = Looking()
    await world.until_looking()
    world.look_at(answer())
    world.pool["spec"]["transport"] = {"protocol": "RDMA"}
    for _ in range(3):
        await world.look()
        assert SIDECARS not in world.cluster.objects
    world.look_at(answer())
    await world.settle()
    assert SIDECARS in world.cluster.objects


async def test_a_pod_that_cannot_start_is_an_answer_with_its_reason():
    world = Looking()
    await world.until_looking()
    world.look_at(None, None)
    first, second = (world.cluster.objects[ObjectRef("Pod", NS, f"look-{i}")] for i in range(2))
    ended = {"exitCode": 2, "message": "starting\nthe directory holds 'x', which is not ours"}
    first["status"]["initContainerStatuses"] = [
        {
            "name": "prepare-node",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    ]
    second["status"] = {"phase": "Pending"}
    world.cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "e", "namespace": NS},
            "involvedObject": {"uid": second["metadata"]["uid"]},
            "message": "MountVolume.SetUp failed: /mnt/kv is not a directory",
        }
    )
    await world.settle()
    found = world.pool["status"]["preflight"]["findings"]
    assert [f["message"] for f in found] == [
        "container prepare-node failed: the directory holds 'x', which is not ours",
        "MountVolume.SetUp failed: /mnt/kv is not a directory",
    ]
    assert world.pool["status"]["preflight"]["state"] == "Held"


async def test_a_pod_that_was_just_made_may_wait_for_what_comes_later():
    world = Looking()
    await world.until_looking()
    world.look_at(None, None)
    first, second = (world.cluster.objects[ObjectRef("Pod", NS, f"look-{i}")] for i in range(2))
    waits = {"type": "PodScheduled", "status": "False", "message": "pod has unbound immediate PersistentVolumeClaims"}
    first["status"] = {"phase": "Pending", "conditions": [waits]}
    second["status"] = {"phase": "Pending"}
    event = {"involvedObject": {"uid": second["metadata"]["uid"]}, "message": "configmap not found"}
    world.cluster.put({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": NS}, **event})
    for made, failed in ((datetime.now(UTC), 0), (datetime.now(UTC) - timedelta(minutes=1), 2)):
        for pod in (first, second):
            pod["metadata"]["creationTimestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
        await world.look()
        assert world.pool["status"]["preflight"]["failed"] == failed


async def test_a_dry_run_shows_what_would_be_made_and_makes_only_the_look():
    world = Looking(mode="DryRun")
    await world.until_looking()
    world.look_at(answer(), BAD)
    await world.settle()
    ours = {r for r in world.cluster.objects if r.kind not in ("KVCachePool", "Namespace", "Pod", "Event")}
    assert ours == {SHOWN}
    data = world.cluster.objects[SHOWN]["data"]
    assert "create DaemonSet kvpool-system/chat-sidecar\n" in data["summary"]
    manifests = list(yaml.safe_load_all(data["manifests.yaml"]))
    assert {m["kind"] for m in manifests} >= {"DaemonSet", "StatefulSet", "Secret"}
    assert set(next(m for m in manifests if m["kind"] == "Secret")["data"].values()) == {HIDDEN}
    assert world.pool["status"]["phase"] == "DryRun"
    assert world.condition("Progressing")["reason"] == "DryRun"
    assert world.condition("PreflightPassed")["status"] == "False"
    identity = world.pool["status"]["poolID"]
    for _ in range(3):
        await world.look()
        assert world.cluster.writes() == []
    world.pool["spec"]["mode"] = "Enforce"
    await world.settle()
    assert SIDECARS in world.cluster.objects
    assert SHOWN not in world.cluster.objects
    assert world.pool["status"]["poolID"] == identity


async def test_a_dry_run_of_a_pool_that_is_there_touches_nothing_of_it():
    world = Looking()
    await world.until_looking()
    world.look_at(answer())
    await world.settle()
    world.run(1, 1)
    await world.settle()
    before = {
        r: copy.deepcopy(o) for r, o in world.cluster.objects.items() if r.kind not in ("KVCachePool", "Pod", "Event")
    }
    world.pool["spec"] |= {"mode": "DryRun", "index": {"managed": {"maxMemory": "1Gi"}}}
    await world.settle()
    after = {r: o for r, o in world.cluster.objects.items() if r.kind not in ("KVCachePool", "Pod", "Event")}
    assert {r: o for r, o in after.items() if r != SHOWN} == before
    summary = after[SHOWN]["data"]["summary"]
    assert "change StatefulSet kvpool-system/chat-index\n" in summary
    assert "keep Secret kvpool-system/chat-secret\n" in summary
    assert world.condition("Ready")["status"] == "True"


async def test_a_dry_run_says_what_would_go():
    world = Looking(events={"enabled": True})
    await world.until_looking()
    world.look_at(answer())
    await world.settle()
    world.pool["spec"] |= {"mode": "DryRun", "events": {"enabled": False}}
    await world.settle()
    assert "delete Secret kvpool-system/chat-events\n" in world.cluster.objects[SHOWN]["data"]["summary"]
    assert ObjectRef("Secret", NS, "chat-events") in world.cluster.objects


@pytest.mark.parametrize("mode", ["DryRun", "Enforce"])
async def test_the_volumes_of_nfs_go_with_the_look_where_nothing_else_uses_them(mode: str):
    nfs = {"name": "cold", "shared": {"nfs": {"server": "10.0.0.9", "path": "/kv"}, "capacity": "1Ti"}}
    world = Looking(mode=mode, tiers=[LOCAL, nfs])
    await world.until_looking()
    claim = ObjectRef("PersistentVolumeClaim", NS, "chat-tier-cold")
    assert claim in world.cluster.objects
    world.look_at(answer())
    await world.settle()
    assert (claim in world.cluster.objects) is (mode == "Enforce")


async def test_a_paused_pool_is_not_looked_at_and_says_what_is_known():
    world = Looking(mode="Paused")
    await world.settle()
    assert LOOK not in world.cluster.objects
    assert "have not started" in world.condition("PreflightPassed")["message"]
    assert "preflight" not in world.pool["status"]


async def test_a_pool_that_is_deleted_while_it_is_looked_at_goes():
    world = Looking()
    await world.until_looking()
    world.look_at(None)
    world.delete()
    for _ in range(6):
        if (await world.look()).gone:
            break
    assert not [r for r in world.cluster.objects if r.name.startswith("chat-") and r.kind != "Secret"]


def test_what_is_shown_fits_into_a_configmap():
    huge = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"k": "é" * 2_000_000}}
    shown = dry_run_configmap(pool(), [huge], {"create": ["x"]})
    assert len(shown["data"]["manifests.yaml"].encode()) < 1024 * 1024
    assert "# truncated" in shown["data"]["manifests.yaml"]
