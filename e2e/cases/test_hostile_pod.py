"""A hostile pod beside an honest one on the same node, and its accomplice on the other: the honest one keeps its hits.

KVPOOL_E2E_HOSTILE_S is how long they run together; `make e2e-full` takes ten minutes.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import apply, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full]

BESIDE_S = float(os.environ.get("KVPOOL_E2E_HOSTILE_S", "30"))
ALONE_S = min(BESIDE_S, 60.0)
BLOCKS = 256
FIRST = loadpod.fresh()
NAMES = ("hostile-a", "hostile-b")


@pytest.fixture
def hostile(load_pool: str) -> Iterator[Callable[[], None]]:
    """Starts a hostile pod of another namespace on each node."""

    def start() -> None:
        loadpod.bring_program("team-b")
        settings = {"neighbor_first": FIRST, "neighbor_bytes": loadpod.BLOCK_BYTES}
        for name, node in zip(NAMES, system.workers(), strict=False):
            made = loadpod.manifest(
                name, namespace="team-b", node=node, pool=load_pool, settings=settings, program="hostile.py"
            )
            apply(json.dumps(made))

    yield start
    for name in NAMES:
        kubectl("-n", "team-b", "delete", "pod", name, "--wait=true", "--timeout=60s", "--ignore-not-found")


def attacked(proxy: Proxy, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(proxy.request("team-b", name, loadpod.PORT, "/report", timeout=30))
    return report


def rate(pod: loadpod.LoadPod, seconds: float) -> float:
    """Hit rate of reads of all blocks, over and over, for so long."""
    asked = hits = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or not asked:
        hits += pod.get(FIRST, BLOCKS)["hits"]
        asked += BLOCKS
    return hits / asked


def test_an_honest_pod_keeps_its_blocks_and_its_hit_rate_beside_a_hostile_one(
    proxy: Proxy, load_pod: Callable[..., loadpod.LoadPod], hostile: Callable[[], None]
):
    node = system.workers()[0]
    honest = load_pod("honest", node)
    assert honest.put(FIRST, BLOCKS)["ok"] == BLOCKS
    until("all blocks are stored", lambda: honest.get(FIRST, BLOCKS)["hits"] == BLOCKS, 60)
    restarts = system.sidecar(node)["status"]["containerStatuses"]
    alone = rate(honest, ALONE_S)

    hostile()
    ran = ("flood", "unfinished", "descriptors", "packets", "churn", "spoiled blocks", "neighbors_blocks")
    for name in NAMES:
        until(f"{name} attacks", lambda name=name: all(attacked(proxy, name)["counts"].get(a) for a in ran), 180)
    beside = rate(honest, BESIDE_S)
    reports = {name: attacked(proxy, name) for name in NAMES}
    print(f"hit rate alone {alone:.4f}, beside {beside:.4f}; {reports}; {honest.report()}")
    assert all(report["crossed"] == 0 for report in reports.values())
    assert alone > 0.99
    assert beside >= 0.95 * alone

    for name in NAMES:
        kubectl("-n", "team-b", "delete", "pod", name, "--wait=true", "--timeout=60s")
    until("every block is still there", lambda: honest.get(FIRST, BLOCKS)["outcome"] == {"local": BLOCKS}, 60)
    assert [s["restartCount"] for s in system.sidecar(node)["status"]["containerStatuses"]] == [
        s["restartCount"] for s in restarts
    ]
