"""KVCacheTenants against a real API server, and changes of a pool that sidecars take as they run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from api import APPLY, MERGE, POOLS, Api, ApiError, until
from conftest import ROOT, SYSTEM, Pools, namespace

from kvpool.config import PoolConfig, digest, loads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kubelet import SidecarDouble

pytestmark = pytest.mark.cluster

BAD_TENANTS = sorted((ROOT / "operator" / "tests" / "bad_tenants").glob("*.yaml"))
TENANTS = f"{POOLS}/namespaces/{SYSTEM}/kvcachetenants"
DAEMONSET = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/chat-sidecar"


@pytest.mark.parametrize("path", BAD_TENANTS, ids=lambda p: p.stem)
def test_a_bad_tenant_is_refused_with_a_sentence_that_helps(api: Api, path: Any):
    case = yaml.safe_load(path.read_text())
    with pytest.raises(ApiError) as refused:
        api.call("POST", f"{TENANTS}?dryRun=All&fieldValidation=Strict", case["tenant"])
    assert case["message"] in str(refused.value)
    assert refused.value.status == 422


def test_the_example_is_accepted(api: Api):
    for part in yaml.safe_load_all((ROOT / "examples" / "multi-tenant.yaml").read_text()):
        plural = {"KVCachePool": "kvcachepools", "KVCacheTenant": "kvcachetenants"}[part["kind"]]
        url = f"{POOLS}/namespaces/{SYSTEM}/{plural}/{part['metadata']['name']}"
        api.call("PATCH", f"{url}?fieldManager=user&dryRun=All&fieldValidation=Strict", part, APPLY)


class Tenants:
    """What a user does with tenants of the pool `chat`."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def apply(self, name: str, *namespaces: str, **spec: Any) -> None:
        manifest = {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCacheTenant",
            "metadata": {"name": name, "namespace": SYSTEM},
            "spec": {"poolRef": {"name": "chat"}, "members": {"namespaces": list(namespaces)}} | spec,
        }
        self.api.call("PATCH", f"{TENANTS}/{name}?fieldManager=user&fieldValidation=Strict", manifest, APPLY)

    def status(self, name: str) -> Any:
        return self.api.get(f"{TENANTS}/{name}")["status"]

    def until(self, name: str, kind: str, reason: str) -> dict[str, Any]:
        def found() -> Any:
            conditions = self.status(name)["conditions"]
            return next((c for c in conditions if c["type"] == kind and c["reason"] == reason), None)

        condition: dict[str, Any] = until(f"{kind} of {name} is {reason}", found)
        return condition


@pytest.fixture
def tenants(pools: Pools, api: Api) -> Iterator[Tenants]:
    yield Tenants(api)
    for tenant in api.items(TENANTS):
        api.delete(f"{TENANTS}/{tenant['metadata']['name']}")


def configuration(api: Api) -> tuple[PoolConfig, str]:
    text = api.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/chat-config")["data"]["pool.json"]
    return loads(PoolConfig, text), digest(text)


def members(api: Api) -> dict[str, tuple[str, ...]]:
    return {tenant.name: tenant.namespaces for tenant in configuration(api)[0].tenants}


def sidecars_run(sidecars: dict[str, SidecarDouble], its_digest: str) -> None:
    for sidecar in sidecars.values():
        sidecar.status["config"] = {"digest": its_digest, "problem": ""}


def test_a_tenant_is_in_force_once_every_node_runs_it_and_no_pod_is_made_anew_for_it(
    pools: Pools, tenants: Tenants, sidecars: dict[str, SidecarDouble], api: Api
):
    pools.apply("chat")
    pools.until_ready("chat")
    sidecars_run(sidecars, configuration(api)[1])
    template = api.get(DAEMONSET)["spec"]["template"]
    tenants.apply("acme", "acme-prod", "acme-dev", quota={"capacity": "1Gi"})
    until("the sidecars are reported", lambda: members(api) == {"acme": ("acme-dev", "acme-prod")})
    tenants.until("acme", "Accepted", "Accepted")
    tenants.until("acme", "Enforced", "RollingOut")
    until("the pool says so", lambda: pools.get("chat")["status"]["nodes"]["updated"] == 0)
    sidecars_run(sidecars, configuration(api)[1])
    tag = tenants.status("acme")["tag"]
    for sidecar in sidecars.values():
        sidecar.status["tenants"] = {tag: {"used_bytes": 2**29, "blocks": 16, "over_quota": 1}}
    tenants.until("acme", "Enforced", "Applied")
    until("the pool says so", lambda: pools.get("chat")["status"]["nodes"]["updated"] == 2)
    assert api.get(DAEMONSET)["spec"]["template"] == template


