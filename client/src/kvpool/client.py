"""The client: lookup, load and store of blocks, for any engine.

`Client` is thread-safe and synchronous. It never raises into its caller and never makes it wait past the deadline:
every failure is a miss with a reason (kvpool.stats.Reason) and a counter. Payload goes straight between the caller's
buffers and file descriptors or peer streams (kvpool.transport.transfer); the sidecar is asked for descriptors only.

Deadlines are values of time.monotonic(). Left out, they follow the pool's configuration: a lookup 20 ms, a load its
bytes over the expected bandwidth times three but at least 100 ms, a store 10 s (in the background of the engine).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sized
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from kvpool.config import ClientConfig, Deadlines
from kvpool.errors import (
    BusyError,
    ConfigError,
    DeadlineExceededError,
    PoolUnavailableError,
    ProtocolError,
    RefusedError,
)
from kvpool.protocol import block, wire
from kvpool.protocol.fingerprint_fields import field_digests
from kvpool.protocol.keys import FINGERPRINT_BYTES
from kvpool.stats import STORE, Reason, Stats
from kvpool.transport import responses as answers
from kvpool.transport import transfer
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool.transport.connection_pool import ConnectionPool
from kvpool.transport.load import LoadBatch
from kvpool.transport.store import StoreBatch, StoreOutcome
from kvpool.transport.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpool.transport.connection import Connection

    Buffer = bytes | bytearray | memoryview

__all__ = ["Client", "LoadResult", "StoreResult"]

_log = logging.getLogger("kvpool")
P = ParamSpec("P")
T = TypeVar("T")

_READERS = 8  # that wait for drives and peers; reads from memory use no more than there are processors
_WRITERS = 2
_REPORT_TIMEOUT_S = 0.5
_MAX_CORRUPT_REPORTED = 64


class LoadResult(NamedTuple):
    """Of one block. Unless `ok`, the buffer may hold garbage and must not be used; nobody writes into it any more."""

    ok: bool
    tier: wire.Tier
    reason: str  # empty if ok, else one of kvpool.stats.Reason
    bytes: int


class StoreResult(NamedTuple):
    """Of one block: `ok` if the pool has it now, `stored` if this call put it there."""

    ok: bool
    stored: bool
    reason: str  # empty if ok, else one of kvpool.stats.Reason
    bytes: int  # that this call wrote


def _total(miss: T) -> Callable[[Callable[Concatenate[Client, P], list[T]]], Callable[Concatenate[Client, P], list[T]]]:
    """Whatever arguments are given, nothing is raised: `miss` for each block."""

    def decorate(method: Callable[Concatenate[Client, P], list[T]]) -> Callable[Concatenate[Client, P], list[T]]:
        @functools.wraps(method)
        def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _log.exception("kvpool: a call failed; it counts as a miss")
                block_ids = args[0] if args else kwargs.get("block_ids")
                return [miss] * len(block_ids) if isinstance(block_ids, Sized) else []

        return call

    return decorate


class Client:
    """One tenant's view of the pool on this node.

    `fingerprint` (32 bytes, kvpool.protocol.keys.fingerprint) is of everything that changes the meaning of the
    blocks' bytes;
    `facts` may name `engine` and `model` for people. Of `meaning`, the facts behind the fingerprint, only a short
    digest of each field is told (kvpool.protocol.fingerprint_fields), so that the pool's status can name what
    differs. Starts
    without a sidecar, misses, and connects in the background when there is one. Usable in a forked child, which gets
    connections of its own. ConfigError for a fingerprint of another length; nothing else is ever raised.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        *,
        fingerprint: bytes,
        facts: Mapping[str, object] | None = None,
        meaning: Mapping[str, object] | None = None,
    ) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint: {FINGERPRINT_BYTES} bytes are needed, not {len(fingerprint)}")
        self.config = config or ClientConfig()
        self.fingerprint = fingerprint
        facts = facts or {}
        self._hello = wire.ClientHello(
            fingerprint,
            str(facts.get("engine", "")),
            str(facts.get("model", "")),
            fields=field_digests(meaning or {}),
            reads_granted=True,
        )
        self._stats = Stats()
        self._closed = False
        self._start()
        _clients.add(self)

    def _start(self) -> None:
        d = self._deadlines = self.config.deadlines
        self._forked = False
        self._lock = threading.Lock()
        self._wants_names = self._wants_salts = False
        self._stores_under_way = 0
        self._corrupt: list[bytes] = []
        self._reads = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._writes = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._readers = WorkerPool(_READERS, "kvpool-read")
        self._writers = WorkerPool(_WRITERS, "kvpool-write")
        self._links = ConnectionPool(self.config, self._hello, self.report, self._adopt)

    @_total(wire.Tier.MISS)
    def lookup(
        self, block_ids: Sequence[bytes], deadline: float | None = None, *, every: bool = False
    ) -> list[wire.Tier]:
        """Where each block is, MISS after the first miss (`every`: each is looked at). As long as `block_ids`."""
        tiers = [wire.Tier.MISS] * len(block_ids)
        if not block_ids:
            return tiers
        until = time.monotonic() + self.lookup_seconds if deadline is None else deadline
        reason = self._guarded("lookup", self._reads, lambda: self._lookup(block_ids, until, every, tiers))
        found = sum(1 for tier in tiers if tier)
        self._stats.add("lookups", "asked", len(block_ids))
        self._stats.add("lookups", "found", found)
        if reason != Reason.ABSENT:
            self._stats.add("misses", reason, len(block_ids) - found)
        return tiers

    @_total(LoadResult(False, wire.Tier.MISS, Reason.INTERNAL, 0))
    def get_into(
        self, block_ids: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None
    ) -> list[LoadResult]:
        """Read blocks into writable contiguous `buffers` of exactly their lengths; one result per block, in order.

        Returns by the deadline. A block that is not `ok` must be treated as a miss: its buffer may hold garbage.
        """
        began = time.monotonic()
        views = [_bytes_of(buffer, writable=True) for buffer in buffers]
        if len(views) != len(block_ids):
            views = [None] * len(block_ids)
        wanted = [(i, block_ids[i], view) for i, view in enumerate(views) if view is not None]
        if deadline is None:
            deadline = time.monotonic() + self.load_seconds(sum(len(view) for _, _, view in wanted))
        job = LoadBatch(deadline, self._readers, self._found_corrupt)
        reason = self._guarded("load", self._reads, lambda: self._load(job, wanted)) if wanted else Reason.ABSENT
        by_place = {load.index: load for load in job.loads}
        results = []
        counts: Counter[tuple[str, str]] = Counter()
        hits: Counter[tuple[wire.Tier, int]] = Counter()  # by tier and size, of which there are few
        seconds: dict[str, float] = {}
        for i, view in enumerate(views):
            load = by_place.get(i)
            if load is not None and load.ok:
                size = len(load.view)
                result = LoadResult(True, load.tier, "", size)
                hits[load.tier, size] += 1
                if load.done > seconds.get(name := load.tier.name.lower(), 0.0):
                    seconds[name] = load.done
            else:
                why = Reason.BUFFER if view is None else (load.reason if load else "") or reason
                result = LoadResult(False, load.tier if load else wire.Tier.MISS, why, 0)
                counts["misses", why] += 1
            results.append(result)
        for (tier, size), count in hits.items():
            counts["hits", tier.name.lower()] += count
            counts["bytes", tier.name.lower()] += count * size
        self._stats.add_all(counts, {name: done - began for name, done in seconds.items()})
        return results

    @_total(StoreResult(False, False, Reason.INTERNAL, 0))
    def put_from(
        self,
        block_ids: Sequence[bytes],
        buffers: Sequence[Buffer],
        deadline: float | None = None,
        *,
        names: Sequence[block.EngineName | None] = (),
        salts: Sequence[str | None] = (),
    ) -> list[StoreResult]:
        """Store contiguous `buffers`, which are only read; one result per block, in order.

        `names`: what the engine calls each block, for pools that publish events (docs/reference/kv-events.md);
        `salts`: what its
        request was kept apart by, for pools whose blocks can be purged by it (docs/how-to/operations.md). Either is
        left out
        if there are not as many as blocks. A salt never leaves this process: headers have a keyed tag of it.

        Call it from a background thread: it returns when all is written, at the deadline at the latest. While
        `max_inflight_stores` blocks are under way it refuses at once.
        """
        began = time.monotonic()
        views = [_bytes_of(buffer, writable=False) for buffer in buffers]
        if len(views) != len(block_ids):
            views = [None] * len(block_ids)
        wanted = [(i, block_ids[i], view) for i, view in enumerate(views) if view is not None]
        if deadline is None:
            deadline = time.monotonic() + self.store_seconds
        names = names if len(names) == len(block_ids) else ()
        job = StoreBatch(deadline, self._writers, names, salts if len(salts) == len(block_ids) else ())
        reason = Reason.BUFFER
        if wanted:
            with self._room_for_stores(len(wanted)) as room:
                reason = self._guarded("store", self._writes, lambda: self._store(job, wanted)) if room else Reason.BUSY
        results = []
        counts: Counter[tuple[str, str]] = Counter()
        for i, view in enumerate(views):
            outcome = Reason.BUFFER if view is None else job.outcome.get(i, reason)
            if view is not None and outcome == StoreOutcome.STORED:
                results.append(StoreResult(True, True, "", len(view)))
                counts["stored_bytes", outcome] += len(view)
            elif outcome == StoreOutcome.HAVE:
                results.append(StoreResult(True, False, "", 0))
            else:
                results.append(StoreResult(False, False, outcome, 0))
            counts["stores", outcome] += 1
        stored = any(result.stored for result in results)
        self._stats.add_all(counts, {STORE: time.monotonic() - began} if stored else None)
        return results

    def report(self) -> None:
        """Tell the sidecar which blocks were corrupt and what was missed, and why. It is done by itself, too."""
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        try:
            with self._links.lease("store", deadline) as connection:
                with self._lock:
                    corrupt, self._corrupt = self._corrupt, []
                message = self._stats.take_report()
                if corrupt:
                    message["corrupt"] = [block_id.hex() for block_id in corrupt]
                if message:
                    connection.request(wire.Op.REPORT, wire.pack_json(message), deadline=deadline)
        except Exception as e:
            _log.debug("kvpool: report not delivered: %s", e)

    def count_tokens(self, tokens: Mapping[str, int]) -> None:
        """Tokens that the engine need not compute, by the tier that had them: only it knows how many a block holds."""
        self._stats.add_all(Counter({("tokens", tier): n for tier, n in tokens.items()}))

    def stats(self) -> dict[str, dict[str, int]]:
        """Totals since the start: hits, bytes and tokens by tier, misses by reason, lookups, stores by outcome."""
        return self._stats.snapshot()

    def load_seconds(self, payload_bytes: int) -> float:
        """How long a load of so many bytes may take (see the module)."""
        d = self._deadlines
        return max(d.load_min_ms / 1000, 3 * payload_bytes / (max(1, d.load_expected_mb_s) * 1e6))

    @property
    def lookup_seconds(self) -> float:
        """How long a lookup may take."""
        return self._deadlines.lookup_ms / 1000

    @property
    def store_seconds(self) -> float:
        """How long a store may take."""
        return self._deadlines.store_ms / 1000

    @property
    def wants_names(self) -> bool:
        """True if the pool asks for its blocks' names in the engine: it publishes events."""
        return self._wants_names

    @property
    def wants_salts(self) -> bool:
        """True if the pool asks for the salts that its blocks' requests have."""
        return self._wants_salts

    @property
    def connected(self) -> bool:
        """True while the sidecar of this node is there."""
        return self._links.connected

    @property
    def reachable(self) -> bool:
        """True while a lookup would be sent: there is a connection and the breaker lets it."""
        self._restart_if_forked()
        return not self._closed and not self._reads.is_open and self._links.available("lookup")

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the sidecar; for tests and start-up checks, never for an engine."""
        self._restart_if_forked()
        return self._links.wait_connected(timeout_s)

    def close(self) -> None:
        """Close all connections; later calls miss. Safe to call twice."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._links.close()
            self._readers.close()
            self._writers.close()

    def _guarded(self, role: str, breaker: CircuitBreaker, work: Callable[[], str]) -> str:
        """Run `work`, which gives a reason; what it raises becomes one, and counts for the breaker."""
        if self._closed:
            return Reason.CLOSED
        self._restart_if_forked()
        if not self._links.available(role):
            return Reason.NO_SIDECAR  # known to be away: no news for the breaker
        if not breaker.allow():
            return Reason.BREAKER
        try:
            reason = work()
        except BusyError:
            return Reason.BUSY  # our own queue: no news for the breaker
        except DeadlineExceededError:
            reason = Reason.DEADLINE
        except PoolUnavailableError:
            reason = Reason.CONNECTION
        except RefusedError as e:
            _log.debug("kvpool: %s", e)
            reason = Reason.REFUSED
        except ProtocolError as e:
            _log.warning("kvpool: %s", e)
            reason = Reason.PROTOCOL
        except Exception:
            _log.exception("kvpool: a request failed; it counts as a miss")
            reason = Reason.INTERNAL
        if reason == Reason.ABSENT:
            breaker.success()
        else:
            breaker.failure()
        return reason

    def _lookup(self, block_ids: Sequence[bytes], deadline: float, every: bool, tiers: list[wire.Tier]) -> str:
        flags = wire.Flag.EVERY if every else wire.Flag.NONE
        with self._links.lease("lookup", deadline) as connection:
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
                for i, tier in enumerate(answers.lookup_tiers(reply, len(part)), start):
                    if not tier and not every:
                        return Reason.ABSENT
                    tiers[i] = wire.Tier(tier)
        return Reason.ABSENT

    def _load(self, job: LoadBatch, wanted: Sequence[answers.BlockRequest]) -> str:
        with self._links.lease("load", job.batch.deadline) as connection:
            return Reason.ABSENT if job.run(connection, self._expected(connection), wanted) else Reason.DEADLINE

    def _store(self, job: StoreBatch, wanted: Sequence[answers.BlockRequest]) -> str:
        with self._links.lease("store", job.deadline) as connection:
            return Reason.ABSENT if job.run(connection, self._expected(connection), wanted) else Reason.DEADLINE

    def _adopt(self, server: wire.ServerHello) -> None:
        """The deadlines that this sidecar asks for, from the first request on. One that was set here stays."""
        self._wants_names, self._wants_salts = server.events, bool(server.salt_key)
        mine, default = self.config.deadlines, Deadlines()
        asked = {
            f.name: server.deadlines[f.name]
            for f in fields(Deadlines)
            if f.name in server.deadlines and getattr(mine, f.name) == getattr(default, f.name)
        }
        self._deadlines = replace(mine, **asked)

    def _expected(self, connection: Connection) -> transfer.Expectation:
        server = connection.server
        return transfer.Expectation(
            self.fingerprint, server.tenant_tag, verify=block.CAN_CHECKSUM, readable=server.readable_tags
        )

    @contextlib.contextmanager
    def _room_for_stores(self, count: int) -> Iterator[bool]:
        with self._lock:
            room = self._stores_under_way < self.config.max_inflight_stores
            self._stores_under_way += count if room else 0
        try:
            yield room
        finally:
            with self._lock:
                self._stores_under_way -= count if room else 0

    def _found_corrupt(self, block_id: bytes) -> None:
        with self._lock:
            if len(self._corrupt) < _MAX_CORRUPT_REPORTED:
                self._corrupt.append(block_id)
        self._links.nudge()

    def _restart_if_forked(self) -> None:
        if self._forked and not self._closed:
            with self._lock:
                if self._forked:
                    self._start()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._stats = Stats()
        self._forked = True
        self._links.abandon_in_child()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _bytes_of(buffer: Buffer, *, writable: bool) -> memoryview | None:
    """`buffer` as flat bytes, or None if it is not contiguous or, where it must be written, read-only."""
    try:
        view = memoryview(buffer)
        flat = view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError):
        return None
    return None if writable and flat.readonly else flat
