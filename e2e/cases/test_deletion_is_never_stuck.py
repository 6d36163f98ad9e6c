"""Fault 22: a pool is deleted while its sidecars hang, its index is down, or the operator is away. It always goes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import system
from kubectl import get, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.usefixtures("installed")]

PATIENCE = "20s"  # spec.cleanupTimeout of these pools
GRACE_S = 60.0  # for the kubelets to end what hangs, and for a machine with two processors


@pytest.fixture
def doomed() -> Iterator[str]:
    """A pool on the drives alone, whose blocks go with it."""
    name = "doomed"
    apply(name)
    yield name
    system.delete_pool(name)


def apply(name: str, namespace: str = system.SYSTEM, wait: float = 120) -> None:
    tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{name}", "capacity": "256Mi"}}]
    system.apply_pool(
        name, namespace=namespace, wait=wait, tiers=tiers, deletionPolicy="Delete", cleanupTimeout=PATIENCE
    )


def ask_to_go(name: str, namespace: str = system.SYSTEM) -> float:
    kubectl("-n", namespace, "delete", "kvp", name, "--wait=false")
    return time.monotonic()


def is_gone(name: str, namespace: str = system.SYSTEM) -> bool:
    return get("kvp", name, "-n", namespace) is None and system.owned(name, namespace) == []


def test_it_goes_while_its_sidecars_hang(doomed: str):
    hung = []
    for node in system.workers():
        pod = system.sidecar(node, doomed)
        number = system.main_process(node, pod["metadata"]["uid"], "kvpool", "serve")
        system.signal(node, "STOP", [number])
        hung.append((node, number))
    started = ask_to_go(doomed)
    try:
        until("the pool is gone", lambda: is_gone(doomed), 20 + GRACE_S)
    finally:
        for node, number in hung:
            system.on_node(node, "kill", "-CONT", str(number), check=False)
    print(f"gone after {time.monotonic() - started:.0f} s")


def test_it_goes_while_its_index_is_down(doomed: str):
    index = system.pods(f"kvpool.dev/pool={doomed},app.kubernetes.io/component=index")[0]
    node = index["spec"]["nodeName"]
    number = system.main_process(node, index["metadata"]["uid"], "valkey-server")
    system.signal(node, "STOP", [number])
    started = ask_to_go(doomed)
    try:
        until("the pool is gone", lambda: is_gone(doomed), 20 + GRACE_S)
    finally:
        system.on_node(node, "kill", "-CONT", str(number), check=False)
    print(f"gone after {time.monotonic() - started:.0f} s")


def test_it_waits_for_the_operator_and_goes_when_that_is_back(doomed: str):
    system.scale("kvpool-operator", 0)
    try:
        ask_to_go(doomed)
        found = get("kvp", doomed, "-n", system.SYSTEM)
        assert found["metadata"]["finalizers"] == ["kvpool.dev/cleanup"]
        assert system.sidecar(system.workers()[0], doomed)  # nothing was taken from its engines meanwhile
    finally:
        kubectl("-n", system.SYSTEM, "scale", "deployment/kvpool-operator", "--replicas=2")
    until("the pool is gone", lambda: is_gone(doomed), 20 + GRACE_S)


def test_a_namespace_with_a_pool_in_it_can_be_deleted():
    system.label("short-lived", {"pod-security.kubernetes.io/enforce": "privileged"})
    apply("doomed", "short-lived", wait=0)
    until("the pool has its objects", lambda: len(system.owned("doomed", "short-lived")) > 3, 60)
    kubectl("delete", "namespace", "short-lived", "--wait=false")
    until("the namespace is gone", lambda: get("namespace", "short-lived") is None, 120)
    wide = json.loads(kubectl("get", "pv", "-l", "kvpool.dev/pool-namespace=short-lived", "-o", "json"))
    assert wide["items"] == []
