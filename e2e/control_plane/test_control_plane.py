"""The real operator against a real API server: what a user sees of it, without nodes or containers."""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from api import APPLY, MERGE, POOLS, Api, ApiError, until
from conftest import ROOT, SYSTEM, Pools, namespace

if TYPE_CHECKING:
    from pathlib import Path

    from kubelet import Kubelet, SidecarDouble

pytestmark = pytest.mark.cluster

BAD_POOLS = sorted((ROOT / "operator" / "tests" / "bad_pools").glob("*.yaml"))
MANAGED = {
    "configmaps/chat-config",
    "daemonsets/chat-sidecar",
    "networkpolicies/chat-index",
    "networkpolicies/chat-sidecar",
    "secrets/chat-hints",
    "secrets/chat-secret",
    "serviceaccounts/chat-index",
    "serviceaccounts/chat-sidecar",
    "services/chat-index",
    "services/chat-sidecar",
    "statefulsets/chat-index",
}


def without_pods(owned: dict[str, Any]) -> set[str]:
    return {k for k in owned if not k.startswith("pods/")}


# -- the API ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BAD_POOLS, ids=lambda p: p.stem)
def test_a_bad_pool_is_refused_with_a_sentence_that_helps(api: Api, path: Path):
    case = yaml.safe_load(path.read_text())
    pool = case["pool"]
    url = f"{POOLS}/namespaces/{SYSTEM}/kvcachepools?dryRun=All&fieldValidation=Strict"
    with pytest.raises(ApiError) as refused:
        api.call("POST", url, pool)
    assert case["message"] in str(refused.value)
    assert refused.value.status == 422


@pytest.mark.parametrize(
    "patch",
    [
        {"tiers": [{"name": "nvme", "local": {"path": "/mnt/other", "capacity": "1Gi"}}]},
        {"tiers": [{"name": "nvme", "shared": {"pvc": {"claimName": "c"}, "capacity": "1Gi"}}]},
        {"cache": {"blockTokens": 128}},
    ],
    ids=["path", "kind", "blockTokens"],
)
def test_what_must_not_change_cannot_be_changed(pools: Pools, patch: dict[str, Any]):
    pools.apply("fixed")
    with pytest.raises(ApiError, match="cannot be changed"):
        pools.api.call("PATCH", pools.path("fixed"), {"spec": patch}, MERGE)


def test_a_huge_object_is_refused(api: Api):
    pool = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": "huge"},
        "spec": {
            "tiers": [{"name": f"t{i}", "local": {"path": f"/mnt/{i}", "capacity": "1Gi"}} for i in range(10_000)]
        },
    }
    with pytest.raises(ApiError, match=r"must have at most 8 items|too large"):
        api.call("PATCH", f"{Pools(api).path('huge')}?fieldManager=user", pool, APPLY)


# -- a pool's life ----------------------------------------------------------------------------------------------------


def test_a_pool_becomes_ready_and_then_nothing_is_written_any_more(pools: Pools):
    pools.apply("chat")
    pool = pools.until_ready("chat")
    assert without_pods(pools.owned("chat")) == MANAGED
    assert pool["metadata"]["finalizers"] == ["kvpool.dev/cleanup"]
    assert "annotations" not in pool["metadata"]
    status = pool["status"]
    assert status["nodes"]["summary"] == "2/2"
    assert status["capacity"]["total"] == "16Gi"
    assert status["cache"]["hitRate"] == "0.75"
    assert status["transport"]["effective"] == "TCP"
    assert status["fingerprints"][0]["size"] == "2Gi"

    def settled() -> bool:
        pool = pools.until_ready("chat")
        return pool["status"]["phase"] == "Ready"

    until("the phase is Ready", settled)
    before = {k: o["metadata"]["resourceVersion"] for k, o in pools.owned("chat").items()}
    version = pools.get("chat")["metadata"]["resourceVersion"]
    time.sleep(3.5)  # three refreshes, in which something could be written
    assert {k: o["metadata"]["resourceVersion"] for k, o in pools.owned("chat").items()} == before
    assert pools.get("chat")["metadata"]["resourceVersion"] == version


