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
from kvpool.transport import responses as responses
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


def _never_raises(
    miss: T,
) -> Callable[[Callable[Concatenate[Client, P], list[T]]], Callable[Concatenate[Client, P], list[T]]]:
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
    `labels` may hold `engine` and `model`, which status and metrics display. Of `fingerprint_inputs`, the values that
    the fingerprint was computed from, only a short digest of each field is sent (kvpool.protocol.fingerprint_fields),
    so that the pool's status can name the fields that differ. The client starts without a sidecar, misses, and
    connects in the background when there is one. Usable in a forked child, which gets its own connections.
    ConfigError for a fingerprint of another length; nothing else is ever raised.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        *,
        fingerprint: bytes,
        labels: Mapping[str, object] | None = None,
        fingerprint_inputs: Mapping[str, object] | None = None,
    ) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint: {FINGERPRINT_BYTES} bytes are needed, not {len(fingerprint)}")
        self.config = config or ClientConfig()
        self.fingerprint = fingerprint
        labels = labels or {}
        self._hello = wire.ClientHello(
            fingerprint,
            str(labels.get("engine", "")),
            str(labels.get("model", "")),
            fields=field_digests(fingerprint_inputs or {}),
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
        self._wants_engine_blocks = self._wants_salts = False
        self._inflight_stores = 0
        self._corrupt: list[bytes] = []
        self._reads = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._writes = CircuitBreaker(d.breaker_failures, d.breaker_cooldown_ms / 1000)
        self._readers = WorkerPool(_READERS, "kvpool-read")
        self._writers = WorkerPool(_WRITERS, "kvpool-write")
        self._connections = ConnectionPool(self.config, self._hello, self.report, self._apply_server_hello)

    @_never_raises(wire.Tier.MISS)
    def lookup(
        self, block_ids: Sequence[bytes], deadline: float | None = None, *, exhaustive: bool = False
    ) -> list[wire.Tier]:
        """Where each block is, MISS after the first miss (`exhaustive`: each is looked at). As long as `block_ids`."""
        tiers = [wire.Tier.MISS] * len(block_ids)
        if not block_ids:
            return tiers
        until = time.monotonic() + self.lookup_seconds if deadline is None else deadline
        reason = self._run_guarded("lookup", self._reads, lambda: self._lookup(block_ids, until, exhaustive, tiers))
        found = sum(1 for tier in tiers if tier)
        self._stats.add("lookups", "asked", len(block_ids))
        self._stats.add("lookups", "found", found)
        if reason != Reason.ABSENT:
            self._stats.add("misses", reason, len(block_ids) - found)
        return tiers

    @_never_raises(LoadResult(False, wire.Tier.MISS, Reason.INTERNAL, 0))
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
        wanted = [responses.BlockRequest(i, block_ids[i], view) for i, view in enumerate(views) if view is not None]
        if deadline is None:
            deadline = time.monotonic() + self.load_seconds(sum(len(request.view) for request in wanted))
        job = LoadBatch(deadline, self._readers, self._on_corrupt)
        reason = self._run_guarded("load", self._reads, lambda: self._load(job, wanted)) if wanted else Reason.ABSENT
        by_place = {load.position: load for load in job.loads}
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

    @_never_raises(StoreResult(False, False, Reason.INTERNAL, 0))
    def put_from(
        self,
        block_ids: Sequence[bytes],
        buffers: Sequence[Buffer],
        deadline: float | None = None,
        *,
        engine_blocks: Sequence[block.EngineBlock | None] = (),
        salts: Sequence[str | None] = (),
    ) -> list[StoreResult]:
        """Store contiguous `buffers`, which are only read; one result per block, in order.

        `engine_blocks`: each block's identity in the engine, for pools that publish KV events
        (docs/reference/kv-events.md); `salts`: the cache salt of its request, for pools whose blocks can be purged by
        salt (docs/how-to/operations.md). Either is ignored unless it has one entry per block. A salt never leaves this
        process: headers hold a keyed tag of it.

        Call it from a background thread: it returns when all is written, at the deadline at the latest. While
        `max_inflight_stores` blocks are under way it refuses at once.
        """
        began = time.monotonic()
        views = [_bytes_of(buffer, writable=False) for buffer in buffers]
        if len(views) != len(block_ids):
            views = [None] * len(block_ids)
        wanted = [responses.BlockRequest(i, block_ids[i], view) for i, view in enumerate(views) if view is not None]
        if deadline is None:
            deadline = time.monotonic() + self.store_seconds
        engine_blocks = engine_blocks if len(engine_blocks) == len(block_ids) else ()
        job = StoreBatch(deadline, self._writers, engine_blocks, salts if len(salts) == len(block_ids) else ())
        reason = Reason.BUFFER
        if wanted:
            with self._reserve_stores(len(wanted)) as room:
                reason = (
                    self._run_guarded("store", self._writes, lambda: self._store(job, wanted)) if room else Reason.BUSY
                )
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
            with self._connections.acquire("store", deadline) as connection:
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
    def wants_engine_blocks(self) -> bool:
        """True if the pool publishes KV events and so requests each block's identity in the engine."""
        return self._wants_engine_blocks

    @property
    def wants_salts(self) -> bool:
        """True if the pool requests the cache salt of each block's request."""
        return self._wants_salts

    @property
    def connected(self) -> bool:
        """True while the sidecar of this node is there."""
        return self._connections.connected

    @property
    def reachable(self) -> bool:
        """True while a lookup would be sent: there is a connection and the breaker lets it."""
        self._restart_if_forked()
        return not self._closed and not self._reads.is_open and self._connections.available("lookup")

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the sidecar; for tests and start-up checks, never for an engine."""
        self._restart_if_forked()
        return self._connections.wait_connected(timeout_s)

    def close(self) -> None:
        """Close all connections; later calls miss. Safe to call twice."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._connections.close()
            self._readers.close()
            self._writers.close()

    def _run_guarded(self, role: str, breaker: CircuitBreaker, work: Callable[[], str]) -> str:
        """Run `work`, which gives a reason; what it raises becomes one, and counts for the breaker."""
        if self._closed:
            return Reason.CLOSED
        self._restart_if_forked()
        if not self._connections.available(role):
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

    def _lookup(self, block_ids: Sequence[bytes], deadline: float, exhaustive: bool, tiers: list[wire.Tier]) -> str:
        flags = wire.Flag.EXHAUSTIVE if exhaustive else wire.Flag.NONE
        with self._connections.acquire("lookup", deadline) as connection:
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
                for i, tier in enumerate(responses.lookup_tiers(reply, len(part)), start):
                    if not tier and not exhaustive:
                        return Reason.ABSENT
                    tiers[i] = wire.Tier(tier)
        return Reason.ABSENT

    def _load(self, job: LoadBatch, wanted: Sequence[responses.BlockRequest]) -> str:
        with self._connections.acquire("load", job.batch.deadline) as connection:
            return Reason.ABSENT if job.run(connection, self._expectation(connection), wanted) else Reason.DEADLINE

    def _store(self, job: StoreBatch, wanted: Sequence[responses.BlockRequest]) -> str:
        with self._connections.acquire("store", job.deadline) as connection:
            return Reason.ABSENT if job.run(connection, self._expectation(connection), wanted) else Reason.DEADLINE

    def _apply_server_hello(self, server: wire.ServerHello) -> None:
        """The deadlines that this sidecar asks for, from the first request on. One that was set here stays."""
        self._wants_engine_blocks, self._wants_salts = server.events, bool(server.salt_key)
        mine, default = self.config.deadlines, Deadlines()
        asked = {
            f.name: server.deadlines[f.name]
            for f in fields(Deadlines)
            if f.name in server.deadlines and getattr(mine, f.name) == getattr(default, f.name)
        }
        self._deadlines = replace(mine, **asked)

    def _expectation(self, connection: Connection) -> transfer.Expectation:
        server = connection.server
        return transfer.Expectation(
            self.fingerprint, server.tenant_tag, verify=block.CAN_CHECKSUM, readable=server.readable_tags
        )

    @contextlib.contextmanager
    def _reserve_stores(self, count: int) -> Iterator[bool]:
        with self._lock:
            room = self._inflight_stores < self.config.max_inflight_stores
            self._inflight_stores += count if room else 0
        try:
            yield room
        finally:
            with self._lock:
                self._inflight_stores -= count if room else 0

    def _on_corrupt(self, block_id: bytes) -> None:
        with self._lock:
            if len(self._corrupt) < _MAX_CORRUPT_REPORTED:
                self._corrupt.append(block_id)
        self._connections.wake()

    def _restart_if_forked(self) -> None:
        if self._forked and not self._closed:
            with self._lock:
                if self._forked:
                    self._start()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._stats = Stats()
        self._forked = True
        self._connections.abandon_in_child()


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
