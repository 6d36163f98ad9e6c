"""Volumes and devices that come with each sidecar pod: spec.tiers[].local.volumeClaimTemplate, and RDMA by DRA."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from op_samples import ENV, LOCAL, ROOT, SECRET, example, inputs, pool

from kvpool_operator.api.crdgen import render
from kvpool_operator.desired import Inputs, build
from kvpool_operator.desired.config import to_pool_config
from kvpool_operator.desired.labels import is_ours
from kvpool_operator.desired.preflight import build_preflight, preflight_spec
from kvpool_operator.desired.rollout import local_drives, rolling_update
from kvpool_operator.desired.users import Drive
from kvpool_operator.desired.wipe import build_cleanup

GOLDEN = ROOT / "operator" / "tests" / "golden" / "claims.yaml"
CAPACITY_OF_TENTH_RESERVED = 90 << 30


def claim(name: str = "nvme", storage: str = "100Gi", **local: Any) -> dict[str, Any]:
    template = {"spec": {"storageClassName": "topolvm", "resources": {"requests": {"storage": storage}}}}
    return {"name": name, "local": {"volumeClaimTemplate": template, **local}}


def daemonset(made: list[dict[str, Any]]) -> dict[str, Any]:
    return next(m for m in made if m["kind"] == "DaemonSet")


def pod(made: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = daemonset(made)["spec"]["template"]["spec"]
    return found


def directories(of: dict[str, Any]) -> list[str]:
    return [v["name"] for v in of["volumes"] if v["name"].startswith("tier-")]


def test_manifests_of_a_pool_with_claims_are_as_reviewed():
    text = "".join(f"---\n{render(m)}" for m in build(Inputs(example("local-volumes.yaml"), ENV, SECRET)))
    if os.environ.get("KVPOOL_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, f"{GOLDEN} differs: look at the change, then `make golden`"


def test_each_pod_has_a_claim_of_its_own_and_no_container_is_root():
    made = pod(build(inputs(tiers=[claim()])))
    (volume,) = [v for v in made["volumes"] if v["name"] == "tier-nvme"]
    assert volume["ephemeral"]["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "100Gi"}},
        "storageClassName": "topolvm",
        "volumeMode": "Filesystem",
    }
    assert not [v for v in made["volumes"] if "hostPath" in v]
    assert "initContainers" not in made, "only a directory of the node needs one that is root"
    assert made["securityContext"]["fsGroup"] == made["containers"][0]["securityContext"]["runAsGroup"]


def test_the_operator_does_not_take_the_claims_of_pods_for_its_own():
    """It would remove them as objects that no manifest names."""
    template = next(v for v in pod(build(inputs(tiers=[claim()])))["volumes"] if "ephemeral" in v)["ephemeral"]
    labels = template["volumeClaimTemplate"]["metadata"]
    assert labels["labels"]["kvpool.dev/pool"] == "chat"
    assert not is_ours({"metadata": labels}, "chat")


def test_without_a_class_the_default_of_the_cluster_is_not_overridden():
    tier = claim()
    del tier["local"]["volumeClaimTemplate"]["spec"]["storageClassName"]
    volume = next(v for v in pod(build(inputs(tiers=[tier])))["volumes"] if "ephemeral" in v)
    assert "storageClassName" not in volume["ephemeral"]["volumeClaimTemplate"]["spec"]


@pytest.mark.parametrize(
    ("local", "capacity"),
    [
        ({}, 95 << 30),
        ({"reserveFree": "10%"}, CAPACITY_OF_TENTH_RESERVED),
        ({"reserveFree": "20Gi"}, 80 << 30),
        ({"reserveFree": "0%"}, 100 << 30),
        ({"reserveFree": "200Gi"}, 64 << 20),
        ({"capacity": "50Gi"}, 50 << 30),
    ],
)
def test_the_capacity_is_what_the_reserve_leaves_of_the_claim(local: dict[str, Any], capacity: int):
    config = to_pool_config(pool(tiers=[claim(**local)]), pool_id="p", index_url="")
    assert config.local[0].capacity_bytes == capacity


def test_the_sidecar_owns_a_directory_in_the_volume_because_it_cannot_own_the_volume():
    config = to_pool_config(pool(tiers=[LOCAL, claim("second")]), pool_id="p", index_url="")
    assert [(t.path, t.is_ephemeral) for t in config.local] == [("/tiers/nvme", False), ("/tiers/second/kvpool", True)]


def test_only_the_sidecars_mount_the_volumes_of_pods():
    """A wipe or a preflight check that mounted such a volume would only make another, empty one."""
    mixed = inputs(tiers=[LOCAL, claim("second")], deletionPolicy="Delete")
    assert directories(pod(build(mixed))) == ["tier-nvme", "tier-second"]
    prepare = pod(build(mixed))["initContainers"][0]
    assert [m["name"] for m in prepare["volumeMounts"]] == ["config", "tier-nvme"]
    for made in (build_preflight(mixed), build_cleanup(mixed)):
        assert directories(pod(made)) == ["tier-nvme"]
    alone = inputs(tiers=[claim()], deletionPolicy="Delete")
    for made in (build_preflight(alone), build_cleanup(alone)):
        assert directories(pod(made)) == []


def test_a_pod_with_a_volume_of_its_own_is_replaced_not_overlapped():
    surge = {"update": {"surge": True}}
    assert rolling_update(inputs(nodes=surge, tiers=[LOCAL]))["maxSurge"] != 0
    assert rolling_update(inputs(nodes=surge, tiers=[LOCAL, claim("second")]))["maxSurge"] == 0


def test_the_volume_of_a_pod_is_a_drive_that_no_other_pod_has():
    running = {"spec": pod(build(inputs(tiers=[claim()])))}
    user = running["spec"]["containers"][0]["securityContext"]["runAsUser"]
    assert local_drives([running]) == (frozenset({Drive("ephemeral:tier-nvme", user)}),)


def test_devices_by_dynamic_resource_allocation():
    rdma = {"resourceClaimTemplateName": "rdma-nic", "memory": "1Gi"}
    with_claim = inputs(transport={"protocol": "RDMA", "rdma": rdma})
    for made in (pod(build(with_claim)), pod(build_preflight(with_claim))):
        assert made["resourceClaims"] == [{"name": "rdma", "resourceClaimTemplateName": "rdma-nic"}]
        assert made["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]
    plain = pod(build(inputs()))
    assert "resourceClaims" not in plain
    assert "claims" not in plain["containers"][0]["resources"]
    limit = pod(build(with_claim))["containers"][0]["resources"]["limits"]["memory"]
    assert limit == "3584Mi", "registered memory is part of the limit"
    assert rolling_update(with_claim)["maxSurge"] == 0, "a node with one device has none for a second pod"
    assert preflight_spec(with_claim) != preflight_spec(inputs(transport={"protocol": "RDMA"}))
    without = inputs(transport={"protocol": "TCP", "rdma": rdma})
    assert "resourceClaims" not in json.dumps(build(without))
