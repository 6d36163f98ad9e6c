"""Fault 27, its second half: on the cluster, namespace B cannot read, list, time or evict namespace A's blocks.

Both pods run the same program and ask for the same names; only the socket that the node put into each pod differs.
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

import loadpod
import pytest
import system
from kubectl import kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full]

BLOCKS = 32
FIRST = loadpod.fresh()


def test_another_namespace_gets_a_miss_for_each_block_and_learns_nothing_from_it(
    proxy: Proxy, load_pod: Callable[..., loadpod.LoadPod]
):
    node = system.workers()[0]
    a, b = load_pod("a", node), load_pod("b", node, namespace="team-b")
    assert a.put(FIRST, BLOCKS)["ok"] == BLOCKS
    until("A has its blocks", lambda: a.get(FIRST, BLOCKS)["hits"] == BLOCKS, 30)

    # read: the same names, from the same node, one by one and all at once
    assert b.get(FIRST, BLOCKS)["outcome"] == {"absent": BLOCKS}
    assert b.order("lookup", first=FIRST, count=BLOCKS)["outcome"] == {"miss": BLOCKS}

    # time: blocks that A has and blocks that nobody has, in turn, so that the machine's load meets both alike
    there: list[float] = []
    nowhere: list[float] = []
    for _ in range(20):
        there += b.order("lookup", first=FIRST, count=1, times=25)["seconds"]
        nowhere += b.order("lookup", first=FIRST + 1000, count=1, times=25)["seconds"]
    hers = a.order("lookup", first=FIRST, count=1, times=100)["seconds"]
    told = {k: round(1e6 * statistics.median(v)) for k, v in (("A's", there), ("nobody's", nowhere), ("A asks", hers))}
    print(f"median microseconds of B's lookups: {told}")
    # the same path: which of two samples is the larger is a coin's throw, not a rule
    larger = sum(x > y for x, y in zip(there, nowhere, strict=True)) / len(there)
    assert 0.3 < larger < 0.7, f"B can tell A's blocks from nobody's by time: {larger:.2f}, {told}"

    # what B stores under the same names is B's
    assert b.put(FIRST, BLOCKS)["outcome"].get("stored") == BLOCKS
    assert a.get(FIRST, BLOCKS)["hits"] == b.get(FIRST, BLOCKS)["hits"] == BLOCKS


def test_what_a_sidecar_tells_of_itself_names_no_tenant(proxy: Proxy, load_pod: Callable[..., loadpod.LoadPod]):
    node = system.workers()[0]
    a = load_pod("a", node)
    assert a.put(FIRST, 4)["ok"] == 4
    pod = system.sidecar(node)["metadata"]["name"]
    for page in ("/status", "/metrics"):
        told = proxy.request(system.SYSTEM, pod, system.HTTP_PORT, page, timeout=15)
        assert "team-a" not in told, page


def test_a_namespace_that_the_pool_does_not_admit_gets_no_socket(proxy: Proxy, load_pool: str):

    system.label("team-c", {"pod-security.kubernetes.io/enforce": "restricted"})
    node = system.workers()[0]
    made = loadpod.manifest("c", namespace="team-c", node=node, pool=load_pool)
    # as if the webhook had been deceived: everything that an injected pod has, by hand
    made["metadata"]["labels"].pop("kvpool.dev/inject")
    loadpod.bring_program("team-c")
    shown = kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(made))
    assert "kvpool.dev/injected" not in json.loads(shown)["metadata"]["annotations"]
    made["metadata"]["labels"]["kvpool.dev/inject"] = "true"
    shown = kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(made))
    assert "namespace-not-allowed" in json.loads(shown)["metadata"]["annotations"]["kvpool.dev/skip-reason"]
