"""Fault 20: two operators; the one that leads is stopped, another takes over, the first goes on and finds it lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import system
from kubectl import get, items, until

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive, pytest.mark.usefixtures("load_pool")]

LEASE_S = 15.0


def lease() -> dict[str, Any]:
    found: dict[str, Any] = get("lease", "-n", system.SYSTEM, "kvpool-operator")["spec"]
    return found


def generations() -> dict[str, Any]:
    """Of everything that the operator made: who took part in writing it, and how often it was changed."""
    kinds = "daemonsets,statefulsets,services,configmaps,serviceaccounts"
    found = items(kinds, "-n", system.SYSTEM, "-l", f"kvpool.dev/pool={system.POOL}", "--show-managed-fields")
    return {
        f"{o['kind']}/{o['metadata']['name']}": (
            o["metadata"].get("generation"),
            o["metadata"]["uid"],
            sorted({m["manager"] for m in o["metadata"].get("managedFields", []) if m.get("operation") == "Apply"}),
        )
        for o in found
    }


def test_a_leader_that_is_stopped_and_goes_on_writes_nothing_more_and_ends():
    system.scale("kvpool-operator", 2)
    until("one leads", lambda: lease().get("holderIdentity"), 60)
    until("the pool is at rest", system.settled, 60)
    before, was = generations(), lease()
    leader = get("pod", "-n", system.SYSTEM, was["holderIdentity"])
    node = leader["spec"]["nodeName"]
    container = leader["status"]["containerStatuses"][0]
    number = system.main_process(node, leader["metadata"]["uid"], "kvpool", "run")
    stopped = time.monotonic()
    system.signal(node, "STOP", [number])
    try:
        until("another leads", lambda: lease()["holderIdentity"] not in ("", was["holderIdentity"]), 60, every=0.2)
        took = time.monotonic() - stopped
        assert took >= LEASE_S - 2.5, "the Lease was taken from a leader that might still have written"
        system.change(cleanup="4m")
        until("the new leader works", system.settled, 60)
        taken = lease()
    finally:
        system.on_node(node, "kill", "-CONT", str(number), check=False)
    until(
        "the one that was stopped has ended and was started anew",
        lambda: (
            get("pod", "-n", system.SYSTEM, was["holderIdentity"])["status"]["containerStatuses"][0]["restartCount"]
            > container["restartCount"]
        ),
        90,
    )
    until("both run", lambda: sum(map(system.pod_ready, system.pods(system.OPERATOR))) == 2, 60)
    now = lease()
    assert (now["holderIdentity"], now["leaseTransitions"]) == (taken["holderIdentity"], taken["leaseTransitions"])
    assert now["leaseTransitions"] == was["leaseTransitions"] + 1
    assert generations() == before, "an object was written that nothing asked for"
    print(f"another led after {took:.1f} s")
