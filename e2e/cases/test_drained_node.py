"""Fault 17, its first half: `kubectl drain`. The node's hot blocks move to those that stay; nothing holds it up."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import items, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.disruptive, pytest.mark.usefixtures("installed")]

HOT_MIB = int(os.environ.get("KVPOOL_E2E_HOT_MIB", "256"))
NAME = "drained"
BLOCK_BYTES = 2**20


@pytest.fixture
def key() -> Iterator[str]:
    """A pool without a shared tier: what leaves a node can go to another node alone."""
    tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{NAME}", "capacity": f"{3 * HOT_MIB}Mi"}}]
    system.apply_pool(NAME, tiers=tiers, deletionPolicy="Delete", nodes={"drain": {"bandwidth": "256Mi"}})
    yield f"{system.SYSTEM}/{NAME}"
    system.delete_pool(NAME)


def drain_of(node: str) -> dict[str, Any]:
    found = [n for n in items("kvn", "-n", system.SYSTEM) if (n["spec"]["pool"], n["spec"]["node"]) == (NAME, node)]
    told: dict[str, Any] = found[0]["status"]["drain"]
    return told


def test_a_drained_nodes_hot_blocks_are_found_after_it_is_gone(proxy: Proxy, key: str):
    leaves, stays = system.workers()[:2]
    warm = loadpod.start(proxy, "warm", namespace="team-a", node=leaves, pool=key, block_bytes=BLOCK_BYTES)
    other = loadpod.start(proxy, "other", namespace="team-a", node=stays, pool=key, block_bytes=BLOCK_BYTES)
    number = 0
    try:
        assert sum(warm.put(first, 64)["ok"] for first in range(0, HOT_MIB, 64)) == HOT_MIB
        before = sum(warm.get(first, 64)["hits"] for first in range(0, HOT_MIB, 64)) / HOT_MIB
        assert before >= 0.95
        started = time.monotonic()
        drain = ["drain", leaves, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"]
        kubectl(*drain, timeout=150)
        took = time.monotonic() - started
        until("its blocks have moved", lambda: drain_of(leaves)["state"] == "Drained", 300)
        moved, told = time.monotonic() - started, drain_of(leaves)
        pod = system.sidecar(leaves, NAME)
        number = system.main_process(leaves, pod["metadata"]["uid"], "kvpool", "serve")
        system.signal(leaves, "STOP", [number])  # as good as gone
        until("it is not asked any more", lambda: system.status(proxy, stays, NAME)["index"]["peers"] == 0, 60)
        after = sum(other.get(first, 64)["hits"] for first in range(0, HOT_MIB, 64)) / HOT_MIB
        print(f"{HOT_MIB} MiB: drained in {took:.0f} s, moved in {moved:.0f} s ({told['movedBlocks']} blocks, "
              f"{told['remainingBlocks']} remained); hit rate {before:.3f} before, {after:.3f} after")  # fmt: skip
        assert after >= 0.95 * before
        other.check()
    finally:
        if number:
            system.on_node(leaves, "kill", "-CONT", str(number), check=False)
        kubectl("uncordon", leaves)
        other.delete()
        warm.delete()
    until("the node stays after all", lambda: drain_of(leaves)["state"] == "None", 60)
