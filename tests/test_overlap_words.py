"""What the operator and the sidecars must call by the same names while one sidecar takes over from another."""

from __future__ import annotations

from typing import get_args

import pytest

from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired import Inputs, InstallationConfig, PoolSecret, build
from kvpool_operator.sidecars.status import Phase as Told
from kvpool_operator.sidecars.status import SidecarStatus
from kvpool_sidecar import arguments
from kvpool_sidecar.observability.status import Phase


def test_the_operator_knows_every_phase_of_a_sidecar():
    assert set(get_args(Told)) == {"", *(phase.value for phase in Phase)}
    for phase in Phase:
        assert SidecarStatus.parse({"node": "a", "phase": phase.value, "ready": False}).phase == phase.value


@pytest.mark.parametrize("overlap", [True, False])
def test_sidecars_overlap_where_their_pods_say_so(overlap: bool, monkeypatch: pytest.MonkeyPatch):
    tier = {"name": "nvme", "local": {"path": "/mnt/nvme", "capacity": "1Gi"}}
    pool = {
        "metadata": {"name": "chat", "namespace": "team", "uid": "u", "generation": 1},
        "spec": {"tiers": [tier], "nodes": {"update": {"surge": overlap}}},
    }
    secret = PoolSecret("id", "ab" * 32, "password", {"peer-ca.crt": "c", "peer-ca.key": "k"})
    made = build(Inputs(KVCachePool.parse(pool), InstallationConfig("kvpool/sidecar:test"), secret))
    spec = next(m for m in made if m["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    (server,) = [c for c in spec["containers"] if c["name"] == "server"]
    for variable in server["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    assert arguments.parser().parse_args(server["command"][1:]).allow_takeover is overlap
