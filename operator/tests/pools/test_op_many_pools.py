"""Many pools: what a user waits for goes first, nothing is forgotten, and the API server sees a bounded rate."""

from __future__ import annotations

import asyncio

import pytest
from op_samples import MemoryCluster, pool_manifest

from kvpool_operator.api.v1alpha1 import Metadata
from kvpool_operator.errors import ApiUnavailableError, OperatorError, RejectedError
from kvpool_operator.k8s import rate_limiter as pace_module
from kvpool_operator.k8s.client import KINDS, Manifest
from kvpool_operator.k8s.rate_limiter import IS_FOREGROUND, RateLimiter
from kvpool_operator.pools.apply import apply_plan
from kvpool_operator.pools.plan import Apply, Plan
from kvpool_operator.runtime import controller as module
from kvpool_operator.runtime.controller import Controller, ControllerOptions
from kvpool_operator.runtime.metrics import OperatorMetrics
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.runtime.workqueue import WorkQueue

MINE = ("team", "mine")


def others(count: int) -> list[tuple[str, str]]:
    return [("team", f"other-{n:03d}") for n in range(count)]


async def taken(queue: WorkQueue, count: int) -> list[tuple[str, str]]:
    found = []
    for _ in range(count):
        found.append(await asyncio.wait_for(queue.get(), 5))
        queue.done(found[-1])
    return found


async def test_what_somebody_waits_for_goes_before_what_was_there_first():
    queue = WorkQueue()
    for key in others(100):
        queue.add(key, background=True)
    queue.add(MINE)
    assert (await taken(queue, 1)) == [MINE]


async def test_the_background_gets_its_turn_however_much_is_waited_for():
    queue = WorkQueue()
    queue.add(MINE, background=True)
    for key in others(100):
        queue.add(key)
    assert MINE in await taken(queue, WorkQueue.FAIRNESS)


async def test_the_background_never_has_all_workers():
    """However long its passes take, a worker is free for what somebody comes to wait for."""
    queue = WorkQueue(background=2)
    for key in others(10):
        queue.add(key, background=True)
    first = [await asyncio.wait_for(queue.get(), 5) for _ in range(2)]
    waiting = [asyncio.ensure_future(queue.get()) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(w.done() for w in waiting)
    queue.add(MINE)
    async with asyncio.timeout(5):
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [w.result() for w in waiting if w.done()] == [MINE]
    queue.done(first[0])
    async with asyncio.timeout(5):
        assert MINE in await asyncio.gather(*waiting)
    assert len(queue) == 7


async def test_a_key_of_the_background_that_somebody_comes_to_wait_for_is_taken_once_and_first():
    queue = WorkQueue()
    for key in [*others(5), MINE]:
        queue.add(key, background=True)
    queue.add(MINE)
    assert len(queue) == 6
    found = await taken(queue, 6)
    assert found[0] == MINE
    assert sorted(found) == sorted([*others(5), MINE])
    assert len(queue) == 0


async def test_a_key_keeps_its_lane_while_it_is_worked_on():
    queue = WorkQueue()
    queue.add(MINE)
    assert await queue.get() == MINE
    queue.add(MINE)
    for key in others(10):
        queue.add(key, background=True)
    queue.done(MINE)
    assert await asyncio.wait_for(queue.get(), 5) == MINE


class Noted:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def reconcile(self, namespace: str, name: str) -> Result:
        self.seen.append((namespace, name))
        return Result()


async def test_pools_that_are_known_are_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RESYNC_PER_POOL_S", 30.0)
    cluster, passes = MemoryCluster(), Noted()
    for n in range(20):
        made = pool_manifest()
        made["metadata"]["name"] = f"pool-{n:02d}"
        cluster.put(made)
    loop = Controller(cluster, passes, OperatorMetrics(), ControllerOptions(1.0))  # type: ignore[arg-type]
    refreshing = [asyncio.ensure_future(t) for t in (loop.resync_loop(), loop.work())]
    try:
        async with asyncio.timeout(10):
            while len(passes.seen) < 20:  # the first listing: all of them at once  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            refreshing[0].cancel()
            again = asyncio.ensure_future(loop.resync_loop())
            refreshing.append(again)
            while len(passes.seen) < 21:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(loop.queue) == 19  # the others wait for their moment, half a minute apart
        loop.enqueue(*passes.seen[5])
        async with asyncio.timeout(10):
            while len(passes.seen) < 22:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert passes.seen[21] == passes.seen[5]
    finally:
        for task in refreshing:
            task.cancel()
        await asyncio.gather(*refreshing, return_exceptions=True)


async def test_a_pace_lets_a_burst_through_and_then_keeps_its_rate():
    loop = asyncio.get_running_loop()
    pace, started = RateLimiter(per_second=50, burst=10), loop.time()
    for _ in range(10):
        await pace.acquire()
    assert loop.time() - started < 1 / 50 * 10  # without a wait, or a slow machine took as long as all of them
    await asyncio.gather(*(pace.acquire() for _ in range(20)))
    assert loop.time() - started >= 20 / 50 - 0.01


async def test_what_nobody_waits_for_takes_the_turns_that_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace_module, "MAX_BACKGROUND_DELAY_S", 60.0)
    pace, order = RateLimiter(per_second=100, burst=1), []

    async def ask(name: str, waited: bool) -> None:
        IS_FOREGROUND.set(lambda: waited)
        await pace.acquire()
        order.append(name)

    await pace.acquire()
    background = [asyncio.create_task(ask("background", False)) for _ in range(5)]
    await asyncio.sleep(0)
    waited = [asyncio.create_task(ask("waited for", True)) for _ in range(20)]
    async with asyncio.timeout(20):
        await asyncio.gather(*background, *waited)
    assert order[:20].count("background") <= 1
    assert len(order) == 25


