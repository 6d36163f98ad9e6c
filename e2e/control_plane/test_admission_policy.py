"""Injection by the API server itself, from the chart's MutatingAdmissionPolicy: what it brings, and what it leaves."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from api import APPLY, Api, until
from conftest import SYSTEM, Pools, rendered
from webhooks import Team, engine

from kvpool.config import ClientConfig, loads
from kvpool_operator.injection.connector import vllm_connector

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

GROUP = "/apis/admissionregistration.k8s.io/v1beta1"
PLURALS = {
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
}
VALUES = (
    "webhook.enabled=false",
    'policy={"enabled": true, "apiVersion": "admissionregistration.k8s.io/v1beta1"}',
    'sidecar.image.repository="kvpool/sidecar"',
    'sidecar.image.tag="test"',
)


@pytest.fixture
def team(api: Api) -> Team:
    return Team(api, "team-policy", f"{SYSTEM}/chat")


@pytest.fixture
def policy(api: Api, team: Team) -> Iterator[None]:
    paths = []
    for manifest in rendered(*VALUES):
        if manifest["kind"] in PLURALS:
            paths.append(f"{GROUP}/{PLURALS[manifest['kind']]}/{manifest['metadata']['name']}")
            api.call("PATCH", f"{paths[-1]}?fieldManager=helm&force=true", manifest, APPLY)
    assert len(paths) == 2
    yield
    for path in paths:
        api.delete(path)


def asking(**change: Any) -> dict[str, Any]:
    pod = engine("e", f"{SYSTEM}/chat")
    pod["metadata"]["annotations"]["kvpool.dev/engine"] = "vllm"
    pod["spec"]["containers"][0] |= change.pop("container", {})
    pod["metadata"]["annotations"] |= change.pop("notes", {})
    pod["spec"] |= change
    return pod


def made(team: Team, **change: Any) -> dict[str, Any]:
    """The pod as the API server would make it."""
    notes = {"kvpool.dev/pool": change.pop("other_pool")} if "other_pool" in change else {}
    pod = asking(**{**change, "notes": {**change.get("notes", {}), **notes}})
    found: dict[str, Any] = team.api.call("POST", f"{team.pods}?dryRun=All&fieldValidation=Strict", pod)
    return found


def notes_of(pod: dict[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = pod["metadata"].get("annotations") or {}
    return notes


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in pod["spec"]["containers"][0].get("env") or []}


def until_injecting(team: Team) -> None:
    until("the policy is in use", lambda: notes_of(made(team)).get("kvpool.dev/injected"))


def test_a_policy_brings_the_pool_into_vllm(pools: Pools, policy: None, team: Team):
    pools.apply("chat", injection={"vllm": {"hostMemory": "2Gi"}}, failOpen={"breaker": {"failures": 7}})
    until_injecting(team)
    before = asking(container={"env": [{"name": "PYTHONPATH", "value": "/mine"}, {"name": "A", "value": "b"}]})
    pod = made(team, container=before["spec"]["containers"][0])
    env = env_of(pod)
    assert env["PYTHONPATH"] == "/run/kvpool/client:/mine"
    assert (env["A"], env["PYTHONHASHSEED"]) == ("b", "0")
    config = loads(ClientConfig, env["KVPOOL_CLIENT_CONFIG"])
    assert (config.pool, config.deadlines.breaker_failures) == (f"{SYSTEM}/chat", 7)
    wanted = vllm_connector(block_tokens=256, host_memory_bytes=2 << 30)
    assert json.loads(env["KVPOOL_VLLM_KV_TRANSFER_CONFIG"]) == wanted
    (init,) = pod["spec"]["initContainers"]
    assert (init["name"], init["image"]) == ("kvpool-client", "kvpool/sidecar:test")
    assert init["command"] == ["kvpool-sidecar", "install-client", "/run/kvpool/client"]
    mounts = {m["mountPath"]: m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert (mounts["/run/kvpool"], mounts["/dev/shm"]) == ("kvpool", "kvpool-shm")
    shm = next(v for v in pod["spec"]["volumes"] if v["name"] == "kvpool-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    command = {k: v for k, v in pod["spec"]["containers"][0].items() if k in ("command", "args", "image", "name")}
    assert command == {k: v for k, v in before["spec"]["containers"][0].items() if k in command}
    # it counts as injected, and a pod with the pool in it is left as it is
    team.api.call("POST", team.pods, asking())
    until("it is counted", lambda: pools.get("chat")["status"]["pods"]["injected"] == 1)
    team.api.delete(f"{team.pods}/e", gracePeriodSeconds=0)
    again = copy.deepcopy(asking())
    again["spec"]["initContainers"] = [{"name": "kvpool-client", "image": "mine"}]
    kept = team.api.call("POST", f"{team.pods}?dryRun=All", again)
    assert "kvpool.dev/injected" not in notes_of(kept)


def test_a_small_container_gets_less_and_what_the_user_set_stays(pools: Pools, policy: None, team: Team):
    pools.apply("chat")
    until_injecting(team)
    mine = [{"name": "PYTHONHASHSEED", "value": "7"}, {"name": "KVPOOL_CLIENT_CONFIG", "value": "{}"}]
    pod = made(team, container={"env": mine, "resources": {"limits": {"memory": "1Gi"}}})
    env = env_of(pod)
    assert (env["PYTHONHASHSEED"], env["KVPOOL_CLIENT_CONFIG"]) == ("7", "{}")
    connector = json.loads(env["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
    assert connector["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2**29
    nothing = env_of(made(team, notes={"kvpool.dev/engine": "none"}))
    assert set(nothing) == {"PYTHONPATH", "KVPOOL_CLIENT_CONFIG"}


def test_the_limit_of_the_pod_counts_and_the_init_container_costs_nothing(pools: Pools, policy: None, team: Team):
    pools.apply("chat")
    until_injecting(team)
    given = {"requests": {"cpu": "2", "nvidia.com/gpu": "1"}, "limits": {"memory": "3Gi", "nvidia.com/gpu": "1"}}
    of_pod = {"limits": {"memory": "4Gi"}}
    for pod, granted in (
        (made(team, resources=of_pod), 2**31),
        (made(team, resources=of_pod, container={"resources": given}), 3 * 2**29),
    ):
        connector = json.loads(env_of(pod)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
        assert connector["kv_connector_extra_config"]["cpu_bytes_to_use"] == granted
    (init,) = pod["spec"]["initContainers"]
    assert init["resources"] == {"requests": {"cpu": "2", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    (bare,) = made(team)["spec"]["initContainers"]
    assert bare["resources"] == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"notes": {"kvpool.dev/engine": "sglang"}}, "unsupported-engine"),
        ({"notes": {"kvpool.dev/container": "other"}}, "container-not-found"),
        ({"volumes": [{"name": "kvpool", "configMap": {"name": "x"}}]}, "name-conflict"),
        (
            {"container": {"env": [{"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}},
            "name-conflict",
        ),
    ],
)
def test_what_a_policy_cannot_do_it_says_and_the_pod_starts_as_it_was(
    pools: Pools, policy: None, team: Team, change: dict[str, Any], reason: str
):
    pools.apply("chat")
    until_injecting(team)
    pod = made(team, **copy.deepcopy(change))
    assert notes_of(pod)["kvpool.dev/skip-reason"].startswith(f"{reason}: ")
    assert "initContainers" not in pod["spec"]


def test_a_policy_asks_the_pool_whom_it_admits(pools: Pools, policy: None, team: Team):
    pools.apply("chat")
    until_injecting(team)
    assert notes_of(made(team, other_pool=f"{SYSTEM}/none")).keys() == {"kvpool.dev/pool", "kvpool.dev/engine"}

    def reason() -> str:
        return notes_of(made(team)).get("kvpool.dev/skip-reason", "")

    pools.apply("chat", injection={"allowedNamespaces": {"from": "Same"}})
    until("it is not admitted", lambda: reason().startswith("namespace-not-allowed"))
    labels = {"kubernetes.io/metadata.name": team.name}
    pools.apply("chat", injection={"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": labels}}})
    until_injecting(team)
    pools.apply("chat", injection={"enabled": False})
    until("it is off", lambda: reason().startswith("injection-disabled"))
