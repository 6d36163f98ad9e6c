"""On the cluster a tenant lets another one read its blocks: one way, from node to node, while it says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import condition, get, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.full]

BLOCKS = 16
FIRST = loadpod.fresh()
OWNER, READER = "common", "reading"


def apply_tenant(name: str, namespace: str, **sharing: Any) -> None:
    made = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCacheTenant",
        "metadata": {"name": name, "namespace": system.SYSTEM},
        "spec": {"poolRef": {"name": system.POOL}, "members": {"namespaces": [namespace]}, **sharing},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(made))


def wait_in_force(*names: str) -> None:
    def is_in_force(name: str) -> bool:
        found = get("kvt", name, "-n", system.SYSTEM)
        generation, told = found["metadata"]["generation"], condition(found, "Enforced")
        return (told.get("status"), told.get("observedGeneration")) == ("True", generation)

    for name in names:
        until(f"KVCacheTenant {name} is in force", lambda name=name: is_in_force(name), 90)  # type: ignore[misc]


@pytest.fixture
def tenants(load_pool: str) -> Iterator[None]:
    apply_tenant(OWNER, "team-a")
    apply_tenant(READER, "team-b")
    wait_in_force(OWNER, READER)
    yield
    kubectl("-n", system.SYSTEM, "delete", "kvt", OWNER, READER, "--wait=true", "--timeout=60s")


def test_what_a_tenant_lets_another_read_is_found_from_node_to_node_and_only_while_it_does(
    tenants: None, load_pod: Callable[..., loadpod.LoadPod]
):
    here, there = system.workers()[:2]
    # both take the same bytes for right: whatever the reader finds is checked against what the owner stored
    owner = load_pod("owner", here, tenant="common")
    reader = load_pod("reader", there, namespace="team-b", tenant="common")
    until("the owner has its blocks", lambda: owner.put(FIRST, BLOCKS) and hits(owner, FIRST) == BLOCKS, 60)
    assert reader.get(FIRST, BLOCKS)["outcome"] == {"absent": BLOCKS}, "without a word nothing is shared"

    apply_tenant(OWNER, "team-a", sharing={"readers": [READER]})
    wait_in_force(OWNER, READER)
    assert get("kvt", READER, "-n", system.SYSTEM)["status"]["readsFrom"] == [OWNER]
    until("the reader finds the owner's blocks", lambda: hits(reader, FIRST) == BLOCKS, 60)
    print(f"the reader on the other node: {reader.get(FIRST, BLOCKS)['outcome']}")

    mine = FIRST + 1000
    until("the reader has blocks of its own", lambda: reader.put(mine, BLOCKS) and hits(reader, mine) == BLOCKS, 60)
    assert owner.get(mine, BLOCKS)["outcome"] == {"absent": BLOCKS}, "one way only"

    apply_tenant(OWNER, "team-a")
    wait_in_force(OWNER, READER)
    until(
        "the reader finds nothing any more",
        lambda: reader.get(FIRST, BLOCKS)["outcome"] == {"absent": BLOCKS} and reader.connected(),
        60,
    )
    assert hits(owner, FIRST) == hits(reader, mine) == BLOCKS, "its own are each one's still"


def hits(pod: loadpod.LoadPod, first: int) -> int:
    found: int = pod.get(first, BLOCKS)["hits"]
    return found
