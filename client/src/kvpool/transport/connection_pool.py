"""Connection pool of a client, and the thread that maintains it.

The maintainer sleeps in poll(): it wakes when a connection dies, when a broken one is released, and, while one is
missing, after pauses that grow to `connect_retry_ms`. A forked child starts with no connection and its own maintainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.transport.connection import Connection
from kvpool.transport.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.config import ClientConfig
    from kvpool.protocol.wire import ClientHello, ServerHello
    from kvpool.transport.slots import Slot

__all__ = ["ConnectionPool"]

_log = logging.getLogger("kvpool")

_HELLO_TIMEOUT_S = 1.0
_LONGEST_RETRY_S = 2.5  # a sidecar that returns is found within 5 s, whatever the configuration
_TICK_S = 2.0


class _WakePipe:
    """Wakes a thread that sleeps in poll(). Not thread-safe: its owner's lock serializes `wake` and `close`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            if self._write >= 0:
                os.write(self._write, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = -1


class ConnectionPool:
    """Thread-safe.

    The maintainer calls `on_tick` every 2 s while connected, also after `wake` and after it has connected, and
    `on_hello` with the sidecar's HELLO before a connection is used.
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
        self._slots = SlotTable(config.connections, config.socket, self._on_return)
        self._retired: list[Connection] = []
        self._closed = False
        self._tick_requested = False
        self._reported: type[Exception] | None = None  # kind of connection failure that was logged in this outage
        self._wake_pipe = _WakePipe()
        self._maintainer = threading.Thread(target=self._maintain, name="kvpool-connections", daemon=True)
        self._maintainer.start()

    @property
    def connected(self) -> bool:
        """True while every role has all of its connections."""
        return self._slots.connected

    def available(self, role: str) -> bool:
        """True if there is a connection for `role`."""
        return self._slots.available(role)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until `connected`; False after `timeout_s`. For tests and start-up checks, never for an engine."""
        return self._slots.wait_connected(timeout_s)

    @contextlib.contextmanager
    def acquire(self, role: str, deadline: float) -> Iterator[Connection]:
        """Acquire a connection for one thread, in order of arrival.

        Raises PoolUnavailableError immediately if there is none. Waits for a busy one for at most a fifth of the time
        to `deadline`, then raises BusyError; immediately if the queue is too long for that.
        """
        with self._slots.admitted(role):
            slot, connection = self._slots.acquire(role, deadline)
            began = time.monotonic()
            try:
                yield connection
            finally:
                self._slots.give_back(slot, connection, role, time.monotonic() - began)

    def _on_return(self, slot: Slot, connection: Connection) -> None:
        if self._closed:
            connection.close()  # the maintainer has ended
        elif connection.broken and slot.connection is connection:
            self._retire(slot)

    def wake(self) -> None:
        """Request a call of `on_tick` by the maintainer."""
        self._tick_requested = True
        self._wake_maintainer()

    def close(self) -> None:
        """Close all connections. Waits at most two seconds for the maintainer to end."""
        with self._slots.locked():
            self._closed = True
            self._slots.close()
        self._wake_maintainer()
        if threading.current_thread() is not self._maintainer:
            self._maintainer.join(2.0)

    def abandon_in_child(self) -> None:
        """After a fork: close the child's copies of the parent's sockets. This pool is unusable afterwards."""
        self._closed = True
        for slot in self._slots.slots:
            if slot.connection is not None:
                slot.connection.close_copies()
                slot.connection = None
        for connection in self._retired:
            connection.close_copies()
        self._wake_pipe.close()
        self._slots.reset_after_fork()

    def _retire(self, slot: Slot) -> None:
        # the maintainer may be polling this descriptor, so only the maintainer closes it
        if slot.connection is not None:
            slot.connection.shut()
            self._retired.append(slot.connection)
            slot.connection = None
        self._wake_maintainer()

    def _wake_maintainer(self) -> None:
        with self._slots.locked():
            self._wake_pipe.wake()

    def _maintain(self) -> None:
        tick_at = time.monotonic() + _TICK_S
        was_complete: bool | None = None
        while not self._closed:
            try:
                next_try = self._connect_missing()
            except Exception:  # a defect, or a path that cannot be one: retry later
                _log.exception("kvpool: connecting failed; retrying")
                next_try = time.monotonic() + self._retry_s
            is_complete = next_try is None
            if is_complete and not was_complete:
                self._reported = None
                _log.info("kvpool: connected to the sidecar at %s", self._path)
            was_complete = is_complete
            now = time.monotonic()
            if is_complete and (self._tick_requested or now >= tick_at):
                self._tick_requested = False
                tick_at = now + _TICK_S
                try:
                    self._on_tick()
                except Exception:
                    _log.exception("kvpool: report failed")
            self._wait_for_event(tick_at if next_try is None else next_try)
        self._close_all()

    def _connect_missing(self) -> float | None:
        """Open connections that are missing and due. Return when to try again, None if none is missing."""
        next_try = None
        for slot in self._slots.slots:
            if slot.connection is not None or self._closed:
                continue
            now = time.monotonic()
            if now >= slot.due_at:
                slot.begin_attempt(now)
                try:
                    connection = Connection(self._path, self._hello, _HELLO_TIMEOUT_S)
                except (KVPoolError, OSError) as e:
                    self._report_failure(e)
                    pause_s = slot.next_pause(self._retry_s)
                    for other in self._slots.slots:  # the same socket: other attempts would fail as well now
                        if other.connection is None:
                            other.back_off(now, pause_s)
                else:
                    slot.record_connected(now, self._retry_s)
                    self._on_hello(connection.server)
                    with self._slots.locked():
                        slot.connection = connection
                        self._slots.assign_to_waiters()
                    self._tick_requested = True
                    continue
            next_try = slot.due_at if next_try is None else min(next_try, slot.due_at)
        return next_try

    def _report_failure(self, error: Exception) -> None:
        """Log the cause as a warning once per outage and kind of error, else at DEBUG."""
        if type(error) is self._reported:
            _log.debug("kvpool: %s", error)
            return
        self._reported = type(error)
        _log.warning(
            "kvpool: cannot connect to the sidecar of this node: %s. The engine runs without the pool; retrying every "
            "%.1f s.",
            error,
            self._retry_s,
        )

    def _wait_for_event(self, until: float) -> None:
        """Sleep until `until`, a wake-up, or the loss of a connection; close retired connections."""
        poller = select.poll()
        poller.register(self._wake_pipe, select.POLLIN)
        watched: dict[int, Slot] = {}
        for slot in self._slots.slots:
            connection = slot.connection
            if connection is not None and not connection.broken:
                watched[connection.fileno()] = slot
                poller.register(connection.fileno(), 0)  # hang-ups only
        for descriptor, _ in poller.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor in watched:
                self._on_hang_up(watched[descriptor], descriptor)
            else:
                self._wake_pipe.drain()
        self._close_retired()

    def _on_hang_up(self, slot: Slot, descriptor: int) -> None:
        with self._slots.locked():
            connection = slot.connection
            if connection is not None and connection.fileno() == descriptor:
                connection.shut()  # wakes a thread that waits for a reply on it
                if not slot.busy:
                    self._retire(slot)
                self._slots.assign_to_waiters()

    def _close_retired(self) -> None:
        with self._slots.locked():
            retired, self._retired = self._retired, []
        for connection in retired:
            connection.close()

    def _close_all(self) -> None:
        with self._slots.locked():
            for slot in self._slots.slots:
                if slot.connection is not None:
                    slot.connection.shut()
                    if not slot.busy:
                        self._retired.append(slot.connection)
                        slot.connection = None
        self._close_retired()
        with self._slots.locked():
            self._wake_pipe.close()
