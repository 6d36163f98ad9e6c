"""The loop: every pool gets its pass, one pool's trouble is its own, and a lost Lease ends everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest
from op_samples import MemoryCluster, pool_manifest

from kvpool_operator.errors import ApiUnavailableError, NotLeaderError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.runtime.controller import Controller, ControllerOptions
from kvpool_operator.runtime.metrics import OperatorMetrics, serve_admin
from kvpool_operator.runtime.reconciler import Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

KEY = ("kvpool-system", "chat")


class Passes:
    """A reconciler that does what a test says."""

    def __init__(self, *results: Result | Exception) -> None:
        self.results = list(results)
        self.seen: list[tuple[str, str]] = []

    async def reconcile(self, namespace: str, name: str) -> Result:
        self.seen.append((namespace, name))
        result = self.results.pop(0) if self.results else Result()
        if isinstance(result, Exception):
            raise result
        return result


def controller(passes: Passes, cluster: MemoryCluster | None = None) -> tuple[Controller, OperatorMetrics]:
    metrics = OperatorMetrics()
    made = Controller(cluster or MemoryCluster(), passes, metrics, ControllerOptions(0.02))  # type: ignore[arg-type]
    return made, metrics


@contextlib.asynccontextmanager
async def running(*parts: object) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.ensure_future(p) for p in parts]  # type: ignore[call-overload]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not probe():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.005)


async def test_a_changed_pool_gets_a_pass():
    passes = Passes()
    loop, _ = controller(passes)
    async with running(loop.work()):
        loop.enqueue(*KEY)
        await until(lambda: passes.seen == [KEY])


async def test_an_unfinished_pass_is_followed_by_another():
    passes = Passes(Result(requeue_after_s=0.01), Result(requeue_after_s=0.01))
    loop, _ = controller(passes)
    async with running(loop.work()):
        loop.enqueue(*KEY)
        await until(lambda: len(passes.seen) == 3)


@pytest.mark.parametrize("error", [ApiUnavailableError("503"), RuntimeError("a bug")])
async def test_a_failed_pass_is_repeated_and_the_worker_lives(error: Exception, caplog: pytest.LogCaptureFixture):
    passes = Passes(error)
    loop, metrics = controller(passes)
    async with running(loop.work()):
        loop.enqueue(*KEY)
        await until(lambda: len(passes.seen) == 2)
    assert "retrying in" in caplog.text
    failed = "ApiUnavailable" if isinstance(error, ApiUnavailableError) else "Bug"
    assert metrics.reconciles.labels("kvcachepool", failed)._value.get() == 1


async def test_a_lost_lease_ends_the_worker():
    loop, _ = controller(Passes(NotLeaderError("lost")))
    async with running(loop.work()) as (worker,):
        loop.enqueue(*KEY)
        with pytest.raises(NotLeaderError):
            await worker


async def test_every_pool_is_looked_at_without_any_event():
    passes, cluster = Passes(), MemoryCluster()
    cluster.put(pool_manifest())
    loop, _ = controller(passes, cluster)
    assert loop.seconds_since_list == float("inf")
    async with running(loop.resync_loop(), loop.work(), loop.work()):
        await until(lambda: passes.seen.count(KEY) >= 3)
    assert loop.seconds_since_list < 5


async def test_a_list_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture):
    passes, cluster = Passes(), MemoryCluster()
    cluster.put(pool_manifest())
    real, failures = cluster.list, [ApiUnavailableError("503")]

    async def unreliable(kind: str, **kwargs: object) -> object:
        if failures:
            raise failures.pop()
        return await real(kind, **kwargs)  # type: ignore[arg-type]

    cluster.list = unreliable  # type: ignore[method-assign,assignment]
    loop, _ = controller(passes, cluster)
    async with running(loop.resync_loop(), loop.work()):
        await until(lambda: KEY in passes.seen)
    assert "cannot be listed" in caplog.text


async def test_probes_and_metrics():
    metrics, wrong = OperatorMetrics(), [""]
    metrics.pools.set(7)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    async with serve_admin("127.0.0.1", port, metrics, lambda: wrong[0]), aiohttp.ClientSession() as session:
        async with session.get(f"{base}/readyz") as answer:
            assert answer.status == 200
        wrong[0] = "deaf"
        async with session.get(f"{base}/healthz") as answer:
            assert (answer.status, await answer.text()) == (503, "deaf\n")
        async with session.get(f"{base}/metrics") as answer:
            assert "kvpool_operator_pools 7.0" in await answer.text()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_process_that_sees_nothing_any_more_says_so_to_its_probe():
    cluster, clock = MemoryCluster(), Clock()
    cluster.put(pool_manifest())
    loop = Controller(cluster, Passes(), OperatorMetrics(), ControllerOptions(0.02), clock=clock)  # type: ignore[arg-type]
    assert loop.health_problem == "", "nothing was listed yet: that may take as long as the API server is away"
    version = cluster.objects[ObjectRef("KVCachePool", *KEY)]["metadata"]["resourceVersion"]
    loop.observe_event(KEY, version)
    async with running(loop.resync_loop()):
        await until(lambda: loop.seconds_since_list == 0)
        cluster.put(pool_manifest())  # and the watch does not tell
        await until(
            lambda: (
                loop.watch_staleness.stale_seconds == 0
                and clock.now == 0
                and loop.watch_staleness._stale_since is not None
            )
        )
        clock.now = 179.0
        assert loop.health_problem == ""
        clock.now = 181.0
        assert loop.health_problem == "the watch of KVCachePools has missed changes for 181 s"
        loop.observe_event(KEY, cluster.objects[ObjectRef("KVCachePool", *KEY)]["metadata"]["resourceVersion"])
        await until(lambda: loop.health_problem == "")
    clock.now += 301.0
    assert "not listed for" in loop.health_problem
