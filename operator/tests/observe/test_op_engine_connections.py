"""Injected pods that are connected, silent or skipped, and pods that name no existing pool: none, half, all."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from op_samples import MemoryCluster
from op_status_samples import GOOD, observed, status

from kvpool_operator.api.annotations import (
    ANNOTATION_INJECTED,
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_POOL,
    ANNOTATION_SKIP_REASON,
)
from kvpool_operator.api.conditions import find
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.k8s.client import NamespacedName
from kvpool_operator.observe.engine_connections import find_connections
from kvpool_operator.observe.engine_pods import EnginePods, count, find_orphans, slim_engine_pod
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.injection_watchdog import pod_event
from kvpool_operator.pools.orphaned_pods import OrphanedPods
from kvpool_operator.runtime.metrics import OperatorMetrics
from kvpool_operator.sidecars.status import SidecarStatus

NOW = datetime(2026, 11, 22, 10, 0, 0, tzinfo=UTC)
POOL = "kvpool-system/chat"


def stamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def manifest(n: int, notes: dict[str, str], *, ready: float | None = 600, node: str = "node-0") -> dict[str, Any]:
    """An opted-in pod; `ready`: for how many seconds."""
    condition = {
        "type": "Ready",
        "status": "False" if ready is None else "True",
        "lastTransitionTime": stamp(ready or 0),
    }
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "engines", "uid": "rs-1", "controller": True}
    return slim_engine_pod(
        {
            "metadata": {
                "namespace": "team",
                "name": f"engine-{n}",
                "uid": f"uid-{n}",
                "annotations": notes,
                "ownerReferences": [owner],
            },
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "conditions": [condition]},
        }
    )


def injected(n: int, **kwargs: Any) -> dict[str, Any]:
    return manifest(n, {ANNOTATION_POOL: POOL, ANNOTATION_INJECTED: "x"}, **kwargs)


def skipped(n: int, why: str = "unsupported-engine: the engine is not supported") -> dict[str, Any]:
    return manifest(n, {ANNOTATION_POOL: POOL, ANNOTATION_SKIP_REASON: why})


def engines(*pods: dict[str, Any]) -> EnginePods:
    return count(pods, "kvpool-system", "chat", "image", {})


def report(**kwargs: Any) -> dict[str, SidecarStatus | None]:
    return {"node-0": replace(GOOD, **kwargs)}


def silent(pods: EnginePods, reports: dict[str, SidecarStatus | None]) -> dict[str, str]:
    return {one.pod.name: one.why for one in find_connections(pods.pods, reports, NOW).silent}


@pytest.mark.parametrize("connected", [0, 2, 4])
def test_connected_and_silent_pods_are_counted(connected: int):
    pods = engines(*(injected(n) for n in range(4)))
    reports = report(connected_pods=frozenset(f"uid-{n}" for n in range(connected)))
    found = find_connections(pods.pods, reports, NOW)
    assert (found.connected, len(found.silent)) == (connected, 4 - connected)
    made = status(observed(engines=pods, connections=found))
    assert (made["pods"].get("connected", 0), made["pods"].get("silent", 0)) == (connected, 4 - connected)
    condition = find(made["conditions"], "EnginesConnected")
    assert condition["reason"] == ("EnginesConnected" if connected == 4 else "EnginesSilent")
    assert ("team/engine-3: its engine is not connected" in condition["message"]) == (connected == 2)


@pytest.mark.parametrize("ready", [None, 0, 119])
def test_a_pod_that_is_not_ready_for_two_minutes_is_not_silent(ready: float | None):
    assert silent(engines(injected(1, ready=ready)), report()) == {}


def test_a_sidecar_that_did_not_answer_or_just_started_accuses_no_pod():
    pods = engines(injected(1))
    assert silent(pods, {"node-0": None}) == {}
    assert silent(pods, report(uptime_s=119.0)) == {}
    assert silent(pods, report(uptime_s=121.0)) != {}


def test_a_node_without_a_sidecar_is_named():
    assert silent(engines(injected(1, node="gpu-7")), report()) == {
        "engine-1": "its node gpu-7 has no sidecar of the pool"
    }


def test_the_plug_ins_own_sentence_is_used_at_once_and_is_one_line_of_text():
    raw = {"engine_problems": [{"uid": "uid-1", "problem": "no\u202e tier\nfor vLLM 0.31\x1b[31m" + "x" * 900}]}
    parsed = SidecarStatus.parse(raw)
    why = silent(engines(injected(1, ready=1)), {"node-0": parsed})["engine-1"]
    assert why.startswith("its plug-in reports: no tier for vLLM 0.31 [31mxx")
    assert why.isprintable()
    assert len(why) < 250


def test_engines_without_a_client_are_neither_connected_nor_silent():
    notes = {ANNOTATION_POOL: POOL, ANNOTATION_INJECTED: "x", ANNOTATION_INJECTED_ENGINE: "dynamo"}
    found = find_connections(engines(manifest(1, notes)).pods, report(), NOW)
    assert (found.connected, found.silent) == (0, ())


@pytest.mark.parametrize("n", [0, 2, 4])
def test_injection_is_not_ready_if_every_pod_was_skipped(n: int):
    pods = engines(*(skipped(i) for i in range(n)), *(injected(i) for i in range(n, 4)))
    made = status(observed(engines=pods))
    condition = find(made["conditions"], "InjectionReady")
    assert (condition["status"], condition["reason"]) == (
        ("False", "AllPodsSkipped") if n == 4 else ("True", "Injecting")
    )
    assert made["pods"].get("skipReasons", {}) == ({"unsupported-engine": n} if n else {})


def test_skips_are_counted_by_reasons_of_the_webhook_alone():
    pods = engines(skipped(1), skipped(2, "connector-present: remove it"), skipped(3, "anything <b>: x"))
    assert pods.skip_reasons == {"connector-present": 1, "other": 1, "unsupported-engine": 1}


def test_skipped_and_silent_pods_have_an_event_with_the_sentence():
    one = engines(skipped(1)).pods[0]
    event = pod_event(one, POOL)
    assert event is not None
    assert (event.reason, event.about_owner) == (EventReason.INJECTION_SKIPPED, True)
    assert "unsupported-engine: the engine is not supported" in event.message
    event = pod_event(engines(injected(1)).pods[0], POOL, "no sidecar")
    assert event is not None
    assert (event.reason, event.about_owner) == (EventReason.ENGINE_WITHOUT_POOL, True)
    assert event.message.endswith("runs without it: no sidecar [KVP0302]")


def test_older_sidecars_report_connected_pods_by_fingerprint():
    raw = {"fingerprints": [{"digest": "d", "pods": [{"uid": "uid-1", "connected": True}, {"uid": "uid-2"}]}]}
    assert SidecarStatus.parse(raw).connected_pods == {"uid-1"}
    assert SidecarStatus.parse({"connected_pods": ["uid-3", 7]}).connected_pods >= {"uid-3"}


def test_orphans_name_the_pool_that_does_not_exist():
    pools = [NamespacedName("kvpool-system", "chat"), NamespacedName("other", "own")]
    pods = [
        manifest(1, {ANNOTATION_POOL: "kvpool-system/chatt"}),
        manifest(2, {ANNOTATION_POOL: "chatt"}),
        manifest(3, {}),
        manifest(4, {ANNOTATION_POOL: POOL}),
        manifest(5, {ANNOTATION_POOL: "chat"}),
    ]
    found = find_orphans(pods, pools)
    assert [(pod.name, pool) for pod, pool in found] == [
        ("engine-1", "the pool kvpool-system/chatt"),
        ("engine-2", "the pool chatt"),
        ("engine-3", "a pool of its namespace team"),
    ]
    assert find_orphans(pods, [*pools, NamespacedName("team", "x"), NamespacedName("kvpool-system", "chatt")]) == []


def test_an_operator_of_some_namespaces_does_not_accuse_pods_of_pools_elsewhere():
    pods = [
        manifest(1, {ANNOTATION_POOL: "elsewhere/chat"}),
        manifest(2, {ANNOTATION_POOL: "chatt"}),
        manifest(3, {ANNOTATION_POOL: "kvpool-system/chatt"}),
    ]
    pools = [NamespacedName("kvpool-system", "chat")]
    assert [pod.name for pod, _ in find_orphans(pods, pools, ("kvpool-system", "team"))] == ["engine-3"]


class Pods:
    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = list(pods)

    def list(self, *_: Any) -> list[dict[str, Any]]:
        return self.pods


async def test_an_orphan_is_counted_when_it_was_seen_twice_and_has_one_event_and_one_of_its_owner():
    cluster, metrics = MemoryCluster(), OperatorMetrics()
    pods = Pods(manifest(1, {ANNOTATION_POOL: "kvpool-system/chatt"}), manifest(2, {ANNOTATION_POOL: "chatt"}))
    known: list[NamespacedName] | None = None
    watch = OrphanedPods(cluster, pods, lambda: known, metrics)
    await watch.report()
    known = []
    counts = []
    for _ in range(3):
        await watch.report()
        counts.append(metrics.registry.get_sample_value("kvpool_operator_orphaned_pods"))
    assert counts == [0, 2, 2]
    events = await cluster.list("Event", namespace="team")
    about = sorted((e["involvedObject"]["kind"], e["involvedObject"]["name"], e["reason"]) for e in events)
    assert about == [
        ("Pod", "engine-1", "PoolNotFound"),
        ("Pod", "engine-2", "PoolNotFound"),
        ("ReplicaSet", "engines", "PoolNotFound"),
    ]
    pods.pods = []
    await watch.report()
    assert metrics.registry.get_sample_value("kvpool_operator_orphaned_pods") == 0


def test_an_unready_sidecar_is_no_node_without_a_sidecar():
    sidecars = (Sidecar("node-0", False),)
    assert silent(engines(injected(1)), {s.node: s.report for s in sidecars}) == {}
