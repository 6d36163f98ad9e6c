"""Objects of the preflight checks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from op_pool_world import NS
from op_samples import ENV, LOCAL, SECRET, inputs, pool

from kvpool.config import PoolConfig, loads
from kvpool_operator.desired import ExternalIndexUrl, Inputs
from kvpool_operator.desired.preflight import build_preflight, preflight_spec
from kvpool_operator.k8s.client import ObjectRef

LOOK = ObjectRef("DaemonSet", NS, "chat-preflight")
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")
CONFIG = ObjectRef("ConfigMap", NS, "chat-config")
SHOWN = ObjectRef("ConfigMap", NS, "chat-plan")


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
