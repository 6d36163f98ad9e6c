"""Fault 17: a node dies and comes back with its old disk. Others go on; what it had is there again, nothing stale."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import loadpod
import pytest
import system
from kubectl import condition, get, items, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive]

BLOCKS = 48
FIRST = loadpod.fresh()


def docker(*args: str) -> None:
    subprocess.run(["docker", *args], check=True, capture_output=True, timeout=60)


def node_ready(node: str) -> bool:
    conditions = get("node", node)["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def test_a_killed_node_costs_nobody_else_and_comes_back_with_its_blocks(
    proxy: Proxy, load_pool: str, load_pod: Callable[..., loadpod.LoadPod]
):
    index = system.pods(f"kvpool.dev/pool={system.POOL},app.kubernetes.io/component=index")[0]
    stays = index["spec"]["nodeName"]  # so that the index is not what is tested here
    dies = next(n for n in system.workers() if n != stays)
    system.apply_pool(cache={"write": {"policy": "LocalOnly"}})  # what it has, it alone has
    survivor = load_pod("survivor", stays)
    lost = loadpod.start(proxy, "lost", namespace="team-a", node=dies, pool=load_pool)
    assert lost.put(FIRST, BLOCKS)["ok"] == BLOCKS
    until("its blocks are found from the other node", lambda: survivor.get(FIRST, BLOCKS)["hits"] == BLOCKS, 60)
    fresh = lost.put(FIRST + 1000, BLOCKS)  # these the survivor has not read yet
    assert fresh["ok"] == BLOCKS
    held = system.status(proxy, dies)["blocks"]
    survivor.order("traffic", depth=4, universe=100)

    docker("kill", dies)
    killed = time.monotonic()
    try:
        missed = survivor.get(FIRST + 1000, BLOCKS)
        assert missed["hits"] == 0, "blocks came from a node that is dead"
        until("the dead node's lease is over and it is not asked any more", lambda: _peers(proxy, stays) == 0, 60)
        again = survivor.get(FIRST + 1000, BLOCKS)
        assert set(again["outcome"]) == {"absent"}, again["outcome"]
        until("the cluster has noticed", lambda: not node_ready(dies), 120)
        until("the pool tells", lambda: system.pool()["status"]["nodes"]["ready"] == 1, 120)
        until("and the node's own object", lambda: _is_ready(dies) != "True", 60)
    finally:
        docker("start", dies)
    until("the node is back", lambda: node_ready(dies), 120)
    until("its sidecar serves", lambda: system.pod_ready(system.sidecar(dies)), 180)
    back = time.monotonic()
    until("its blocks are counted", lambda: system.status(proxy, dies)["blocks"] >= held, 60)
    until(
        "and found from the other node",
        lambda: survivor.get(FIRST + 1000, BLOCKS)["outcome"].get("peer", 0) == BLOCKS,
        60,
    )
    until("the pool is Ready again", system.settled, 120)
    print(f"dead for {back - killed:.0f} s; {held} blocks came back with the disk")
    lost.delete()
    system.apply_pool()


def _is_ready(node: str) -> str:
    """What the KVCacheNode says."""
    found = [
        n for n in items("kvn", "-n", system.SYSTEM) if (n["spec"]["pool"], n["spec"]["node"]) == (system.POOL, node)
    ]
    told: str = condition(found[0], "Ready")["status"]
    return told


def _peers(proxy: Proxy, node: str) -> int:
    peers: int = system.status(proxy, node)["index"]["peers"]
    return peers
