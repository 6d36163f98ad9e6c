"""Session of a client with the sidecar of its node: connections, circuit breakers, worker threads, pool settings.

Each request runs under a guard that turns every error into a Reason. A forked child starts a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from kvpool.config import Deadlines
from kvpool.errors import BusyError, DeadlineExceededError, PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import block, wire
from kvpool.protocol.hint import Hint, session_digest, session_tag
from kvpool.stats import Reason, Stats
from kvpool.transport import descriptor_closer
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool.transport.connection_pool import ConnectionPool
from kvpool.transport.deadline_margin import DeadlineMargin
from kvpool.transport.hot_blocks import HotBlocks
from kvpool.transport.load import LoadBatch
from kvpool.transport.local_lookups import LocalLookups
from kvpool.transport.pending import Expectation
from kvpool.transport.piece_size import PieceSize
from kvpool.transport.responses import LookupResult, lookup_tiers, miss_reason
from kvpool.transport.slots import QUEUE_SHARE
from kvpool.transport.store import StoreBatch
from kvpool.transport.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.config import ClientConfig
    from kvpool.protocol.hint import HintKind
    from kvpool.transport.connection import Connection
    from kvpool.transport.responses import BlockRequest

__all__ = ["SidecarSession"]

_log = logging.getLogger("kvpool")

_READERS = 8  # threads that wait for drives and peers; cached reads use at most one thread per processor
_WRITERS = 2
_REPORT_TIMEOUT_S = 0.5
_MAX_CORRUPT_REPORTED = 64


class SidecarSession:
    """Thread-safe; no method raises. `stats` and `deadlines` are current values: read them for each use."""

    def __init__(self, config: ClientConfig, hello: wire.ClientHello) -> None:
        self.config = config
        self.stats = Stats()
        self._hello = hello
        self._closed = False
        self._start()
        _sessions.add(self)

    def _start(self) -> None:
        d = self.deadlines = self.config.deadlines
        self._forked = False
        self._lock = threading.Lock()
        self.wants_engine_blocks = self.wants_prompt_tokens = self.wants_salts = False
        self.session_key = b""  # for tags of sessions; empty: the sidecar accepts no hints
        self._inflight_stores = 0
        self._corrupt: list[bytes] = []
        self._reads = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._writes = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._lookup_margin, self._load_margin = DeadlineMargin(), DeadlineMargin()
        self._pieces = PieceSize()
        self._local = LocalLookups()
        self._hot = HotBlocks(self._local)
        self._readers = WorkerPool(_READERS, "kvpool-read")
        self._writers = WorkerPool(_WRITERS, "kvpool-write")
        self._started = threading.Event()
        self.connections = ConnectionPool(self.config, self._hello, self._tick, self._apply_server_hello)
        self._started.set()

    @property
    def reachable(self) -> bool:
        """True while a lookup would be sent: there is a connection and the circuit breaker is not open."""
        self._restart_if_forked()
        return not self._closed and not self._reads.is_open and self.connections.available("lookup")

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False after `timeout_s`."""
        self._restart_if_forked()
        return self.connections.wait_connected(timeout_s)

    def lookup(
        self, block_ids: Sequence[bytes], deadline: float, exhaustive: bool, tiers: list[wire.Tier]
    ) -> LookupResult:
        """Look up blocks and write their tiers into `tiers`, which is returned with the reason of the first miss.

        Sends no message if the sidecar's block table has all of them.
        """
        if self.reachable and self._local.has_all(block_ids, self.connections):
            return LookupResult([wire.Tier.LOCAL] * len(block_ids), Reason.NONE)
        given: list[Reason] = []  # by the sidecar
        began, until = time.monotonic(), self._lookup_margin.usable(deadline)
        if until is None:
            return LookupResult(tiers, Reason.BUSY)
        failure = self._run_guarded(
            "lookup", self._reads, lambda: self._lookup(block_ids, until, exhaustive, tiers, given)
        )
        self._lookup_margin.note(_due(failure, began, until))
        if wire.Tier.MISS not in tiers:
            return LookupResult(tiers, Reason.NONE)
        return LookupResult(tiers, failure if failure != Reason.ABSENT or not given else given[0])

    def load(self, requests: Sequence[BlockRequest], deadline: float) -> tuple[LoadBatch, Reason]:
        """Load blocks. Return the batch and the reason for blocks that it does not hold."""
        began, until = time.monotonic(), self._load_margin.usable(deadline)
        batch = LoadBatch(until or deadline, self._readers, self._on_corrupt, self._pieces)
        if until is None or not descriptor_closer.has_room():
            return batch, Reason.BUSY  # calls return late; a mount hangs in close(2): accept no more of its files
        reason = Reason.DEADLINE  # of all that `batch` does not hold, if anything is missing
        moment = self._hot.moment() if self.reachable else None
        try:
            if rest := self._hot.load(batch, requests, moment, self.connections):
                reason = self._run_guarded("load", self._reads, lambda: self._load(batch, rest))
        finally:
            self._hot.keep(batch.take_kept(), moment, self.connections)
        self._load_margin.note(_due(reason, began, until))
        return batch, reason

    def store(
        self,
        requests: Sequence[BlockRequest],
        deadline: float,
        engine_blocks: Sequence[block.EngineBlock | None],
        salts: Sequence[str | None],
    ) -> tuple[StoreBatch, Reason]:
        """Store blocks. Return the batch and the reason for blocks without an outcome."""
        batch = StoreBatch(deadline, self._writers, engine_blocks, salts)
        if not requests:
            return batch, Reason.BUFFER
        with self._reserve_stores(len(requests)) as reserved:
            if not reserved:
                return batch, Reason.BUSY
            return batch, self._run_guarded("store", self._writes, lambda: self._store(batch, requests))

    def report(self) -> None:
        """Report corrupt blocks and the growth of the counters to the sidecar. Also called periodically."""
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        try:
            with self.connections.acquire("store", deadline) as connection:
                with self._lock:
                    corrupt, self._corrupt = self._corrupt, []
                message = self.stats.take_report()
                if corrupt:
                    message["corrupt"] = [block_id.hex() for block_id in corrupt]
                if message:
                    connection.request(wire.Op.REPORT, wire.pack_json(message), deadline=deadline)
        except Exception as e:
            _log.debug("kvpool: report not delivered: %s", e)

    def _tick(self) -> None:
        self._started.wait()  # the thread of `connections` may be faster than its constructor
        self._local.renew(self.connections)
        self.report()

    def hint(self, kind: HintKind, session: str, seconds: int, block_ids: Sequence[bytes], deadline: float) -> bool:
        """Send a hint; False if the sidecar accepts none, or it could not be sent by `deadline`."""
        if self._closed or self._forked or not self.session_key:
            return False
        try:
            with self.connections.acquire("store", deadline) as connection:
                key = connection.server.session_key  # of this connection's sidecar: another build may accept no hints
                if not key:
                    return False
                hint = Hint(kind, session_tag(key, session_digest(session)), seconds, tuple(block_ids))
                return connection.notify(wire.Op.HINT, hint.pack(), count=len(hint.block_ids))
        except Exception as e:
            _log.debug("kvpool: hint not delivered: %s", e)
            return False

    def close(self) -> None:
        """Report what was counted, then close all connections; later requests miss. Safe to call twice."""
        if not self._closed and not self._forked and self.connections.connected:
            self.report()
        self._closed = True
        with contextlib.suppress(Exception):
            for part in (self._local, self._hot, self.connections, self._readers, self._writers):
                part.close()

    def _run_guarded(self, role: str, breaker: CircuitBreaker, work: Callable[[], Reason]) -> Reason:
        """Run `work` and return its reason; an exception becomes a reason and counts as a failure for the breaker."""
        if self._closed:
            return Reason.CLOSED
        self._restart_if_forked()
        if not self.connections.available(role):
            return Reason.NO_SIDECAR  # known before the call: not counted by the breaker
        if not breaker.allow():
            return Reason.BREAKER
        try:
            reason = work()
        except BusyError:
            return Reason.BUSY  # local queue full: not counted by the breaker
        except Exception as e:
            reason = _reason_of(e)
        if reason == Reason.ABSENT:
            breaker.success()
        else:
            breaker.failure()
        return reason

    def _lookup(
        self,
        block_ids: Sequence[bytes],
        deadline: float,
        exhaustive: bool,
        tiers: list[wire.Tier],
        reasons: list[Reason],
    ) -> Reason:
        flags = wire.Flag.EXHAUSTIVE if exhaustive else wire.Flag.NONE
        with self.connections.acquire("lookup", deadline) as connection:
            for start in range(0, len(block_ids), wire.MAX_LOOKUP):
                part = block_ids[start : start + wire.MAX_LOOKUP]
                reply = connection.request(
                    wire.Op.LOOKUP,
                    wire.pack_deadline(deadline) + b"".join(part),
                    count=len(part),
                    flags=flags,
                    deadline=deadline,
                    abandonable=True,
                )
                found, cause = lookup_tiers(reply, len(part))
                if cause is not None:
                    reasons.append(miss_reason(cause))
                for i, tier in enumerate(found, start):
                    if not tier and not exhaustive:
                        return Reason.ABSENT
                    tiers[i] = wire.Tier(tier)
        return Reason.ABSENT

    def _load(self, batch: LoadBatch, requests: Sequence[BlockRequest]) -> Reason:
        with self.connections.acquire("load", batch.batch.deadline) as connection:
            in_time = batch.run(connection, self._expectation(connection), requests)
        self._local.forget(load.block_id for load in batch.loads if not load.ok)
        return Reason.ABSENT if in_time else Reason.DEADLINE

    def _store(self, batch: StoreBatch, requests: Sequence[BlockRequest]) -> Reason:
        with self.connections.acquire("store", batch.deadline) as connection:
            return Reason.ABSENT if batch.run(connection, self._expectation(connection), requests) else Reason.DEADLINE

    def _apply_server_hello(self, server: wire.ServerHello) -> None:
        """Apply the pool's deadlines from the first request on; a deadline set in the client's configuration wins."""
        self.wants_engine_blocks, self.wants_salts = server.events, bool(server.salt_key)
        self.wants_prompt_tokens = server.prompt_tokens
        self.session_key = server.session_key
        self._hot.reset(has_tables=server.block_tables, accepts_reports=server.load_reports)
        own, default = self.config.deadlines, Deadlines()
        requested = {
            f.name: server.deadlines[f.name]
            for f in fields(Deadlines)
            if f.name in server.deadlines and getattr(own, f.name) == getattr(default, f.name)
        }
        self.deadlines = replace(own, **requested)

    def _expectation(self, connection: Connection) -> Expectation:
        server = connection.server
        return Expectation(
            self._hello.fingerprint, server.tenant_tag, verify=block.CAN_CHECKSUM, readable=server.readable_tags
        )

    @contextlib.contextmanager
    def _reserve_stores(self, count: int) -> Iterator[bool]:
        with self._lock:
            reserved = self._inflight_stores < self.config.max_inflight_stores
            self._inflight_stores += count if reserved else 0
        try:
            yield reserved
        finally:
            with self._lock:
                self._inflight_stores -= count if reserved else 0

    def _on_corrupt(self, block_id: bytes) -> None:
        with self._lock:
            if len(self._corrupt) < _MAX_CORRUPT_REPORTED:
                self._corrupt.append(block_id)
        self.connections.wake()

    def _restart_if_forked(self) -> None:
        if self._forked and not self._closed:
            with self._lock:
                if self._forked:
                    self._start()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self.stats = Stats()
        self._forked = True
        self._hot.close_copies()
        self.connections.abandon_in_child()


def _reason_of(error: Exception) -> Reason:
    """Return the reason of a request that failed, and log what an operator should see."""
    if isinstance(error, DeadlineExceededError):
        return Reason.DEADLINE
    if isinstance(error, PoolUnavailableError):
        return Reason.CONNECTION
    if isinstance(error, RefusedError):
        _log.debug("kvpool: %s", error)
        return Reason.REFUSED
    if isinstance(error, ProtocolError):
        _log.warning("kvpool: %s", error)
        return Reason.PROTOCOL
    _log.error("kvpool: a request failed; its blocks count as misses", exc_info=error)
    return Reason.INTERNAL


def _due(reason: Reason, began: float, until: float) -> float:
    """Return when a call that ended for `reason` was to end at the latest: one that waited for a connection, early.

    A call that began after its deadline was to end immediately.
    """
    return max(began, began + QUEUE_SHARE * (until - began) if reason == Reason.BUSY else until)


_sessions: weakref.WeakSet[SidecarSession] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