def test_what_somebody_broke_is_repaired(pools: Pools):
    pools.apply("chat")
    pools.until_ready("chat")
    config = f"/api/v1/namespaces/{SYSTEM}/configmaps/chat-config"
    good = pools.api.get(config)["data"]
    pools.api.call("PATCH", config, {"data": {"pool.json": "{}"}}, MERGE)
    pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/services/chat-index")
    until("the ConfigMap is as it was", lambda: pools.api.get(config)["data"] == good)
    until("the Service is back", lambda: pools.api.get(f"/api/v1/namespaces/{SYSTEM}/services/chat-index"))


def test_a_changed_spec_rolls_the_sidecars_and_one_that_does_not_concern_them_does_not(pools: Pools):
    pools.apply("chat")
    pools.until_ready("chat")
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/chat-sidecar"
    first = pools.api.get(path)["spec"]["template"]
    pools.apply("chat", cleanupTimeout="1m")
    pools.until_ready("chat")
    assert pools.api.get(path)["spec"]["template"] == first
    pools.apply("chat", cleanupTimeout="1m", transport={"streams": 3})
    until("the template changed", lambda: pools.api.get(path)["spec"]["template"] != first)
    pools.until_ready("chat")


def test_only_selected_nodes_carry_a_sidecar(pools: Pools):
    pools.apply("chat", nodes={"selector": {"matchLabels": {"node": "node-b"}}})
    assert pools.until_ready("chat")["status"]["nodes"]["summary"] == "1/1"
    pools.apply("chat", nodes={"selector": {"matchLabels": {"node": "none"}}})
    pools.until_condition("chat", "StorageReady", "NoMatchingNodes")


def test_a_failing_sidecar_is_named_with_its_last_words(pools: Pools, kubelet: Kubelet):
    kubelet.failing["node-b"] = "kvpool-sidecar: /tiers/nvme belongs to another pool"
    pools.apply("chat")
    words = "node-b: container server failed: kvpool-sidecar: /tiers/nvme belongs to another pool"
    pools.until_condition("chat", "Ready", "NodesNotReady", words)
    kubelet.failing.clear()
    pools.until_ready("chat")


def test_a_lost_index_degrades_the_pool(pools: Pools, sidecars: dict[str, SidecarDouble]):
    pools.apply("chat")
    pools.until_ready("chat")
    sidecars["node-b"].status["index"] = {"connected": False}
    until("the pool is degraded", lambda: pools.get("chat")["status"]["phase"] == "Degraded")
    assert pools.condition("chat", "Ready")["reason"] == "NodesNotConnected"
    sidecars["node-b"].status["index"] = {"connected": True}
    pools.until_ready("chat")


def test_refused_pods_are_explained(pools: Pools, api: Api):
    namespace(api, "strict", **{"pod-security.kubernetes.io/enforce": "restricted"})
    pools.apply("chat", ns="strict")
    pools.until_condition("chat", "StorageReady", "PodCreationFailed", "violates PodSecurity", ns="strict")
    assert "enforce=privileged" in pools.condition("chat", "StorageReady", ns="strict")["message"]


def test_an_index_of_ones_own(pools: Pools):
    nodes = {"update": {"minReadySeconds": 0}}
    pools.apply("chat", nodes=nodes)
    pools.until_ready("chat")
    pools.apply("chat", nodes=nodes, index={"external": {"urlSecretRef": {"name": "redis"}}})
    pools.until_condition("chat", "Ready", "InvalidIndexConfig", "Secret redis does not exist: create it")
    assert "statefulsets/chat-index" in pools.owned("chat")
    url = base64.b64encode(b"redis://me:p%40ss-w0rd@redis.example:6380/3").decode()
    secret = {"metadata": {"name": "redis"}, "data": {"url": url}}
    pools.api.call("POST", f"/api/v1/namespaces/{SYSTEM}/secrets", secret)
    pools.until_ready("chat")
    until("the managed index is gone", lambda: not any("chat-index" in k for k in pools.owned("chat")))
    owned = pools.owned("chat")
    config = json.loads(owned["configmaps/chat-config"]["data"]["pool.json"])
    assert config["index"]["url"] == "redis://redis.example:6380/3"
    assert config["index"]["username"] == "me"
    kept = owned.pop("secrets/chat-secret")["data"]["index-password"]
    assert base64.b64decode(kept) == b"p@ss-w0rd"
    assert "ss-w0rd" not in json.dumps([owned, pools.get("chat")])
    pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/redis")