async def test_what_nobody_waits_for_gets_its_turn_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace_module, "MAX_BACKGROUND_DELAY_S", 0.2)
    pace = RateLimiter(per_second=20, burst=1)
    for _ in range(40):  # two seconds of turns are taken
        asyncio.create_task(pace.acquire())  # noqa: RUF006
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    IS_FOREGROUND.set(lambda: False)
    await asyncio.wait_for(pace.acquire(), 20)
    assert loop.time() - started < 20


async def test_what_somebody_comes_to_wait_for_is_the_background_no_longer():
    queue = WorkQueue(background=1)
    queue.add(MINE, background=True)
    queue.add(("team", "other"), background=True)
    assert await queue.get() == MINE
    assert queue.is_background(MINE)
    queue.add(MINE)
    assert not queue.is_background(MINE)
    assert await asyncio.wait_for(queue.get(), 5) == ("team", "other")
    queue.done(MINE)
    assert await asyncio.wait_for(queue.get(), 5) == MINE


def test_a_pace_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="rate"):
        RateLimiter(0, 1)


class Slow(MemoryCluster):
    """Notes what is written at the same time as what; refuses what it is told to, after a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[str] = []
        self.together: list[frozenset[str]] = []
        self.ended: list[str] = []
        self.failing: dict[str, OperatorError] = {}

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        kind = manifest["kind"]
        self.writing.append(kind)
        self.together.append(frozenset(self.writing))
        await asyncio.sleep(0.01)
        self.writing.remove(kind)
        self.ended.append(kind)
        if kind in self.failing:
            raise self.failing[kind]
        return await super().apply(manifest, subresource=subresource)


def a_plan() -> Plan:
    kinds = ("ServiceAccount", "ConfigMap", "Service", "StatefulSet", "DaemonSet")
    made = [{"apiVersion": KINDS[k].api_version, "kind": k, "metadata": {"name": "x", "namespace": "n"}} for k in kinds]
    return Plan(tuple(Apply(m) for m in made))


META = Metadata.model_validate(pool_manifest()["metadata"])


async def test_what_does_not_rely_on_each_other_is_written_together():
    cluster = Slow()
    outcome = await apply_plan(a_plan(), META, cluster)
    assert frozenset({"ServiceAccount", "ConfigMap", "Service"}) in cluster.together
    assert [w for w in cluster.together if w & {"StatefulSet", "DaemonSet"}] == [{"StatefulSet"}, {"DaemonSet"}]
    assert cluster.ended[-2:] == ["StatefulSet", "DaemonSet"]
    assert [r.kind for r in outcome.applied] == ["ServiceAccount", "ConfigMap", "Service", "StatefulSet", "DaemonSet"]


async def test_a_pass_that_fails_leaves_nothing_under_way_and_begins_nothing_more():
    cluster = Slow()
    cluster.failing["ServiceAccount"] = ApiUnavailableError("503")
    with pytest.raises(ApiUnavailableError):
        await apply_plan(a_plan(), META, cluster)
    assert sorted(cluster.ended) == ["ConfigMap", "Service", "ServiceAccount"]
    assert cluster.writing == []


async def test_what_is_refused_is_told_and_keeps_nothing_else_back():
    cluster = Slow()
    cluster.failing["ConfigMap"] = RejectedError("not allowed", 403)
    outcome = await apply_plan(a_plan(), META, cluster)
    assert outcome.rejections == ("not allowed",)
    assert [r.kind for r in outcome.applied] == ["ServiceAccount", "Service", "StatefulSet", "DaemonSet"]
