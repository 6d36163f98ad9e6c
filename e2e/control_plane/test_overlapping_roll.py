"""A roll in which new sidecars start beside old ones, with Kubernetes' own DaemonSet controller; the sidecars and what
they say of themselves are played."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from api import POOLS, until
from conftest import NODES, SYSTEM, Pools
from kubelet import SidecarDouble, address

from kvpool_operator.api.annotations import ANNOTATION_RESYNC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kubelet import Kubelet

pytestmark = pytest.mark.cluster

DAEMONSET = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/chat-sidecar"
SERVING = (
    "Ready",
    "StorageReady",
    "IndexReady",
    "TransportReady",
    "RollingUpdateSafe",
    "DiskHealthy",
    "IndexConnected",
)
QUICKLY = {"update": {"minReadySeconds": 1}}


def idle(phase: str, node: str) -> dict[str, Any]:
    return {"phase": phase, "node": node, "ready": False}


@pytest.fixture
def beside(kubelet: Kubelet, sidecars: dict[str, SidecarDouble]) -> Iterator[dict[str, SidecarDouble]]:
    """Second sidecars, which stand by and are not ready."""
    kubelet.apart = True
    kubelet.unready = {address(node, 1) for node in NODES}
    with contextlib.ExitStack() as stack:
        doubles = {node: stack.enter_context(SidecarDouble(node, 1)) for node in NODES}
        for node, double in doubles.items():
            double.status = idle("StandingBy", node)
        yield doubles
    kubelet.apart = False
    kubelet.unready.clear()


def pods(pools: Pools) -> dict[str, list[str]]:
    """Addresses of the sidecars' pods by node."""
    found: dict[str, list[str]] = {}
    for pod in (o for k, o in pools.owned("chat").items() if k.startswith("pods/chat-sidecar-")):
        found.setdefault(pod["spec"].get("nodeName", ""), []).append(pod["status"].get("podIP", ""))
    return {node: sorted(addresses) for node, addresses in found.items()}


def flips(pools: Pools) -> dict[str, str]:
    """When each condition that speaks of serving last flipped, of the pool and of its nodes."""
    nodes = pools.api.items(f"{POOLS}/namespaces/{SYSTEM}/kvcachenodes")
    found = {}
    for one in [pools.get("chat"), *nodes]:
        for c in one["status"]["conditions"]:
            if c["type"] in SERVING:
                assert c["status"] == "True", c
                found[f"{one['metadata']['name']} {c['type']}"] = c["lastTransitionTime"]
    return found


def test_each_node_has_one_sidecar_while_the_next_one_takes_over(
    pools: Pools, kubelet: Kubelet, sidecars: dict[str, SidecarDouble], beside: dict[str, SidecarDouble]
):
    pools.apply("chat", nodes=QUICKLY)
    pools.until_ready("chat")
    until("nothing is rolled", lambda: pools.condition("chat", "Progressing")["reason"] == "UpToDate")
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert pools.api.get(DAEMONSET)["spec"]["updateStrategy"] == rolling
    nodes = f"{POOLS}/namespaces/{SYSTEM}/kvcachenodes"
    until("the nodes are told of", lambda: sum("status" in n for n in pools.api.items(nodes)) == len(NODES))
    until("a roll is safe", lambda: pools.condition("chat", "RollingUpdateSafe")["status"] == "True")
    time.sleep(1.1)  # times of conditions have no parts of seconds
    before = flips(pools)

    kubelet.failing |= {address(node, 1): "no such image" for node in NODES}
    pools.apply("chat", nodes=QUICKLY, transport={"streams": 3})
    pools.until_condition("chat", "Progressing", "RolloutStuck", "new sidecar: container server failed: no such image")
    assert sorted(map(len, pods(pools).values())) == [1, 2]
    assert flips(pools) == before
    kubelet.failing.clear()
    for step in (1, 2):
        now = until("a new one stands by", lambda: [n for n, a in pods(pools).items() if a == both(n)])
        (node,) = now
        pools.until_condition("chat", "Progressing", "RollingOut", f"{step - 1} of 2 nodes run the current spec")
        serving = dict(sidecars[node].status)
        sidecars[node].status = idle("HandedOver", node)
        time.sleep(0.5)
        beside[node].status = serving | {"phase": "Serving"}
        time.sleep(1.5)  # the operator looks once a second; the probe is late
        kubelet.unready.discard(address(node, 1))
        until("the old one is gone", lambda node=node: pods(pools)[node] == [address(node, 1)])
        assert flips(pools) == before
    until("nothing is rolled", lambda: pools.condition("chat", "Progressing")["reason"] == "UpToDate")
    assert pools.get("chat")["status"]["nodes"]["summary"] == "2/2"
    assert flips(pools) == before


def test_old_sidecars_go_also_where_the_daemonset_controller_has_lost_a_wake_up(
    pools: Pools, kubelet: Kubelet, sidecars: dict[str, SidecarDouble], beside: dict[str, SidecarDouble]
):
    """It keeps the first of several wake-ups: that of a pod that became ready shortly before the roll."""
    kubelet.unready.clear()
    slowly = {"update": {"minReadySeconds": 10}}
    pools.apply("chat", nodes=slowly)
    pools.until_ready("chat")
    until("nothing is rolled", lambda: pools.condition("chat", "Progressing")["reason"] == "UpToDate", 60)
    for node in NODES:
        beside[node].status = dict(sidecars[node].status)
    node = NODES[0]
    (before,) = names_on(pools, node)
    pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/pods/{before}", gracePeriodSeconds=0)
    until("another pod is there", lambda: len(names_on(pools, node)) == 1 and names_on(pools, node) != [before])
    time.sleep(3)
    pools.apply("chat", nodes=slowly, transport={"streams": 3})
    until("two pods on a node", lambda: max(map(len, pods(pools).values())) == 2, 60)
    until("everything is replaced", lambda: pools.condition("chat", "Progressing")["reason"] == "UpToDate", 120)
    assert sorted(map(len, pods(pools).values())) == [1, 1]
    until(
        "nothing is overdue", lambda: ANNOTATION_RESYNC not in pools.api.get(DAEMONSET)["metadata"]["annotations"], 60
    )


def names_on(pools: Pools, node: str) -> list[str]:
    mine = (o for k, o in pools.owned("chat").items() if k.startswith("pods/chat-sidecar-"))
    return [p["metadata"]["name"] for p in mine if p["spec"].get("nodeName") == node]


def both(node: str) -> list[str]:
    return [address(node), address(node, 1)]


def test_without_room_for_two_the_old_one_is_stopped_first(
    pools: Pools, kubelet: Kubelet, beside: dict[str, SidecarDouble]
):
    kubelet.unready.clear()
    pools.apply("chat", nodes=QUICKLY)
    pools.until_ready("chat")
    kubelet.failing |= {address(node, 1): "out of memory" for node in NODES}
    pools.apply("chat", nodes=QUICKLY, transport={"streams": 3})
    pools.until_condition("chat", "Progressing", "RolloutStuck", "out of memory")
    first = {"update": {"minReadySeconds": 1, "surge": False}}
    pools.apply("chat", nodes=first, transport={"streams": 3})
    pools.until_condition("chat", "Progressing", "UpToDate")
    pools.until_ready("chat")
    assert pools.api.get(DAEMONSET)["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert pods(pools) == {node: [address(node)] for node in NODES}