def test_a_file_system_by_nfs_is_a_volume_with_mount_options(pools: Pools):
    tiers = [
        {"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}},
        {"name": "cold", "shared": {"nfs": {"server": "10.0.0.9", "path": "/kv"}, "capacity": "1Ti"}},
    ]
    pools.apply("chat", tiers=tiers)
    pools.until_ready("chat")
    owned = pools.owned("chat")
    volume = owned["persistentvolumes/kvpool-kvpool-system-chat-cold"]
    assert volume["spec"]["mountOptions"] == ["soft", "timeo=30", "retrans=2", "nosuid", "nodev", "noexec"]
    claim = f"/api/v1/namespaces/{SYSTEM}/persistentvolumeclaims/chat-tier-cold"
    until("the claim is bound", lambda: pools.api.get(claim)["status"]["phase"] == "Bound")


def test_engine_pods_are_counted(pools: Pools, api: Api):
    namespace(api, "team")
    pools.apply("chat")

    def pod(name: str, **annotations: str) -> None:
        notes = {f"kvpool.dev/{k.replace('_', '-')}": v for k, v in annotations.items()}
        api.call(
            "POST",
            "/api/v1/namespaces/team/pods",
            {
                "metadata": {"name": name, "labels": {"kvpool.dev/inject": "true"}, "annotations": notes},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            },
        )

    until("the account is there", lambda: api.get("/api/v1/namespaces/team/serviceaccounts/default"))
    pod("one", pool=f"{SYSTEM}/chat", injected="abc")
    pod("two", pool="chat", skip_reason="ConnectorPresent: ...")
    pod("other", pool=f"{SYSTEM}/another", injected="abc")
    until("they are counted", lambda: pools.get("chat")["status"]["pods"]["selected"] == 2)
    pods = pools.get("chat")["status"]["pods"]
    assert (pods["injected"], pods["skipped"], pods["notInjected"], pods["skipReasons"]) == (1, 1, 0, {"other": 1})

    def events(name: str) -> dict[str, str]:
        return {e["reason"]: e["message"] for e in pools.events(name, "team")}

    until(
        "the skipped pod has its sentence", lambda: "ConnectorPresent: ..." in events("two").get("InjectionSkipped", "")
    )
    until("the pod of no pool has an Event", lambda: "/another" in events("other").get("PoolNotFound", ""), 90)
    pod("three", pool=f"{SYSTEM}/chat")
    until("the missed one is counted", lambda: pools.get("chat")["status"]["pods"]["notInjected"] == 1)
    # the last skipped pod goes: a map of the status becomes empty
    api.call("DELETE", "/api/v1/namespaces/team/pods/two?gracePeriodSeconds=0")
    until("no pod is skipped", lambda: pools.get("chat")["status"]["pods"]["skipped"] == 0)
    assert "skipReasons" not in pools.get("chat")["status"]["pods"]


def test_engines_that_share_nothing_are_named_with_what_differs(
    pools: Pools, api: Api, sidecars: dict[str, SidecarDouble]
):
    namespace(api, "differ")
    until("the account is there", lambda: api.get("/api/v1/namespaces/differ/serviceaccounts/default"))
    pods = "/api/v1/namespaces/differ/pods"

    def pod(name: str, engine: str = "vllm") -> str:
        notes = {"pool": f"{SYSTEM}/chat", "injected": "abc", "injected-engine": engine}
        metadata = {
            "name": name,
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {f"kvpool.dev/{k}": v for k, v in notes.items()},
        }
        made = api.call("POST", pods, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
        return str(made["metadata"]["uid"])

    def kind(digest: str, uid: str, dtype: str) -> dict[str, Any]:
        seen = {"uid": uid, "connected": True, "seen": 1}
        return {"digest": digest, "engine": "vllm 0.33", "model": "llama", "bytes": 1, "connected": 1} | {
            "fields": {"kv_dtype": dtype, "version": "00000001"},
            "pods": [seen],
        }

    pools.apply("chat")
    pools.until_ready("chat")
    sidecars["node-a"].status["fingerprints"] = [kind("d1", pod("one"), "0badcafe")]
    sidecars["node-b"].status["fingerprints"] = [kind("d2", pod("two"), "0badbabe")]
    words = "differ/one cannot share blocks of llama with differ/two (kv_dtype differs)"
    pools.until_condition("chat", "BlocksShareable", "FingerprintsDiffer", words)
    assert pools.get("chat")["status"]["phase"] == "Ready"
    until(
        "the pods are listed",
        lambda: [f["pods"] for f in pools.get("chat")["status"]["fingerprints"]] == [["differ/one"], ["differ/two"]],
        timeout=60,
    )
    sidecars["node-b"].status["fingerprints"][0]["digest"] = "d1"
    pools.until_condition("chat", "BlocksShareable", "FingerprintsMatch")
    pod("kvbm", "dynamo")
    pools.until_condition("chat", "BlocksShareable", "EngineHasNoRemoteTier", "differ/kvbm")
    api.delete(f"{pods}/kvbm", gracePeriodSeconds=0)
    pools.until_condition("chat", "BlocksShareable", "FingerprintsMatch")


def test_somebody_elses_object_is_not_taken_over(pools: Pools):
    path = f"/api/v1/namespaces/{SYSTEM}/configmaps"
    pools.api.call("POST", path, {"metadata": {"name": "mine-config"}, "data": {"a": "b"}})
    pools.apply("mine")
    pools.until_condition("mine", "Ready", "Rejected", "ConfigMap kvpool-system/mine-config exists and is not")
    assert pools.api.get(f"{path}/mine-config")["data"] == {"a": "b"}
    pools.api.delete(f"{path}/mine-config")
    pools.until_ready("mine")


def test_a_paused_pool_is_watched_and_not_touched(pools: Pools):
    pools.apply("chat")
    pools.until_ready("chat")
    pools.apply("chat", mode="Paused")
    until("it is paused", lambda: pools.get("chat")["status"]["phase"] == "Paused")
    service = f"/api/v1/namespaces/{SYSTEM}/services/chat-index"
    pools.api.delete(service)
    time.sleep(2.5)  # two refreshes
    assert pools.api.get(service) is None
    pools.apply("chat", mode="Enforce")
    until("it is repaired", lambda: pools.api.get(service))


def test_allowed_namespaces_follow_labels(pools: Pools, api: Api):
    namespace(api, "team-in", access="chat")
    pools.apply(
        "chat", injection={"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"access": "chat"}}}}
    )

    def allowed() -> list[str]:
        data = pools.owned("chat")["configmaps/chat-config"]["data"]["pool.json"]
        found: list[str] = json.loads(data)["allowed_namespaces"]
        return found

    until("one team", lambda: allowed() == [SYSTEM, "team-in"])
    namespace(api, "team-too", access="chat")
    until("two teams", lambda: allowed() == [SYSTEM, "team-in", "team-too"])


# -- the end of a pool ------------------------------------------------------------------------------------------------


def test_retain_keeps_the_secret_and_a_new_pool_of_that_name_takes_it_over(pools: Pools):
    pools.apply("chat")
    first = pools.until_ready("chat")
    secret = pools.owned("chat")["secrets/chat-secret"]
    pools.delete("chat")
    pools.until_gone("chat")
    until("only the Secret is left", lambda: set(pools.owned("chat")) == {"secrets/chat-secret"})
    kept = pools.owned("chat")["secrets/chat-secret"]
    assert kept["data"] == secret["data"]
    assert kept["metadata"]["labels"]["kvpool.dev/retained"] == "true"
    pools.apply("chat")
    second = pools.until_ready("chat")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert second["status"]["poolID"] == first["status"]["poolID"]
    adopted = pools.owned("chat")["secrets/chat-secret"]
    assert adopted["data"] == secret["data"]
    assert "kvpool.dev/retained" not in adopted["metadata"]["labels"]


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_delete_wipes_every_node_before_anything_else_goes(pools: Pools, kubelet: Kubelet, propagation: str):
    pools.apply("scratch", deletionPolicy="Delete")
    pools.until_ready("scratch")
    kubelet.failing["node-b"] = "not wiped yet"
    pools.delete("scratch", propagationPolicy=propagation)
    until("the wipe is there", lambda: "daemonsets/scratch-wipe" in pools.owned("scratch"))
    assert "daemonsets/scratch-sidecar" not in pools.owned("scratch")
    pools.until_condition("scratch", "Progressing", "Deleting", "1 of 2 nodes")
    assert "configmaps/scratch-config" in pools.owned("scratch")
    kubelet.failing.clear()
    pools.until_gone("scratch")
    until("nothing is left", lambda: pools.owned("scratch") == {})


def test_a_node_that_does_not_answer_holds_a_deletion_only_until_the_deadline(pools: Pools, kubelet: Kubelet):
    pools.apply("scratch", deletionPolicy="Delete", cleanupTimeout="4s")
    pools.until_ready("scratch")
    kubelet.down.add("node-b")
    pools.delete("scratch")
    pools.until_gone("scratch", timeout=15)
    reported = [e for e in pools.events("scratch") if e["reason"] == "CleanupTimedOut"]
    assert reported, pools.events("scratch")
    kubelet.down.clear()
    until("nothing is left", lambda: pools.owned("scratch") == {})


def test_deleting_the_namespace_does_not_hang(pools: Pools, api: Api):
    namespace(api, "doomed")
    pools.apply("chat", ns="doomed", deletionPolicy="Delete")
    pools.until_ready("chat", ns="doomed")
    api.delete("/api/v1/namespaces/doomed")
    until("the namespace is gone", lambda: api.get("/api/v1/namespaces/doomed") is None, timeout=60)
    until("its binding is gone", lambda: pools.owned("chat", ns="default") == {})


def test_a_lost_secret_is_made_anew_with_the_same_identity(pools: Pools):
    pools.apply("chat")
    identity = pools.until_ready("chat")["status"]["poolID"]
    old = pools.owned("chat")["secrets/chat-secret"]["data"]
    pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/chat-secret")
    until("it is back", lambda: "secrets/chat-secret" in pools.owned("chat"))
    new = pools.owned("chat")["secrets/chat-secret"]["data"]
    assert new["pool-secret"] != old["pool-secret"]
    assert base64.b64decode(new["pool-id"]).decode() == identity


def test_the_token_of_routers_comes_changes_and_goes_with_the_events(pools: Pools):
    def token() -> str:
        return base64.b64decode(pools.owned("chat")["secrets/chat-events"]["data"]["token"]).decode()

    pools.apply("chat", events={"enabled": True})
    pools.until_ready("chat")
    first = token()
    assert len(first) == 64
    server = pools.owned("chat")["daemonsets/chat-sidecar"]["spec"]["template"]["spec"]["containers"][0]
    assert {p["name"]: p["containerPort"] for p in server["ports"]}["kv-events"] == 5557
    pools.apply("chat", events={"enabled": True, "tokenRevision": 1})
    until("another token", lambda: token() != first)
    pools.apply("chat")
    until("the token is gone", lambda: "secrets/chat-events" not in pools.owned("chat"))
    pools.until_ready("chat")
    assert without_pods(pools.owned("chat")) == MANAGED
