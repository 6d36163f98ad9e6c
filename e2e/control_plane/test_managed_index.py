"""The managed index through a real API server: its password changes under running pods, it makes way for another index
when the last sidecar has moved, and its pod fits Pod Security `restricted`."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest
from api import until
from conftest import SYSTEM, Pools, namespace

from kvpool.protocol.keys import index_login

if TYPE_CHECKING:
    from api import Api
    from kubelet import SidecarDouble

pytestmark = pytest.mark.cluster

AT_ONCE = {"update": {"minReadySeconds": 0, "maxUnavailable": "100%"}}


def secret(pools: Pools) -> dict[str, str]:
    found = pools.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/chat-secret")["data"]
    return {k: base64.b64decode(v).decode() for k, v in found.items()}


def pods(pools: Pools) -> set[str]:
    return {o["metadata"]["uid"] for k, o in pools.owned("chat").items() if k.startswith("pods/")}


def index(pools: Pools) -> Any:
    return pools.api.get(f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/chat-index")


def test_a_password_is_changed_and_no_pod_is_made_anew(pools: Pools, sidecars: dict[str, SidecarDouble]):
    pools.apply("chat")
    pools.until_ready("chat")
    first = secret(pools)
    before = pods(pools)

    def show(*nodes: str) -> None:
        now = secret(pools)
        for node in nodes:
            login = index_login(now["pool-secret"].encode(), now["managed-index-password"])
            sidecars[node].status["index"]["login"] = login

    show("node-a", "node-b")
    pools.apply("chat", index={"managed": {"passwordRevision": 1}})
    until("both passwords are good", lambda: secret(pools)["managed-index-previous"] == first["managed-index-password"])
    show("node-a")
    until("node-b is waited for", lambda: pools.get("chat")["status"]["index"]["password"] == "node-b", 60)
    assert secret(pools)["managed-index-previous"]
    show("node-b")
    until("the old one is gone", lambda: secret(pools)["managed-index-previous"] == "")
    second = secret(pools)["managed-index-password"]
    assert second != first["managed-index-password"]
    assert pods(pools) == before
    text = str([o for k, o in pools.owned("chat").items() if not k.startswith("secrets/")]) + str(pools.get("chat"))
    assert second not in text


def test_its_memory_follows_from_the_tiers_unless_it_is_asked_for(pools: Pools):
    big = [{"name": "nvme", "local": {"path": "/var/lib/kvpool/chat", "capacity": "1Ti"}}]
    pools.apply("chat", tiers=big, preflight="Skip")
    pools.until_ready("chat")
    until("the status tells it", lambda: pools.get("chat")["status"]["index"]["memory"] == "1Gi", 60)  # 4 x 2^20 x 110
    pools.apply("chat", tiers=big, preflight="Skip", index={"managed": {"maxMemory": "128Mi"}})

    def given() -> Any:
        return str(128 * 2**20) in index(pools)["spec"]["template"]["spec"]["containers"][0]["command"]

    until("it has what was asked for", given)


def test_entries_may_have_a_volume(pools: Pools):
    pools.apply("chat", index={"managed": {"persistence": {"size": "2Gi", "storageClassName": "fast"}}})
    claim = f"/api/v1/namespaces/{SYSTEM}/persistentvolumeclaims/chat-index"
    made = until("the claim is there", lambda: pools.api.get(claim))
    assert made["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert made["spec"]["storageClassName"] == "fast"
    pools.apply("chat")
    until(
        "it is going",
        lambda: (pools.api.get(claim) or {"metadata": {"deletionTimestamp": "x"}})["metadata"].get("deletionTimestamp"),
    )


def test_to_an_index_of_ones_own_and_back(pools: Pools):
    slow = {"update": {"minReadySeconds": 3600}}
    url = base64.b64encode(b"redis://me:their-password@redis.example:6380/3").decode()
    made = {"metadata": {"name": "own-redis"}, "data": {"url": url}}
    pools.api.call("POST", f"/api/v1/namespaces/{SYSTEM}/secrets", made)
    own = {"external": {"urlSecretRef": {"name": "own-redis"}}}
    try:
        pools.apply("chat", nodes=slow)
        pools.until_ready("chat")
        pools.apply("chat", nodes=slow, index=own)
        pools.until_condition("chat", "Progressing", "Applying", "every sidecar to use the other index")
        assert index(pools) is not None
        assert {"index-password", "managed-index-password"} <= set(secret(pools))
        pools.apply("chat", nodes=AT_ONCE, index=own)
        until("the managed index is gone", lambda: index(pools) is None, 60)
        pools.apply("chat", nodes=AT_ONCE)
        until("it is back", lambda: index(pools) is not None)
        assert "index-password" not in secret(pools)
        pools.until_ready("chat")
    finally:
        pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/own-redis")


def test_its_pod_fits_the_restricted_standard(pools: Pools, api: Api):
    pools.apply("chat", index={"managed": {"persistence": {}}})
    template = until("the index is made", lambda: index(pools))["spec"]["template"]
    namespace(api, "restricted-index", **{"pod-security.kubernetes.io/enforce": "restricted"})
    account = "/api/v1/namespaces/restricted-index/serviceaccounts"
    until("the account is there", lambda: api.get(f"{account}/default"))
    spec = {**template["spec"], "serviceAccountName": "default", "serviceAccount": "default"}
    pod = {"metadata": {"name": "index"}, "spec": spec}
    assert api.call("POST", "/api/v1/namespaces/restricted-index/pods?dryRun=All", pod)["metadata"]["name"] == "index"


def test_upgrade_safe_is_told(pools: Pools, sidecars: dict[str, SidecarDouble]):
    pools.apply("chat", nodes={"update": {"maxUnavailable": 2}})
    pools.until_ready("chat")
    pools.until_condition("chat", "RollingUpdateSafe", "CachePreserved", "2 at a time")
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/chat-sidecar"
    spec = pools.api.get(path)["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 2, "maxUnavailable": 0}
    assert spec["minReadySeconds"] == 20
    sidecars["node-a"].status["block_formats"] = [1, 2, 3, 4, 5]
    pools.until_condition("chat", "RollingUpdateSafe", "FormatUnknown", "node-a")
