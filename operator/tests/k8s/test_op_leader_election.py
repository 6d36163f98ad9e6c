"""The Lease: one leads, a lost Lease is noticed, and who does not hold it cannot write."""

from __future__ import annotations

import asyncio

import pytest
from op_samples import MemoryCluster

from kvpool_operator.errors import ApiUnavailableError, NotLeaderError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.k8s.leader_election import LEASE_S, RENEW_DEADLINE_S, FencedClient, Lease

REF = ObjectRef("Lease", "sys", "op")
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "sys"}}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(cluster: MemoryCluster, identity: str, clock: Clock) -> Lease:
    return Lease(cluster, "sys", "op", identity, clock=clock)


async def test_the_first_one_leads_and_the_second_waits():
    cluster, clock = MemoryCluster(), Clock()
    a, b = make(cluster, "a", clock), make(cluster, "b", clock)
    await a.acquire()
    assert a.is_leader
    assert not await b._try()
    assert cluster.objects[REF]["spec"]["holderIdentity"] == "a"


async def test_a_lease_that_does_not_change_is_taken_over_after_its_time():
    cluster, clock = MemoryCluster(), Clock()
    a, b = make(cluster, "a", clock), make(cluster, "b", clock)
    await a.acquire()
    assert not await b._try()
    clock.now += LEASE_S - 1
    assert not await b._try()
    clock.now += 2
    assert await b._try()
    assert not a.is_leader
    assert b.is_leader
    assert cluster.objects[REF]["spec"]["leaseTransitions"] == 1


async def test_the_time_that_stands_in_a_lease_means_nothing():
    cluster, clock = MemoryCluster(), Clock()
    a, b = make(cluster, "a", clock), make(cluster, "b", clock)
    await a.acquire()
    cluster.objects[REF]["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await b._try()


async def test_renewing_keeps_it():
    cluster, clock = MemoryCluster(), Clock()
    a, b = make(cluster, "a", clock), make(cluster, "b", clock)
    await a.acquire()
    for _ in range(10):
        clock.now += RENEW_DEADLINE_S - 1
        assert await a._try()
        assert not await b._try()
    assert cluster.objects[REF]["spec"]["leaseTransitions"] == 0


async def test_a_leader_that_cannot_renew_gives_up_before_others_may_start():
    cluster, clock = MemoryCluster(), Clock()
    a = make(cluster, "a", clock)
    await a.acquire()
    cluster.refuse["Lease"] = ApiUnavailableError("away")
    keeping = asyncio.create_task(a.renew_loop(retry_s=0.001))
    await asyncio.sleep(0.01)
    assert not keeping.done()
    clock.now += RENEW_DEADLINE_S
    async with asyncio.timeout(2):
        await keeping
    assert RENEW_DEADLINE_S < LEASE_S


async def test_a_renewal_counts_from_its_beginning():
    cluster, clock = MemoryCluster(), Clock()
    a = make(cluster, "a", clock)
    await a.acquire()
    real = cluster.patch

    async def slow(*args: object, **kwargs: object) -> object:
        clock.now += RENEW_DEADLINE_S + 1
        return await real(*args, **kwargs)  # type: ignore[arg-type]

    cluster.patch = slow  # type: ignore[method-assign,assignment]
    await a._try()
    assert not a.is_leader


async def test_of_two_who_take_over_one_loses():
    cluster, clock = MemoryCluster(), Clock()
    await make(cluster, "dead", clock).acquire()
    b, c = make(cluster, "b", clock), make(cluster, "c", clock)
    assert not await b._try()
    assert not await c._try()
    clock.now += LEASE_S + 1
    stale = await cluster.get(REF)
    assert await b._try()

    async def get(_: ObjectRef) -> object:
        return stale

    cluster.get = get  # type: ignore[method-assign,assignment]
    assert not await c._try()


async def test_a_released_lease_is_taken_at_once():
    cluster, clock = MemoryCluster(), Clock()
    a, b = make(cluster, "a", clock), make(cluster, "b", clock)
    await a.acquire()
    await a.release()
    assert not a.is_leader
    assert await b._try()


async def test_who_does_not_lead_cannot_write():
    cluster, clock = MemoryCluster(), Clock()
    lease = make(cluster, "a", clock)
    fenced = FencedClient(cluster, lease)
    await lease.acquire()
    await fenced.apply(CONFIG)
    clock.now += RENEW_DEADLINE_S
    target = ObjectRef("ConfigMap", "sys", "c")
    for write in (
        fenced.apply(CONFIG),
        fenced.create(CONFIG),
        fenced.patch(target, {}),
        fenced.delete(target),
    ):
        with pytest.raises(NotLeaderError):
            await write
    assert await fenced.get(target) is not None
    assert await fenced.list("ConfigMap") != []
