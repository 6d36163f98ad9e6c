"""The client's connections to its sidecar, and the one thread that keeps them.

Lookups, loads and stores have connections of their own, so that a lookup never waits behind a long load. The keeper
sleeps in poll(): it wakes when a connection dies, when one is given back broken, and, while one is missing, after
pauses that grow to `connect_retry_ms`. A forked child starts with none and with a keeper of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import BusyError, KVPoolError, PoolUnavailableError
from kvpool.transport.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.config import ClientConfig
    from kvpool.protocol.wire import ClientHello, ServerHello

__all__ = ["MAX_CONNECTIONS", "ConnectionPool"]

_log = logging.getLogger("kvpool")

MAX_CONNECTIONS = 8
MAX_WAITING = 1024  # for a connection of one kind; the next is turned away at once
_QUEUE_SHARE = 0.2  # of the time to the deadline may go by in this queue; the node has one, too, and reading takes time
_HELLO_TIMEOUT_S = 1.0
_FIRST_RETRY_S = 0.05  # a sidecar that hands its node to the next one is away for less than a second
_LONGEST_RETRY_S = 2.5  # a sidecar that returns is found within 5 s, whatever is configured
_TICK_S = 10.0


class _Slot:
    def __init__(self, roles: frozenset[str]) -> None:
        self.roles = roles
        self.connection: Connection | None = None
        self.busy = False
        self.tried_at = self.connected_at = float("-inf")
        self.pause_s = 0.0


class _Waiter:
    def __init__(self, role: str) -> None:
        self.role = role
        self.woken = threading.Event()
        self.slot: _Slot | None = None


def _slots(connections: int) -> list[_Slot]:
    n = min(max(connections, 1), MAX_CONNECTIONS)
    if n == 1:
        return [_Slot(frozenset({"lookup", "load", "store"}))]
    if n == 2:
        return [_Slot(frozenset({"lookup", "store"})), _Slot(frozenset({"load"}))]
    return [_Slot(frozenset({role})) for role in ["lookup", "store"] + ["load"] * (n - 2)]


class ConnectionPool:
    """Thread-safe.

    The keeper calls `on_tick` now and then while connected (and after `wake`), and `on_hello` with what the sidecar
    says of itself, before the connection is used.
    """

    def __init__(
        self,
        config: ClientConfig,
        hello: ClientHello,
        on_tick: Callable[[], None],
        on_hello: Callable[[ServerHello], None],
    ) -> None:
        self._path = config.socket
        self._hello = hello
        self._on_tick = on_tick
        self._on_hello = on_hello
        self._retry_s = min(max(config.connect_retry_ms, 10) / 1000, _LONGEST_RETRY_S)
        self._slots = _slots(config.connections)
        self._condition = threading.Condition()
        self._waiters: list[_Waiter] = []  # in the order of their arrival
        self._held_s: dict[str, float] = {}  # how long a connection of this kind is held, of late
        self._retired: list[Connection] = []
        self._closed = False
        self._tick_requested = False
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._maintainer = threading.Thread(target=self._maintain, name="kvpool-links", daemon=True)
        self._maintainer.start()

    @property
    def connected(self) -> bool:
        """True while every kind of request has a connection."""
        return all(slot.connection is not None for slot in self._slots)

    def available(self, role: str) -> bool:
        """True if there is a connection for `role` now."""
        return any(role in slot.roles and slot.connection is not None for slot in self._slots)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until `connected`; False after `timeout_s`. For tests and start-up checks, never for an engine."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self.connected:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._closed:
                    return False
                self._condition.wait(remaining)
        return True

    @contextlib.contextmanager
    def acquire(self, role: str, deadline: float) -> Iterator[Connection]:
        """A connection for one thread, first come, first served.

        PoolUnavailableError at once if there is none. Waits for one that is in use while enough of the time to
        `deadline` is left to do something with it; BusyError then, or at once if its turn cannot come so soon.
        """
        slot, connection = self._acquire_slot(role, deadline)
        began = time.monotonic()
        try:
            yield connection
        finally:
            held = time.monotonic() - began
            with self._condition:
                self._held_s[role] = (3 * self._held_s.get(role, held) + held) / 4
                if self._closed:
                    connection.close()  # no keeper is left to do it
                elif connection.broken and slot.connection is connection:
                    self._retire(slot)
                self._release(slot)

    def wake(self) -> None:
        """Have the keeper call `on_tick` soon."""
        self._tick_requested = True
        self._wake_maintainer()

    def close(self) -> None:
        """Close all; the keeper ends. Waits at most two seconds for it."""
        with self._condition:
            self._closed = True
            self._assign_to_waiters()
        self._wake_maintainer()
        if threading.current_thread() is not self._maintainer:
            self._maintainer.join(2.0)

    def abandon_in_child(self) -> None:
        """After a fork: the parent's sockets are not ours, so close our copies of them. Nothing works here any more."""
        self._closed = True
        for slot in self._slots:
            if slot.connection is not None:
                slot.connection.close()
                slot.connection = None
        for connection in self._retired:
            connection.close()
        for descriptor in (self._wake_r, self._wake_w):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_r = self._wake_w = -1
        self._condition = threading.Condition()  # another thread of the parent may have held it
        self._waiters = []

    def _acquire_slot(self, role: str, deadline: float) -> tuple[_Slot, Connection]:
        with self._condition:
            live = self._connected_slots(role)
            free = next((slot for slot in live if not slot.busy), None)
            if free is not None and not any(waiter.role == role for waiter in self._waiters):
                return self._mark_busy(free)
            max_wait = (deadline - time.monotonic()) * _QUEUE_SHARE
            self._reject_if_late(role, len(live), max_wait)
            waiter = _Waiter(role)
            self._waiters.append(waiter)
        waiter.woken.wait(max(0.0, max_wait))
        with self._condition:
            if waiter.slot is not None and waiter.slot.connection is not None:
                return waiter.slot, waiter.slot.connection
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.slot is not None:  # its connection died meanwhile
                self._release(waiter.slot)
            self._connected_slots(role)
            raise BusyError("all connections are in use", where=self._path)

    def _connected_slots(self, role: str) -> list[_Slot]:
        live = [slot for slot in self._slots if role in slot.roles and slot.connection is not None]
        if not live or self._closed:
            raise PoolUnavailableError("no connection to the sidecar", where=self._path)
        return live

    def _reject_if_late(self, role: str, lanes: int, max_wait: float) -> None:
        """By how long the last ones took: who cannot have its turn before the deadline does not wait for it."""
        ahead = sum(1 for waiter in self._waiters if waiter.role == role)
        expected = (ahead + 1) * self._held_s.get(role, 0.0) / lanes
        if ahead >= MAX_WAITING or (ahead >= lanes and expected > max_wait):
            raise BusyError("too many wait for a connection", where=self._path)

    def _mark_busy(self, slot: _Slot) -> tuple[_Slot, Connection]:
        assert slot.connection is not None  # noqa: S101
        slot.busy = True
        return slot, slot.connection

    def _release(self, slot: _Slot) -> None:
        slot.busy = False
        self._assign_to_waiters()

    def _assign_to_waiters(self) -> None:
        """Hand free connections to those who wait, in their order; nobody waits for what is not there."""
        self._condition.notify_all()
        for waiter in list(self._waiters):
            live = [slot for slot in self._slots if waiter.role in slot.roles and slot.connection is not None]
            free = next((slot for slot in live if not slot.busy), None)
            if free is not None and not self._closed:
                self._mark_busy(free)
                waiter.slot = free
            if waiter.slot is not None or not live or self._closed:
                self._waiters.remove(waiter)
                waiter.woken.set()

    def _retire(self, slot: _Slot) -> None:
        # the keeper may be polling this descriptor, so only the keeper closes it
        if slot.connection is not None:
            slot.connection.shut()
            self._retired.append(slot.connection)
            slot.connection = None
        self._wake_maintainer()

    def _wake_maintainer(self) -> None:
        with self._condition, contextlib.suppress(OSError):
            if self._wake_w >= 0:
                os.write(self._wake_w, b"w")

    def _maintain(self) -> None:
        tick_at = time.monotonic() + _TICK_S
        reported_missing = False
        while not self._closed:
            try:
                next_try = self._connect_missing()
            except Exception:  # a defect, or a path that cannot be one: look again later
                _log.exception("kvpool: connecting failed")
                next_try = time.monotonic() + self._retry_s
            missing = next_try is not None
            if missing != reported_missing:
                reported_missing = missing
                if missing:
                    _log.info("kvpool: no sidecar at %s; the engine goes on without the pool", self._path)
                else:
                    _log.info("kvpool: connected to the sidecar at %s", self._path)
            now = time.monotonic()
            if not missing and (self._tick_requested or now >= tick_at):
                self._tick_requested = False
                tick_at = now + _TICK_S
                try:
                    self._on_tick()
                except Exception:
                    _log.exception("kvpool: report failed")
            self._wait_for_event(tick_at if next_try is None else next_try)
        self._close_all()

    def _connect_missing(self) -> float | None:
        """Connect what is missing and due; when to try again, None if nothing is missing."""
        next_try = None
        for slot in self._slots:
            if slot.connection is not None or self._closed:
                continue
            now = time.monotonic()
            if now >= slot.tried_at + slot.pause_s:
                slot.tried_at = now
                try:
                    fresh = Connection(self._path, self._hello, _HELLO_TIMEOUT_S)
                except (KVPoolError, OSError) as e:
                    _log.debug("kvpool: %s", e)
                    pause_s = self._next_pause(slot.pause_s)
                    for other in self._slots:  # the same socket: the others would fare no better now
                        if other.connection is None:
                            other.tried_at, other.pause_s = now, pause_s
                else:
                    # one that is closed again and again is not asked for ever more often
                    lasted = now - slot.connected_at > self._retry_s
                    slot.connected_at, slot.pause_s = now, 0.0 if lasted else self._next_pause(slot.pause_s)
                    self._on_hello(fresh.server)
                    with self._condition:
                        slot.connection = fresh
                        self._assign_to_waiters()
                    continue
            due = slot.tried_at + slot.pause_s
            next_try = due if next_try is None else min(next_try, due)
        return next_try

    def _next_pause(self, pause_s: float) -> float:
        return min(max(2 * pause_s, _FIRST_RETRY_S), self._retry_s)

    def _wait_for_event(self, until: float) -> None:
        poller = select.poll()
        poller.register(self._wake_r, select.POLLIN)
        watched: dict[int, _Slot] = {}
        for slot in self._slots:
            connection = slot.connection
            if connection is not None and not connection.broken:
                watched[connection.fileno()] = slot
                poller.register(connection.fileno(), 0)  # hang-ups only
        for descriptor, _ in poller.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor == self._wake_r:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._wake_r, 4096):
                        pass
                continue
            slot = watched[descriptor]
            with self._condition:
                connection = slot.connection
                if connection is not None and connection.fileno() == descriptor:
                    connection.shut()  # a thread that waits for an answer on it is woken
                    if not slot.busy:
                        self._retire(slot)
                    self._assign_to_waiters()
        self._close_retired()

    def _close_retired(self) -> None:
        with self._condition:
            dead, self._retired = self._retired, []
        for connection in dead:
            connection.close()

    def _close_all(self) -> None:
        with self._condition:
            for slot in self._slots:
                if slot.connection is not None:
                    slot.connection.shut()
                    if not slot.busy:
                        self._retired.append(slot.connection)
                        slot.connection = None
        self._close_retired()
        with self._condition:
            os.close(self._wake_r)
            os.close(self._wake_w)
            self._wake_r = self._wake_w = -1
