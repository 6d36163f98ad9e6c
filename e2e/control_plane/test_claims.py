"""Volumes and devices of sidecar pods, by the real controllers: generic ephemeral volumes, and DRA's ResourceClaims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import MERGE, Api, ApiError, until
from conftest import NODES, Pools, namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

VOLUMES = "volumes"
DEVICES = "/apis/resource.k8s.io/v1"
GONE_S = 120
"""The garbage collector and the controllers of claims wait for each other."""
TEMPLATE = {"spec": {"storageClassName": "none", "resources": {"requests": {"storage": "1Gi"}}}}
CLAIM = {"name": "nvme", "local": {"volumeClaimTemplate": TEMPLATE}}


@pytest.fixture(scope="module")
def restricted(api: Api) -> Iterator[str]:
    """A namespace that admits no pod with a directory of its node, and none with a container that is root."""
    namespace(api, VOLUMES, **{"pod-security.kubernetes.io/enforce": "restricted"})
    yield VOLUMES
    api.delete(f"/api/v1/namespaces/{VOLUMES}")


def claims(api: Api, ns: str) -> list[dict[str, Any]]:
    return api.items(f"/api/v1/namespaces/{ns}/persistentvolumeclaims")


def test_a_pool_with_claims_is_ready_in_a_restricted_namespace_and_leaves_none(pools: Pools, restricted: str):
    pools.apply("chat", restricted, tiers=[CLAIM])
    pools.until_ready("chat", restricted)
    made = until("each pod has its claim", lambda: len(found := claims(pools.api, restricted)) == len(NODES) and found)
    for claim in made:
        (owner,) = claim["metadata"]["ownerReferences"]
        assert owner["kind"] == "Pod"
        assert claim["metadata"]["name"] == f"{owner['name']}-tier-nvme"
        assert claim["metadata"]["labels"]["kvpool.dev/pool"] == "chat"
        assert claim["spec"]["resources"]["requests"] == {"storage": "1Gi"}
    # the operator leaves them alone, though they have the label of its pool
    pools.api.call("PATCH", pools.path("chat", restricted), {"spec": {"cleanupTimeout": "4m"}}, MERGE)
    pools.until_ready("chat", restricted)
    kept = {c["metadata"]["uid"] for c in claims(pools.api, restricted) if "deletionTimestamp" not in c["metadata"]}
    assert kept == {c["metadata"]["uid"] for c in made}
    pools.delete("chat", restricted)
    pools.until_gone("chat", restricted, GONE_S)
    until("no claim is left", lambda: claims(pools.api, restricted) == [], GONE_S)


def test_a_pool_with_directories_says_that_this_namespace_refuses_it(pools: Pools, restricted: str):
    """The control: the namespace refuses what needs more."""
    pools.apply("wide", restricted)
    until(
        "the pool says why",
        lambda: any("PodSecurity" in c["message"] for c in pools.get("wide", restricted)["status"]["conditions"]),
    )
    pools.delete("wide", restricted)
    pools.until_gone("wide", restricted, GONE_S)


def test_the_source_of_a_local_tier_stays(pools: Pools):
    pools.apply("fixed", tiers=[CLAIM])
    tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi", "volumeClaimTemplate": None}}]
    with pytest.raises(ApiError, match="the source of a local tier cannot be changed"):
        pools.api.call("PATCH", pools.path("fixed"), {"spec": {"tiers": tiers}}, MERGE)
    grown = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
    tiers = [{"name": "nvme", "local": {"volumeClaimTemplate": grown}}]
    pools.api.call("PATCH", pools.path("fixed"), {"spec": {"tiers": tiers}}, MERGE)


def test_a_pod_gets_its_device_by_a_resource_claim(pools: Pools, api: Api):
    ns = "devices"
    namespace(api, ns)
    exactly = {"deviceClassName": "rdma.example"}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "rdma-nic", "namespace": ns},
        "spec": {"spec": {"devices": {"requests": [{"name": "nic", "exactly": exactly}]}}},
    }
    api.call("POST", f"{DEVICES}/namespaces/{ns}/resourceclaimtemplates", template)
    pools.apply("chat", ns, transport={"rdma": {"resourceClaimTemplateName": "rdma-nic"}})
    pools.until_ready("chat", ns)
    made = until(
        "each pod has its claim",
        lambda: len(found := api.items(f"{DEVICES}/namespaces/{ns}/resourceclaims")) == len(NODES) and found,
    )
    for claim in made:
        assert claim["metadata"]["ownerReferences"][0]["kind"] == "Pod"
        assert claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "rdma.example"
    for pod in [o for name, o in pools.owned("chat", ns).items() if name.startswith("pods/chat-sidecar")]:
        assert pod["spec"]["resourceClaims"] == [{"name": "rdma", "resourceClaimTemplateName": "rdma-nic"}]
        assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]
    pools.delete("chat", ns)
    pools.until_gone("chat", ns, GONE_S)
    until("no claim is left", lambda: api.items(f"{DEVICES}/namespaces/{ns}/resourceclaims") == [], GONE_S)
