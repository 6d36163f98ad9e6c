"""A node is cordoned: its hot blocks move, its KVCacheNode says how far, and an uncordon ends it. Real sidecars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import MERGE, POOLS, until
from conftest import SYSTEM, Pools
from sidecars import RealSidecars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kubelet import Kubelet

pytestmark = pytest.mark.cluster

A, B = "node-a", "node-b"


@pytest.fixture
def sidecars(kubelet: Kubelet) -> dict[str, Any]:
    """No doubles: the real ones of this module have their addresses."""
    return {}


@pytest.fixture
def real(pools: Pools, tmp_path: Path) -> Iterator[RealSidecars]:
    pools.apply("chat", nodes={"drain": {"bandwidth": "1Gi", "timeout": "20s"}})
    needed = {"secrets/chat-secret", "configmaps/chat-config"}
    until("Secret and configuration are there", lambda: pools.owned("chat").keys() >= needed)
    with RealSidecars(pools, "chat", tmp_path) as real:
        real.start(A)
        real.start(B)
        pools.until_ready("chat")
        yield real
        for node in (A, B):
            change(pools, node, unschedulable=None, taints=None)


def change(pools: Pools, node: str, **spec: Any) -> None:
    pools.api.call("PATCH", f"/api/v1/nodes/{node}", {"spec": spec}, MERGE)


def cache_node(pools: Pools, node: str) -> Any:
    return pools.api.get(f"{POOLS}/namespaces/{SYSTEM}/kvcachenodes/chat.{node}")["status"]


def drain_of(pools: Pools, node: str) -> Any:
    return cache_node(pools, node)["drain"]


def conditions(pools: Pools, node: str) -> dict[str, str]:
    return {c["type"]: c["status"] for c in cache_node(pools, node)["conditions"]}


def test_a_cordon_moves_what_is_hot_and_an_uncordon_ends_it(pools: Pools, real: RealSidecars):
    blocks = range(40)
    real.store(A, blocks)
    until("both are reported of", lambda: all(conditions(pools, n)["Ready"] == "True" for n in (A, B)))
    assert drain_of(pools, A)["state"] == "None"
    change(pools, A, unschedulable=True)
    until("it is drained", lambda: drain_of(pools, A)["state"] == "Drained", timeout=60)
    reported = drain_of(pools, A)
    assert (reported["reason"], reported["movedBlocks"], reported["remainingBlocks"]) == ("it is cordoned", 40, 0)
    assert reported["endTime"] >= reported["startTime"] > ""
    assert drain_of(pools, B)["state"] == "None"
    real.store(A, range(100, 105))  # what comes now is not left alone either
    until("it is moved, too", lambda: real.status(A)["drain"]["moved_blocks"] == 45, timeout=60)
    change(pools, A, unschedulable=None)
    until("it stays", lambda: drain_of(pools, A)["state"] == "None")
    until("its sidecar knows", lambda: not real.status(A)["drain"]["leaving"])
    change(pools, A, taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])
    until("it is drained anew", lambda: drain_of(pools, A)["state"] == "Drained", timeout=60)
    assert drain_of(pools, A)["reason"] == "Karpenter removes it"
    real.kill(A)
    assert real.loads(B, blocks) == 40


def test_a_drain_without_anybody_to_take_the_blocks_is_given_up_in_time(pools: Pools, real: RealSidecars):
    real.store(A, range(10))
    until("it is reported of", lambda: conditions(pools, A)["Ready"] == "True")
    taints = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule", "value": "1"}]
    change(pools, B, taints=taints)
    until("the other has nothing to move", lambda: drain_of(pools, B)["state"] == "Drained")
    change(pools, A, taints=taints)
    until("it tries", lambda: drain_of(pools, A)["state"] == "Evacuating")
    until("it is given up", lambda: drain_of(pools, A)["state"] == "Abandoned", timeout=60)
    assert drain_of(pools, A)["remainingBlocks"] == 10
    until("its sidecar goes on as before", lambda: not real.status(A)["drain"]["leaving"])
    assert real.loads(A, range(10)) == 10
    assert drain_of(pools, B)["state"] == "Drained"


def test_a_node_that_is_gone_is_said_to_be(pools: Pools, real: RealSidecars, kubelet: Kubelet):
    path = f"{POOLS}/namespaces/{SYSTEM}/kvcachenodes"
    until("two are there", lambda: {n["spec"]["node"] for n in pools.api.items(path)} == {A, B})
    real.kill(B)
    until("its silence shows", lambda: conditions(pools, B)["Ready"] == "Unknown", timeout=60)
    assert conditions(pools, A)["Ready"] == "True"
    pools.delete("chat")
    until("they go with the pool", lambda: pools.api.items(path) == [], timeout=60)
