"""An operator behind an API server that errs, refuses, forgets, loses watches or falls silent: it always converges."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from api import MERGE, Api, until
from conftest import SYSTEM, Operator, Pools, remove_all_pools
from faulty_api import FaultyApi, watches, writes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kubelet import SidecarDouble

pytestmark = pytest.mark.cluster

CONFIG = f"/api/v1/namespaces/{SYSTEM}/configmaps/chat-config"


@pytest.fixture
def faulty(rights: Path, tmp_path: Path) -> Iterator[FaultyApi]:
    with FaultyApi(rights, tmp_path) as faulty:
        yield faulty


@pytest.fixture
def world(
    no_operator: None, faulty: FaultyApi, sidecars: dict[str, SidecarDouble], api: Api, tmp_path: Path
) -> Iterator[tuple[Pools, Operator]]:
    """One operator, behind the proxy, with a look at all pools every second."""
    with Operator(faulty.kubeconfig, tmp_path / "log", "behind", max_concurrent_reconciles="2") as operator:
        until("it leads", lambda: "leading as behind" in operator.log.read_text())
        yield Pools(api), operator
        faulty.heal()
        remove_all_pools(api)
    assert "Traceback" not in operator.log.read_text()


@pytest.mark.parametrize("status", [429, 500, 503, 0], ids=["429", "500", "503", "hung_up"])
def test_errors_of_the_api_server_are_waited_out_without_hammering_it(
    world: tuple[Pools, Operator], faulty: FaultyApi, status: int
):
    pools, operator = world
    fault = faulty.add(writes, status)
    pools.apply("chat")
    until("it tried some times", lambda: fault.hits >= 4)
    assert "daemonsets/chat-sidecar" not in pools.owned("chat")
    began, before = time.monotonic(), fault.hits
    time.sleep(3)
    tried, seconds = fault.hits - before, time.monotonic() - began
    assert tried <= 3 * seconds, "tries come with growing pauses, and with the refresh of every second"
    faulty.heal()
    pools.until_ready("chat")
    assert operator.process.poll() is None
    assert operator.metric("kvpool_operator_reconcile_total") > operator.metric("kvpool_operator_pools") == 1


def test_reads_that_fail_keep_nothing_from_converging(world: tuple[Pools, Operator], faulty: FaultyApi):
    pools, _ = world
    pools.apply("chat")
    pools.until_ready("chat")
    fault = faulty.add(lambda method, path: method == "GET" and "watch=true" not in path and "/leases" not in path, 500)
    pools.api.delete(CONFIG)
    until("it tried", lambda: fault.hits >= 4)
    assert pools.api.get(CONFIG) is None
    faulty.heal()
    until("it is repaired", lambda: pools.api.get(CONFIG))


def test_conflicts_are_tried_again_with_what_is_there_then(world: tuple[Pools, Operator], faulty: FaultyApi):
    pools, _ = world
    on_pool = faulty.add(lambda m, p: m == "PATCH" and "/kvcachepools/chat" in p, 409, times=5)
    pools.apply("chat")
    pools.until_ready("chat")
    assert on_pool.hits == 5
    # somebody else writes the status: what the operator says stays true, and the other's word goes
    forged = {"status": {"phase": "Failed", "nodes": {"summary": "9/9"}}}
    for _ in range(3):
        pools.api.call("PATCH", f"{pools.path('chat')}/status", forged, MERGE)

    def healed() -> Any:
        status = pools.get("chat")["status"]
        return (status["phase"], status["nodes"]["summary"]) == ("Ready", "2/2")

    until("the status is true again", healed)


def test_a_watch_that_has_expired_is_opened_anew(world: tuple[Pools, Operator], faulty: FaultyApi):
    pools, operator = world
    fault = faulty.add(watches("kvcachepools"), 410, times=3)
    faulty.quiet()  # so that the watches of before end by their silence at the latest
    pools.apply("chat")
    pools.until_ready("chat")
    pools.apply("chat", cleanupTimeout="2m")
    pools.until_ready("chat")
    assert operator.process.poll() is None
    assert fault.hits <= 3


def test_a_watch_that_dies_silently_is_opened_anew_and_meanwhile_the_refresh_sees_the_changes(
    no_operator: None, faulty: FaultyApi, sidecars: dict[str, SidecarDouble], api: Api, tmp_path: Path
):
    """Without the refresh (once in ten minutes) only watches tell of changes; one that says nothing for 4 s is dead."""
    pools = Pools(api)
    with Operator(
        faulty.kubeconfig, tmp_path / "log", "quiet", resync_period="600", watch_idle_timeout="4"
    ) as operator:
        until("it leads", lambda: "leading as quiet" in operator.log.read_text())
        pools.apply("chat")
        until("it sees the pool", lambda: "daemonsets/chat-sidecar" in pools.owned("chat"))
        faulty.quiet()
        watched = sum("watch=true" in path for _, path in faulty.requests)
        pools.apply("chat", cache={"eviction": {"highWatermark": 91}})
        until("watches are opened again", lambda: sum("watch=true" in p for _, p in faulty.requests) > watched)
        until("the change was seen", lambda: '"high_watermark": 91' in pools.api.get(CONFIG)["data"]["pool.json"])
        remove_all_pools(api)


def test_a_watch_that_stays_deaf_shows_and_changes_are_seen_all_the_same(
    world: tuple[Pools, Operator], faulty: FaultyApi
):
    pools, operator = world
    pools.apply("chat")
    pools.until_ready("chat")
    assert operator.metric("kvpool_operator_watch_stale_seconds") == 0
    faulty.deaf = True
    faulty.quiet()
    pools.apply("chat", cache={"eviction": {"highWatermark": 91}})
    until("the refresh saw it", lambda: '"high_watermark": 91' in pools.api.get(CONFIG)["data"]["pool.json"])
    until("that it is deaf shows", lambda: operator.metric("kvpool_operator_watch_stale_seconds") > 1)


def test_what_changed_while_no_operator_was_there_is_made_good_when_one_is_back(pools: Pools, operator: Operator):
    pools.apply("kept")
    pools.apply("doomed")
    pools.until_ready("kept")
    pools.until_ready("doomed")
    operator.end()
    pools.apply("new")
    pools.apply("kept", cache={"eviction": {"highWatermark": 91}})
    pools.delete("doomed")
    pools.api.delete(f"/api/v1/namespaces/{SYSTEM}/services/kept-index")
    before = pools.owned("kept")["daemonsets/kept-sidecar"]["metadata"]["generation"]
    time.sleep(3)
    assert pools.get("doomed")["metadata"]["finalizers"], "its end waits for an operator"
    assert pools.owned("kept")["daemonsets/kept-sidecar"]["metadata"]["generation"] == before
    operator.ensure()
    pools.until_ready("new")
    kept = pools.until_ready("kept")
    pools.until_gone("doomed")
    until("the Service is back", lambda: "services/kept-index" in pools.owned("kept"))
    assert kept["status"]["observedGeneration"] == kept["metadata"]["generation"]
