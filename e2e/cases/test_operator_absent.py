"""Fault 7: the operator is away for long while pods come and go. The data plane and the injection do not need it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import loadpod
import pytest
import system
from kubectl import kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full]

ABSENT_S = float(os.environ.get("KVPOOL_E2E_ABSENT_S", "60"))
BLOCKS = 48


def test_while_the_operator_is_away_pods_come_and_go_and_find_their_blocks(
    proxy: Proxy, load_pod: Callable[..., loadpod.LoadPod]
):
    node_a, node_b = system.workers()[:2]
    stays = load_pod("stays", node_a)
    assert stays.put(1000, BLOCKS)["ok"] == BLOCKS
    until("its blocks can be found elsewhere", lambda: stays.get(1000, BLOCKS)["hits"] == BLOCKS, 30)
    stays.order("traffic", depth=4, universe=100)

    system.scale("kvpool-operator", 0)
    gone = time.monotonic()
    try:
        system.change(cleanup="6m")
        lost = system.sidecar(node_b)["metadata"]["name"]
        kubectl("-n", system.SYSTEM, "delete", "pod", lost, "--wait=true", "--timeout=60s")
        until("a sidecar is there again", lambda: system.pod_ready(system.sidecar(node_b)), 60)
        lives = 0
        while lives < 2 or time.monotonic() - gone < ABSENT_S:
            lives += 1
            comes = loadpod.start(
                proxy, f"comes-{lives}", namespace="team-a", node=(node_b, node_a)[lives % 2], pool=system.KEY
            )
            assert comes.annotations.get("kvpool.dev/injected")
            until("it finds what was stored before it came", lambda c=comes: c.get(1000, BLOCKS)["hits"] == BLOCKS, 30)
            comes.check()
            comes.delete()
        found = system.pool()
        assert found["status"]["observedGeneration"] < found["metadata"]["generation"]
    finally:
        kubectl("-n", system.SYSTEM, "scale", "deployment/kvpool-operator", "--replicas=2")
    until("an operator runs", lambda: any(system.pod_ready(p) for p in system.pods(system.OPERATOR)), 60, every=0.2)
    back = time.monotonic()
    until("the pool is as its spec says", system.settled, 60, every=0.2)
    print(f"away for {back - gone:.0f} s, {lives} pods came and went; converged in {time.monotonic() - back:.1f} s")
    assert time.monotonic() - back <= 30
    told = stays.check()
    assert told["counts"]["load"] > 0
