"""Admission control: bounds the bytes of blocks in flight and queues requests fairly between tenants.

A drive serves eight readers as fast as a hundred and sixty, and each of the eight finishes far sooner. So a request
acquires a grant before it gets descriptors. When the queue is full the request waits; when it would wait too long it is
rejected immediately, because an early miss is worth more than a late block.

Reads, writes and transfers to peers have a queue each, so none waits for another. Every request of a client also takes
a place in a queue of block ids, because processor time is shared by all tenants, too. The order within a queue is
start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): every request gets a tag, the tenant's bytes so far, and the
smallest tag is admitted first. One tenant holds at most three quarters of a queue, so it cannot block the others.

Grants expire: a holder that exceeds the expected transfer time loses its grant; the transfer itself continues.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.resilience.turn import end_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["FairQueue", "FairQueues", "Grant", "RequestQueue"]

MIB = 1 << 20
READ_BYTES = 256 * MIB  # per drive: six blocks of 32 MiB for one tenant, eight for several
WRITE_BYTES = 256 * MIB
PEER_BYTES = 256 * MIB  # transfers to peers, which are the tenants of this queue
REQUEST_IDS = 8192  # large lookups of eight tenants
MAX_WAITING = 256
MAX_WAITING_PER_TENANT = 32
_LARGEST = 4  # a request counts as at most a quarter of the queue: its reader reads only a few blocks at a time
_TENANT_SHARE = 0.75
_GRACE_S, _SLOWEST = 0.1, 50e6  # a grant expires after these seconds plus its bytes at this rate
_SHORT_GRACE_S, _SHORT_SLOWEST = 0.002, 500e6  # for holders that do not notify
_TURN_S = 0.5  # a request that computes longer, or waits for a drive, loses its turn
_SAMPLES = 8  # grants that must have ended in one congestion before its rate is used


class Grant:
    """Permission to transfer `size` bytes, until it is released or expires."""

    __slots__ = ("cost", "ended", "since", "size", "tenant", "until")

    def __init__(self, tenant: Hashable, size: int, cost: int, now: float, expiry_s: float) -> None:
        self.tenant = tenant
        self.size = size
        self.cost = cost
        self.since = now
        self.until = now + expiry_s
        self.ended = False


class _Waiter:
    __slots__ = ("grant", "size", "tag", "tenant", "woken")

    def __init__(self, tenant: Hashable, size: int, tag: float) -> None:
        self.tenant = tenant
        self.size = size
        self.tag = tag
        self.woken = threading.Event()
        self.grant: Grant | None = None


class _Account:
    """State of one tenant while it has grants or waiting requests."""

    __slots__ = ("held", "tag", "waiting")

    def __init__(self, tag: float) -> None:
        self.tag = tag
        self.held = 0
        self.waiting = 0


class FairQueue:
    """Bounded, fair between tenants. Thread-safe; only `acquire` may wait."""

    largest = _LARGEST
    tenant_share = _TENANT_SHARE

    def __init__(
        self,
        limit: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_per_tenant: int = MAX_WAITING_PER_TENANT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._max_waiting = max_waiting
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[Hashable, _Account] = {}
        self._grants: set[Grant] = set()
        self._waiters: list[_Waiter] = []
        self._held = 0
        self._virtual_time = 0.0  # tag of the request that was admitted last
        self._congestion: list[float] = [0.0, 0.0, 0.0]  # start of the congestion; grants and bytes that ended since

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiters)

    @property
    def held_bytes(self) -> int:
        """Bytes of the active grants; a large request counts as a quarter of the queue."""
        return self._held

    def acquire(self, tenant: Hashable, size: int, deadline: float) -> Grant | None:
        """Return a grant, immediately or after a wait until `deadline`; None if the request is rejected."""
        with self._lock:
            waiter = self._enqueue(tenant, size, deadline)
            if not isinstance(waiter, _Waiter):
                return waiter
        end_turn()
        while True:
            now = self._clock()
            with self._lock:
                pause = min([deadline, *(grant.until for grant in self._grants)]) - now
            if waiter.woken.wait(max(0.0, min(pause, 1.0)) + 0.001):
                return waiter.grant
            with self._lock:
                self._admit(self._clock())
                if waiter.grant is not None:
                    return waiter.grant
                if self._clock() >= deadline:
                    self._dequeue(waiter)
                    return None

    def _enqueue(self, tenant: Hashable, size: int, deadline: float) -> Grant | _Waiter | None:
        cost = min(size, self.limit // self.largest)
        now = self._clock()
        account = self._account(tenant)
        if not self._fits(account, cost):
            self._expire(now)
            account = self._account(tenant)  # the end of its last grant may have removed it
        tag = max(self._virtual_time, account.tag)
        if not self._waiters and self._fits(account, cost):
            account.tag = tag + cost
            self._virtual_time = tag
            return self._grant(tenant, account, size, cost, now)
        if self._is_rejected(account, cost, deadline - now):
            self._drop_idle(tenant, account)
            return None
        waiter = _Waiter(tenant, size, tag)
        account.tag = tag + cost
        account.waiting += 1
        if not self._waiters:
            self._congestion = [now, 0.0, 0.0]
        self._waiters.append(waiter)
        self._admit(now)  # a tenant below its share does not wait for one that is above
        return waiter

    def _account(self, tenant: Hashable) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._virtual_time)
        return account

    def _is_rejected(self, account: _Account, cost: int, patience: float) -> bool:
        if len(self._waiters) >= self._max_waiting or account.waiting >= self._max_waiting_per_tenant or patience <= 0:
            return True
        since, grants, ended = self._congestion
        if not self._waiters or grants < _SAMPLES:
            return False
        rate = ended / max(self._clock() - since, 1e-6)
        tenants = len({waiter.tenant for waiter in self._waiters})
        return account.waiting * cost * tenants > rate * patience  # it would be admitted too late

    def resize(self, grant: Grant, size: int, *, notified: bool) -> None:
        """Correct the size of a request. `notified`: its holder reports when it is done."""
        cost = min(size, self.limit // self.largest)
        with self._lock:
            if grant.ended:
                return
            account = self._accounts[grant.tenant]
            more = cost - grant.cost
            grant.size, grant.cost = size, cost
            account.held += more
            account.tag += more
            self._held += more
            grace, slowest = (_GRACE_S, _SLOWEST) if notified else (_SHORT_GRACE_S, _SHORT_SLOWEST)
            grant.until = grant.since + grace + cost / slowest
            if more < 0 and self._waiters:
                self._admit(self._clock())

    def release(self, grant: Grant) -> None:
        """End the grant. Idempotent."""
        with self._lock:
            if grant.ended:
                return
            self._end(grant)
            if self._waiters:
                self._admit(self._clock())

    @property
    def is_busy(self) -> bool:
        """True while the end of grants matters: requests wait, or more than half of the queue is in use."""
        return bool(self._waiters) or 2 * self._held > self.limit

    def _fits(self, account: _Account, cost: int) -> bool:
        return self._held + cost <= self.limit and account.held + cost <= self.limit * self.tenant_share

    def _grant(self, tenant: Hashable, account: _Account, size: int, cost: int, now: float) -> Grant:
        grant = Grant(tenant, size, cost, now, self._expiry_s(cost))
        account.held += cost
        self._held += cost
        self._grants.add(grant)
        return grant

    def _expiry_s(self, cost: int) -> float:
        return _GRACE_S + cost / _SLOWEST

    def _end(self, grant: Grant) -> None:
        grant.ended = True
        self._grants.discard(grant)
        self._held -= grant.cost
        account = self._accounts[grant.tenant]
        account.held -= grant.cost
        self._congestion[1] += 1
        self._congestion[2] += grant.cost
        self._drop_idle(grant.tenant, account)

    def _expire(self, now: float) -> None:
        for grant in [grant for grant in self._grants if grant.until <= now]:
            self._end(grant)

    def _admit(self, now: float) -> None:
        self._expire(now)
        while self._waiters:
            turn = [w for w in self._waiters if self._below_share(w)]
            if not turn:
                return
            first = min(turn, key=lambda w: w.tag)
            cost = min(first.size, self.limit // self.largest)
            if self._held + cost > self.limit:
                return  # it is next: smaller requests do not overtake it
            self._waiters.remove(first)
            account = self._accounts[first.tenant]
            account.waiting -= 1
            self._virtual_time = max(self._virtual_time, first.tag)
            first.grant = self._grant(first.tenant, account, first.size, cost, now)
            first.woken.set()

    def _below_share(self, waiter: _Waiter) -> bool:
        cost = min(waiter.size, self.limit // self.largest)
        return self._accounts[waiter.tenant].held + cost <= self.limit * self.tenant_share

    def _dequeue(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        account = self._accounts[waiter.tenant]
        account.waiting -= 1
        self._drop_idle(waiter.tenant, account)

    def _drop_idle(self, tenant: Hashable, account: _Account) -> None:
        if not self._grants and not self._waiters:
            self._accounts.clear()
            self._virtual_time = 0.0
        elif not account.held and not account.waiting and account.tag <= self._virtual_time:
            del self._accounts[tenant]


class RequestQueue(FairQueue):
    """Requests by their number of block ids. One tenant computes one large request at a time, or 16 small ones.

    A grant covers a request's computation: its thread ends it before waiting (kvpool_sidecar.resilience.turn).
    """

    largest = 8
    tenant_share = 1 / 8

    def _expiry_s(self, cost: int) -> float:
        return _TURN_S


class FairQueues:
    """The queues of a node with `drives` drives."""

    def __init__(self, drives: int = 1) -> None:
        self.reads = FairQueue(READ_BYTES * drives)
        self.writes = FairQueue(WRITE_BYTES * drives)
        self.peers = FairQueue(PEER_BYTES * drives)
        self.requests = RequestQueue(REQUEST_IDS)

    def status(self) -> dict[str, dict[str, int]]:
        """For /status."""
        bytes_by_lane = {
            name: {"limit_bytes": lane.limit, "granted_bytes": lane.held_bytes, "waiting": lane.waiting}
            for name, lane in (("reads", self.reads), ("writes", self.writes), ("peers", self.peers))
        }
        requests = self.requests
        ids = {"limit_ids": requests.limit, "granted_ids": requests.held_bytes, "waiting": requests.waiting}
        return {**bytes_by_lane, "requests": ids}
