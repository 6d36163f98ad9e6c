"""Two operators: one leads, one that was stopped ends when it goes on, nothing is written twice."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from api import Api, until
from conftest import SYSTEM, Operator, Pools, remove_all_pools

if TYPE_CHECKING:
    from pathlib import Path

    from kubelet import SidecarDouble

pytestmark = pytest.mark.cluster

LEASE_S = 6


def lease(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/kvpool-operator")["spec"]
    return found


def written(pools: Pools) -> dict[str, Any]:
    """What our operators wrote and when; Kubernetes' own controllers write the status of the same objects."""
    return {
        key: [f for f in made["metadata"]["managedFields"] if f["manager"].startswith("kvpool")]
        for key, made in pools.owned("chat").items()
    }


def test_replicas_take_turns(
    no_operator: None, api: Api, sidecars: dict[str, SidecarDouble], rights: Path, tmp_path: Path
):
    def operator(name: str) -> Operator:
        return Operator(rights, tmp_path / name, name, lease_duration=str(LEASE_S))

    pools = Pools(api)
    with operator("one") as first:
        pools.apply("chat")
        pools.until_ready("chat")
        assert lease(api)["holderIdentity"] == "one"
        turns = lease(api)["leaseTransitions"]
        with operator("two") as second:
            until("the second one is up", lambda: second.metric("kvpool_operator_leader") == 0)
            # a leader that was stopped for longer than its Lease finds it lost and ends, without a write
            first.process.send_signal(signal.SIGSTOP)
            until("the second one leads", lambda: lease(api)["holderIdentity"] == "two", timeout=40)
            until("it serves", lambda: "leading as two" in second.log.read_text())
            time.sleep(3 * LEASE_S)
            before = written(pools)
            assert before["daemonsets/chat-sidecar"]
            first.process.send_signal(signal.SIGCONT)
            assert first.process.wait(20) == 1
            assert written(pools) == before
            assert (lease(api)["holderIdentity"], lease(api)["leaseTransitions"]) == ("two", turns + 1), "no flapping"
            # one that is told to end hands over at once
            with operator("three") as third:
                until("the third one waits", lambda: os.path.exists(third.log) and lease(api)["holderIdentity"])
                assert second.end() == 0
                until("the third one leads", lambda: lease(api)["holderIdentity"] == "three")
                pools.apply("chat", cleanupTimeout="2m")
                pools.until_ready("chat")
                remove_all_pools(api)