def test_two_that_claim_a_namespace_and_a_label_that_moves(pools: Pools, tenants: Tenants, api: Api):
    pools.apply("chat")
    pools.until_ready("chat")
    namespace(api, "trial-one", plan="trial")
    tenants.apply("first", "both")
    time.sleep(1.1)  # the API server notes whole seconds of creation
    tenants.apply("second", "both", members={"namespaces": ["both"], "selector": {"matchLabels": {"plan": "trial"}}})
    until("each has its own", lambda: members(api) == {"first": ("both",), "second": ("trial-one",)})
    reported = tenants.until("second", "Accepted", "NamespaceConflict")
    assert reported["status"] == "False"
    assert "both (of first)" in reported["message"]
    api.call("PATCH", "/api/v1/namespaces/trial-one", {"metadata": {"labels": {"plan": "paid"}}}, MERGE)
    until("it is no member any more", lambda: members(api)["second"] == ())
    api.delete(f"{TENANTS}/first")
    until("the younger has it now", lambda: members(api) == {"second": ("both",)})
    tenants.until("second", "Accepted", "Accepted")


def test_a_tenant_lets_another_read_and_takes_it_back(pools: Pools, tenants: Tenants, api: Api):
    def reads() -> dict[str, int]:
        return {tenant.name: len(tenant.reads_from) for tenant in configuration(api)[0].tenants}

    pools.apply("chat")
    pools.until_ready("chat")
    tenants.apply("acme", "acme-prod")
    tenants.apply("common", "prompts", sharing={"readers": ["acme", "nobody"]})
    until("the sidecars are reported", lambda: reads() == {"acme": 1, "common": 0})
    assert "nobody" in tenants.until("common", "Accepted", "ReaderNotFound")["message"]
    until("the reader is reported", lambda: tenants.status("acme")["readsFrom"] == ["common"])
    assert tenants.status("common")["readers"] == ["acme"]
    tenants.apply("common", "prompts")
    until("no more", lambda: reads() == {"acme": 0, "common": 0})
    until("which is reported", lambda: tenants.status("acme")["readsFrom"] == [])
    tenants.until("common", "Accepted", "Accepted")
    for wrong in (["*", "acme"], ["common"], [""]):
        with pytest.raises(ApiError) as refused:
            tenants.apply("common", "prompts", sharing={"readers": wrong})
        assert refused.value.status == 422


def test_a_tenant_is_told_that_its_pool_is_gone_and_cannot_move(pools: Pools, tenants: Tenants, api: Api):
    pools.apply("chat")
    pools.until_ready("chat")
    tenants.apply("acme", "acme")
    tenants.until("acme", "Accepted", "Accepted")
    with pytest.raises(ApiError, match="the pool of a tenant cannot be changed"):
        api.call("PATCH", f"{TENANTS}/acme", {"spec": {"poolRef": {"name": "other"}}}, MERGE)
    pools.delete("chat")
    pools.until_gone("chat")
    tenants.until("acme", "Accepted", "PoolNotFound")
    pools.apply("chat")
    tenants.until("acme", "Accepted", "Accepted")


def test_a_resize_reaches_the_sidecars_without_making_them_anew(
    pools: Pools, sidecars: dict[str, SidecarDouble], api: Api
):
    pools.apply("chat")
    pools.until_ready("chat")
    sidecars_run(sidecars, configuration(api)[1])
    before = {k: o["metadata"]["uid"] for k, o in pools.owned("chat").items() if k.startswith("pods/")}
    template = api.get(DAEMONSET)["spec"]["template"]
    tiers = [{"name": "nvme", "local": {"path": "/var/lib/kvpool/chat", "capacity": "3Gi"}}]
    cache = {"eviction": {"policy": "LRU", "highWatermark": 90}, "ttl": {"idle": "24h"}}
    pools.apply("chat", tiers=tiers, cache=cache)
    until("the sidecars are reported", lambda: configuration(api)[0].local[0].capacity_bytes == 3 << 30)
    pools.until_condition("chat", "Progressing", "RollingOut", "0 of 2 nodes run the current spec")
    sidecars_run(sidecars, configuration(api)[1])
    pools.until_condition("chat", "Progressing", "UpToDate")
    assert {k: o["metadata"]["uid"] for k, o in pools.owned("chat").items() if k.startswith("pods/")} == before
    assert api.get(DAEMONSET)["spec"]["template"] == template
