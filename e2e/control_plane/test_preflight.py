"""Nodes are looked at before sidecars are made: the real operator, its DaemonSet, answers played by doubles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from api import until
from conftest import SYSTEM, Pools

if TYPE_CHECKING:
    from kubelet import Kubelet, SidecarDouble

pytestmark = pytest.mark.cluster

FULL = {
    "version": 1,
    "passed": False,
    "findings": [
        {"check": "Space", "level": "Fail", "tier": "nvme", "message": "there is no room", "advice": "make some"}
    ],
}


def daemonset(pools: Pools, name: str) -> Any:
    return pools.api.get(f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/{name}")


def fail(sidecars: dict[str, SidecarDouble], *nodes: str) -> None:
    for node in nodes:
        sidecars[node].status["preflight"] = FULL


def test_nodes_that_pass_get_their_sidecars_and_the_look_goes(pools: Pools):
    pools.apply("chat", preflight="Require")
    pool = pools.until_ready("chat")
    assert pool["status"]["preflight"] | {"spec": "", "since": ""} == {
        "spec": "",
        "state": "Done",
        "since": "",
        "nodes": 2,
        "passed": 2,
        "failed": 0,
        "findings": [],
        "measured": [],
    }
    pools.until_condition("chat", "PreflightPassed", "NodesPassed", "2 of 2")
    until("the look is gone", lambda: not any("preflight" in k for k in pools.owned("chat")))


def test_while_no_node_passes_no_sidecar_is_made(pools: Pools, sidecars: dict[str, SidecarDouble]):
    fail(sidecars, "node-a", "node-b")
    pools.apply("chat", preflight="Warn")
    words = "nothing is rolled out: 0 of 2 nodes passed; node-a: Space nvme: there is no room (make some)"
    pools.until_condition("chat", "PreflightPassed", "NodesFailed", words)
    pools.until_condition("chat", "Ready", "NodesFailed", words)
    assert daemonset(pools, "chat-sidecar") is None
    assert daemonset(pools, "chat-index") is None
    del sidecars["node-b"].status["preflight"]
    sidecars["node-b"].status["preflight"] = {"version": 1, "passed": True, "findings": []}
    pools.until_ready("chat")
    pools.until_condition("chat", "PreflightPassed", "NodesFailed", "1 of 2 nodes passed; node-a")


def test_running_sidecars_stay_as_they_are_while_no_node_passes(pools: Pools, sidecars: dict[str, SidecarDouble]):
    pools.apply("chat", preflight="Warn")
    pools.until_ready("chat")
    before = daemonset(pools, "chat-sidecar")["spec"]
    config = f"/api/v1/namespaces/{SYSTEM}/configmaps/chat-config"
    data = pools.api.get(config)["data"]
    fail(sidecars, "node-a", "node-b")
    more = [
        {"name": name, "local": {"path": f"/var/lib/kvpool/{name}", "capacity": "1Gi"}} for name in ("chat", "second")
    ]
    more[0]["name"] = "nvme"
    pools.apply("chat", preflight="Warn", tiers=more)
    pools.until_condition("chat", "Progressing", "NodesFailed", "nothing is rolled out")
    assert daemonset(pools, "chat-sidecar")["spec"] == before
    assert pools.api.get(config)["data"] == data
    pools.until_condition("chat", "Ready", "Serving")
    for node in ("node-a", "node-b"):
        sidecars[node].status["preflight"] = {"version": 1, "passed": True, "findings": []}
    until("it is rolled out", lambda: daemonset(pools, "chat-sidecar")["spec"] != before)
    pools.until_ready("chat")


def test_a_pod_that_cannot_start_is_an_answer(pools: Pools, kubelet: Kubelet, sidecars: dict[str, SidecarDouble]):
    for node in sidecars:
        kubelet.failing[node] = "kvpool-sidecar: the directory holds 'x', which is not ours"
        sidecars[node].status["preflight"] = None
    pools.apply("chat", preflight="Warn")
    pools.until_condition("chat", "PreflightPassed", "NodesFailed", "holds 'x'")
    kubelet.failing.clear()
    for node in sidecars:
        sidecars[node].status["preflight"] = {"version": 1, "passed": True, "findings": []}
    pools.until_ready("chat")


def test_a_dry_run_makes_nothing_but_what_it_says(pools: Pools):
    pools.apply("tried", mode="DryRun", preflight="Warn")  # a name that no other test left a Secret of
    pools.until_condition("tried", "Progressing", "DryRun", "tried-plan")
    pools.until_condition("tried", "PreflightPassed", "NodesPassed")

    def left() -> bool:
        return {k for k in pools.owned("tried") if not k.startswith("pods/")} == {"configmaps/tried-plan"}

    until("only the plan is there", left)
    shown = pools.owned("tried")["configmaps/tried-plan"]["data"]
    pools.apply("tried", mode="Enforce", preflight="Warn")
    pools.until_ready("tried")
    made = {(m["kind"], m["metadata"]["name"]) for m in yaml.safe_load_all(shown["manifests.yaml"])}
    assert made == {tuple(line.split()[1:]) for line in shown["summary"].replace(f"{SYSTEM}/", "").splitlines()}
    plurals = {f"{kind.lower()}s/{name}".replace("policys", "policies") for kind, name in made}
    assert plurals == {k for k in pools.owned("tried") if not k.startswith("pods/")}


def test_a_dry_run_of_a_pool_that_runs_changes_nothing_of_it(pools: Pools):
    pools.apply("chat")
    pools.until_ready("chat")
    before = {k: o["spec"] for k, o in pools.owned("chat").items() if k.startswith(("daemonsets", "statefulsets"))}
    pools.apply("chat", mode="DryRun", index={"managed": {"maxMemory": "1Gi"}})
    pools.until_condition("chat", "Progressing", "DryRun")
    summary = pools.owned("chat")["configmaps/chat-plan"]["data"]["summary"]
    assert f"change StatefulSet {SYSTEM}/chat-index\n" in summary
    owned = pools.owned("chat")
    assert {k: owned[k]["spec"] for k in before} == before
