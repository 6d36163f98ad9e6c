"""Preflight checks of a pool in whole reconciles, and dry runs."""

from __future__ import annotations

import base64
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from op_pool_world import NS, World
from op_preflight_samples import BAD, answer
from op_samples import LOCAL, pool

from kvpool_operator.desired.dry_run import HIDDEN, dry_run_configmap
from kvpool_operator.k8s.client import ObjectRef

LOOK = ObjectRef("DaemonSet", NS, "chat-preflight")
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")
CONFIG = ObjectRef("ConfigMap", NS, "chat-config")
SHOWN = ObjectRef("ConfigMap", NS, "chat-plan")


class Looking(World):
    """A world whose nodes are checked; `answers` are what the pods say."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**{"preflight": "Warn", **spec})

    def look_at(self, *answers: Any, desired: int | None = None) -> None:
        """What the DaemonSet's controller and kubelets do: a pod on each node; None: it does not answer yet."""
        daemonset = self.cluster.objects[LOOK]
        count = len(answers) if desired is None else desired
        daemonset["status"] = {"observedGeneration": 1, "desiredNumberScheduled": count}
        template = daemonset["spec"]["template"]["metadata"]
        for i, reported in enumerate(answers):
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
            if reported is not None:
                self.reports.looks[f"10.1.0.{i}"] = reported

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
    assert (await world.settle()).requeue_after_s is None  # the refresh looks again, no busy loop
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
    del world.cluster.objects[secret]  # lost meanwhile: recreated immediately, or no sidecar could start
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
