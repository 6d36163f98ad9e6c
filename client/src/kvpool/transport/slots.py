"""Slots of a connection pool: which thread gets which connection, in order of arrival.

Lookups, loads and stores have separate connections, so that a lookup never waits behind a long load.

A burst makes hundreds of threads wait here, and all of them give up at about the same time. A thread that gives up
therefore takes no lock: if each one did, the last would return as many switches of threads later as there are waiters.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import BusyError, PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.transport.connection import Connection

__all__ = ["MAX_CONNECTIONS", "QUEUE_SHARE", "Slot", "SlotTable"]

MAX_CONNECTIONS = 8
MAX_WAITING = 16  # for a connection of one role; further requests are rejected immediately
QUEUE_SHARE = 0.2  # of the time to the deadline may pass in this queue; the node's queue and the read need the rest
_FIRST_RETRY_S = 0.05  # during a handover between sidecars the socket is away for less than a second


class Slot:
    """Place of one connection, with the backoff of its connection attempts."""

    def __init__(self, roles: frozenset[str]) -> None:
        self.roles = roles
        self.connection: Connection | None = None
        self.busy = False
        self._tried_at = self._connected_at = float("-inf")
        self._pause_s = 0.0

    @property
    def due_at(self) -> float:
        """Time of the next connection attempt (time.monotonic())."""
        return self._tried_at + self._pause_s

    def begin_attempt(self, now: float) -> None:
        self._tried_at = now

    def back_off(self, now: float, pause_s: float) -> None:
        """Delay the next attempt after a failure at `now`."""
        self._tried_at, self._pause_s = now, pause_s

    def record_connected(self, now: float, retry_s: float) -> None:
        """Reset the backoff if the last connection was stable; one that keeps breaking is retried ever more slowly."""
        was_stable = now - self._connected_at > retry_s
        self._connected_at, self._pause_s = now, 0.0 if was_stable else self.next_pause(retry_s)

    def next_pause(self, retry_s: float) -> float:
        return min(max(2 * self._pause_s, _FIRST_RETRY_S), retry_s)


class _Waiter:
    """A thread that waits for a connection. Whether it gives up or is settled is decided by the first to claim it."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.acquired: tuple[Slot, Connection] | None = None
        self._unclaimed = [True]
        self._settled = threading.Lock()
        self._settled.acquire()

    @property
    def is_waiting(self) -> bool:
        return bool(self._unclaimed)

    def claim(self) -> bool:
        """Return True to the first caller only. Takes no lock: list.pop is atomic."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def settle(self) -> None:
        """Wake the thread; only by the thread that claimed the waiter, after it set `acquired`."""
        self._settled.release()

    def wait(self, seconds: float) -> bool:
        """Wait until settled. Return False if the waiter gave up instead."""
        if self._settled.acquire(timeout=max(0.0, seconds)):
            return True
        if self.claim():
            return False
        return self._settled.acquire()  # it is just being settled


def _slots(connections: int) -> list[Slot]:
    n = min(max(connections, 1), MAX_CONNECTIONS)
    if n == 1:
        return [Slot(frozenset({"lookup", "load", "store"}))]
    if n == 2:
        return [Slot(frozenset({"lookup", "store"})), Slot(frozenset({"load"}))]
    return [Slot(frozenset({role})) for role in ["lookup", "store"] + ["load"] * (n - 2)]


class SlotTable:
    """Thread-safe. `locked` guards the slots; changes of a slot's connection are made under it.

    `on_return` is called under the lock with each slot and connection that a thread gives back.
    """

    def __init__(self, connections: int, path: str, on_return: Callable[[Slot, Connection], None]) -> None:
        self.slots = _slots(connections)
        self._condition = threading.Condition()
        self._path = path
        self._on_return = on_return
        self._returned: collections.deque[tuple[Slot, Connection, str, float]] = collections.deque()
        self._queues: dict[frozenset[str], collections.deque[_Waiter]] = {}  # by roles of a slot, in order of arrival
        self._queue_of = {
            role: self._queues.setdefault(slot.roles, collections.deque()) for slot in self.slots for role in slot.roles
        }
        self._permits = {
            role: collections.deque([None] * (MAX_WAITING + sum(role in slot.roles for slot in self.slots)))
            for role in self._queue_of
        }
        self._held_s: dict[str, float] = {}  # by role: moving average of how long a connection is held
        self._closed = False

    @property
    def connected(self) -> bool:
        """True while every role has all of its connections."""
        return all(slot.connection is not None for slot in self.slots)

    def available(self, role: str) -> bool:
        """True if there is a connection for `role`."""
        return any(role in slot.roles and slot.connection is not None for slot in self.slots)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until `connected`; False after `timeout_s`. For tests and start-up checks, never for an engine."""
        deadline = time.monotonic() + timeout_s
        with self.locked():
            while not self.connected:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._closed:
                    return False
                self._condition.wait(remaining)
        return True

    @contextlib.contextmanager
    def admitted(self, role: str) -> Iterator[None]:
        """Bound the threads that hold or wait for a connection; BusyError for one more. Takes no lock.

        Without a processor each change of the lock's owner takes tens of milliseconds: a hundred threads that wait for
        the lock would all be late.
        """
        permits = self._permits[role]
        try:
            permits.pop()
        except IndexError:
            raise BusyError("too many requests wait for a connection", where=self._path) from None
        try:
            yield
        finally:
            permits.append(None)

    def acquire(self, role: str, deadline: float) -> tuple[Slot, Connection]:
        """Acquire a slot and its connection: see ConnectionPool.acquire. Release it by `give_back`."""
        max_wait = (deadline - time.monotonic()) * QUEUE_SHARE
        if not self._condition.acquire(timeout=max(0.0, max_wait)):
            raise BusyError("the connections are in use", where=self._path)
        try:
            live = self._connected_slots(role)
            queue = self._queue_of[role]
            ahead = _waiting(queue, role)
            free = next((slot for slot in live if not slot.busy), None)
            if free is not None and not ahead:
                return self._mark_busy(free)
            self._reject_if_late(role, len(live), ahead, max_wait)
            waiter = _Waiter(role)
            queue.append(waiter)
        finally:
            self._condition.release()
            self._settle()
        if not waiter.wait(max_wait):
            raise BusyError("all connections are in use", where=self._path)
        if waiter.acquired is None:
            raise self._no_connection()
        return waiter.acquired

    @property
    def waiting(self) -> int:
        """Threads that wait for a connection."""
        with self.locked():
            return sum(waiter.is_waiting for queue in self._queues.values() for waiter in queue)

    def give_back(self, slot: Slot, connection: Connection, role: str, held_s: float) -> None:
        """Release a slot that was held for `held_s` seconds. Does not wait."""
        self._returned.append((slot, connection, role, held_s))
        self._settle()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the slots."""
        with self._condition:
            yield
        self._settle()

    def _settle(self) -> None:
        """Release what was given back. If the lock is held, its holder does it afterwards: no thread waits for it."""
        while self._returned and self._condition.acquire(blocking=False):
            try:
                slot, connection, role, held_s = self._returned.popleft()
                self._on_return(slot, connection)
                self._held_s[role] = (3 * self._held_s.get(role, held_s) + held_s) / 4
                slot.busy = False
                self.assign_to_waiters()
            except IndexError:
                pass  # another thread was faster
            finally:
                self._condition.release()

    def close(self) -> None:
        """Reject all waiters, under the lock; nothing can be acquired any more."""
        self._closed = True
        self.assign_to_waiters()

    def reset_after_fork(self) -> None:
        """Replace the condition, which another thread of the parent may have held."""
        self._closed = True
        self._condition = threading.Condition()
        for queue in self._queues.values():
            queue.clear()

    def _connected_slots(self, role: str) -> list[Slot]:
        live = [slot for slot in self.slots if role in slot.roles and slot.connection is not None]
        if not live or self._closed:
            raise self._no_connection()
        return live

    def _no_connection(self) -> PoolUnavailableError:
        return PoolUnavailableError("no connection to the sidecar", where=self._path)

    def _reject_if_late(self, role: str, lanes: int, ahead: int, max_wait: float) -> None:
        """Reject a request whose turn, judged by recent hold times, cannot come in time."""
        expected = (ahead + 1) * self._held_s.get(role, 0.0) / lanes
        if ahead >= MAX_WAITING or (ahead >= lanes and expected > max_wait):
            raise BusyError("the queue for a connection is too long", where=self._path)

    def _mark_busy(self, slot: Slot) -> tuple[Slot, Connection]:
        assert slot.connection is not None  # noqa: S101
        slot.busy = True
        return slot, slot.connection

    def assign_to_waiters(self) -> None:
        """Assign free connections to waiters in order; release waiters whose role has no connection left."""
        self._condition.notify_all()
        for roles, queue in self._queues.items():
            while queue:
                live = [slot for slot in self.slots if slot.roles == roles and slot.connection is not None]
                free = next((slot for slot in live if not slot.busy), None)
                if free is None and live and not self._closed:
                    break
                waiter = queue.popleft()
                if not waiter.claim():
                    continue  # it gave up
                if free is not None and not self._closed:
                    waiter.acquired = self._mark_busy(free)
                waiter.settle()


def _waiting(queue: collections.deque[_Waiter], role: str) -> int:
    """Return how many threads wait for a connection of `role`, under the lock. Forget those that gave up."""
    while queue and not queue[0].is_waiting:
        queue.popleft()
    if len(queue) >= MAX_WAITING:  # the first one has a late deadline: those behind it may have given up
        kept = [waiter for waiter in queue if waiter.is_waiting]
        queue.clear()
        queue.extend(kept)
    return sum(waiter.role == role and waiter.is_waiting for waiter in queue)
