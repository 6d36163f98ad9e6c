"""A real sidecar takes over from another on the same node, and the real operator goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import APPLY, POOLS, until
from conftest import SYSTEM, Pools
from kubelet import address
from sidecars import RealSidecars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kubelet import Kubelet

pytestmark = pytest.mark.cluster

A = "node-a"
BLOCKS = range(40)
NODES = {"selector": {"matchLabels": {"node": A}}, "update": {"minReadySeconds": 1}}
OPERATIONS = f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations"


@pytest.fixture
def sidecars(kubelet: Kubelet) -> dict[str, Any]:
    """No doubles: the real ones of this module have their addresses."""
    return {}


@pytest.fixture
def real(pools: Pools, kubelet: Kubelet, tmp_path: Path) -> Iterator[RealSidecars]:
    kubelet.apart, kubelet.unready = True, {address(A, 1)}
    pools.apply("chat", nodes=NODES)
    needed = {"secrets/chat-secret", "configmaps/chat-config"}
    until("Secret and configuration are there", lambda: pools.owned("chat").keys() >= needed)
    with RealSidecars(pools, "chat", tmp_path) as real:
        real.start(A, overlap=True)
        pools.until_ready("chat")
        yield real
    kubelet.apart = False
    kubelet.unready.clear()
    for one in pools.api.items(OPERATIONS):
        pools.api.delete(f"{OPERATIONS}/{one['metadata']['name']}")
    until("every operation is gone", lambda: pools.api.items(OPERATIONS) == [], timeout=60)


def places(pools: Pools) -> list[str]:
    """Addresses of the sidecars' pods."""
    found = [o for k, o in pools.owned("chat").items() if k.startswith("pods/chat-sidecar-")]
    return sorted(p["status"].get("podIP", "") for p in found)


def verified(pools: Pools, name: str) -> Any:
    """What an operation finds on the node's drive."""
    wish = {"poolRef": {"name": "chat"}, "verify": {"bandwidth": "1Gi"}}
    made = {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCacheOperation", "metadata": {"name": name}, "spec": wish}
    pools.api.call("PATCH", f"{OPERATIONS}/{name}?fieldManager=user", made, APPLY)
    ended = until(
        f"{name} has ended",
        lambda: (s := pools.api.get(f"{OPERATIONS}/{name}")["status"]).get("completionTime") and s,
        timeout=60,
    )
    assert ended["phase"] == "Succeeded", ended
    return ended["results"]["local"]["blocks"]


def test_numbers_and_operations_go_over_to_the_one_that_serves(pools: Pools, kubelet: Kubelet, real: RealSidecars):
    def reported() -> Any:
        node = pools.api.get(f"{POOLS}/namespaces/{SYSTEM}/kvcachenodes/chat.{A}")["status"]
        return node["blocks"], {c["type"]: c["status"] for c in node["conditions"]}["Ready"]

    real.store(A, BLOCKS)
    until("the blocks are reported of", lambda: reported() == (40, "True"), timeout=60)
    pools.apply("chat", nodes=NODES, transport={"streams": 3})
    until("the new pod is there", lambda: places(pools) == [address(A), address(A, 1)])
    assert real.status(A)["phase"] == "Serving"
    assert verified(pools, "before") == 40
    real.start_beside(A)
    until("the new one serves", lambda: real.status(A, 1)["phase"] == "Serving", timeout=60)
    until("the old one knows", lambda: real.status(A)["phase"] == "HandedOver", timeout=60)
    until("it is reported of", lambda: reported() == (40, "True"), timeout=60)
    assert pools.until_ready("chat")["status"]["nodes"]["summary"] == "1/1"
    assert verified(pools, "between") == 40
    kubelet.unready.clear()
    until("the old pod is gone", lambda: places(pools) == [address(A, 1)])
    real.kill(A)
    assert verified(pools, "after") == 40
    assert real.loads(A, BLOCKS) == 40
    assert reported() == (40, "True")
