"""Findings in the status of a pool at a real API server, and the doctor that reads it through kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from api import until
from conftest import namespace
from plane import binaries

if TYPE_CHECKING:
    from pathlib import Path

    from api import Api
    from conftest import Pools
    from kubelet import SidecarDouble


pytestmark = pytest.mark.cluster


def codes(pools: Pools, pool: str, ns: str) -> list[str]:
    return [finding["code"] for finding in pools.get(pool, ns)["status"].get("findings", [])]


@pytest.fixture
def doctor(kubeconfig: Path) -> Any:
    """Run the doctor with the rights of the kubeconfig; return its exit code and the pool's findings."""
    found = binaries()
    if found is None or not (found / "kubectl").exists():
        pytest.skip("no kubectl: `e2e/airgap/binaries.sh kube` builds it")
    environment = {**os.environ, "PATH": f"{found}{os.pathsep}{os.environ['PATH']}", "KUBECONFIG": str(kubeconfig)}

    def run(pool: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "kvpool_cli", "doctor", pool, "-o", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (0, 1), done.stderr[-2000:]
        (diagnosed,) = json.loads(done.stdout)["pools"]
        return done.returncode, {finding["code"]: finding for finding in diagnosed["findings"]}

    return run


def test_refused_sidecars_are_a_finding_of_the_operator_and_of_the_doctor(pools: Pools, api: Api, doctor: Any):
    namespace(api, "found", **{"pod-security.kubernetes.io/enforce": "restricted"})
    pools.apply("chat", ns="found")
    until("the status has the finding", lambda: "KVP0607" in codes(pools, "chat", "found"), 90)
    assert pools.condition("chat", "StorageReady", ns="found")["message"].endswith("[KVP0607]")
    status, findings = doctor("found/chat")
    assert status == 1
    assert "violates PodSecurity" in findings["KVP0607"]["summary"]
    assert "privileged" in findings["KVP0607"]["fix"]


def test_a_finding_that_is_over_leaves_the_status(pools: Pools, sidecars: dict[str, SidecarDouble]):
    pools.apply("chat")
    pools.until_ready("chat")
    ns = pools.get("chat")["metadata"]["namespace"]
    sidecars["node-a"].status["drives"] = {"nvme": "failing"}
    until("the status has the finding", lambda: "KVP0601" in codes(pools, "chat", ns), 90)
    sidecars["node-a"].status["drives"] = {"nvme": "ok"}
    until("the finding is gone", lambda: "KVP0601" not in codes(pools, "chat", ns), 90)
