"""The client: lookup, load and store of blocks, for any engine.

`Client` is thread-safe and synchronous. It never raises into its caller and never blocks it past the deadline: every
failure is a miss with a reason (kvpool.stats.Reason) and a counter. Payload moves directly between the caller's buffers
and file descriptors or peer streams (kvpool.transport.transfer); the sidecar provides the descriptors only.

Deadlines are values of time.monotonic(). The defaults follow the pool's configuration: 20 ms for a lookup; for a load
three times its bytes divided by the expected bandwidth, at least 100 ms; for a store (in the engine's background) 10 s
more than that, at most one minute.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Sized
from types import MappingProxyType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from kvpool import tracing
from kvpool.break_even import BreakEven
from kvpool.config import ClientConfig
from kvpool.errors import ConfigError
from kvpool.protocol import wire
from kvpool.protocol.fingerprint_fields import field_digests
from kvpool.protocol.hint import MAX_HINT_BLOCKS, MAX_SESSION
from kvpool.protocol.keys import FINGERPRINT_BYTES
from kvpool.results import LoadResult, StoreResult, load_results, store_results
from kvpool.session import SidecarSession
from kvpool.stats import Reason
from kvpool.transport.responses import BlockRequest, LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool.protocol.block import EngineBlock
    from kvpool.protocol.hint import HintKind
    from kvpool.transport.pending import PendingRead

    Buffer = bytes | bytearray | memoryview

__all__ = ["Client"]

_log = logging.getLogger("kvpool")
_MAX_STORE_S = 60.0  # whatever its bytes: a store holds memory of the engine until it ends
P = ParamSpec("P")
T = TypeVar("T")


def _never_raises(
    miss: T,
) -> Callable[[Callable[Concatenate[Client, P], list[T]]], Callable[Concatenate[Client, P], list[T]]]:
    """Decorate a batch method: an exception, whatever the arguments, becomes `miss` for each block."""

    def decorate(method: Callable[Concatenate[Client, P], list[T]]) -> Callable[Concatenate[Client, P], list[T]]:
        @functools.wraps(method)
        def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _log.exception("kvpool: a call failed; its blocks count as misses")
                block_ids = args[0] if args else kwargs.get("block_ids")
                return [miss] * len(block_ids) if isinstance(block_ids, Sized) else []

        return call

    return decorate


class Client:
    """One tenant's access to the pool through the sidecar on this node. Thread-safe.

    Starts without a sidecar, misses, and connects in the background. Usable in a forked child, which gets its own
    connections.

    Parameters
    ----------
    config
        Socket path, number of connections and deadlines; by default those of `ClientConfig`.
    fingerprint
        32 bytes (kvpool.protocol.keys.fingerprint) over everything that changes the meaning of the blocks' bytes.
        Clients with different fingerprints never share blocks.
    labels
        `engine`, `model`, and `tested` (false: the plug-in was not tested with the engine's version), for display.
    fingerprint_inputs
        The values that the fingerprint was computed from. Only a short digest of each field is sent
        (kvpool.protocol.fingerprint_fields), so that the pool's status can name the fields that differ.
    tokens_per_block
        Tokens of one block, for the hit rate; 0 if the engine does not know. The sidecar then uses the pool's
        `cache.blockTokens`.

    Raises
    ------
    ConfigError
        For a fingerprint of another length. Nothing else is ever raised, by any method.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        *,
        fingerprint: bytes,
        labels: Mapping[str, object] = MappingProxyType({}),
        fingerprint_inputs: Mapping[str, object] | None = None,
        tokens_per_block: int = 0,
    ) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint: must have {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        self.config = config or ClientConfig()
        self.fingerprint = fingerprint
        hello = wire.ClientHello(
            fingerprint,
            str(labels.get("engine", "")),
            str(labels.get("model", "")),
            fields=field_digests(fingerprint_inputs or {}),
            reads_granted=True,
            tokens_per_block=tokens_per_block,
            lookup_reports=True,
            dials_streams=True,
            is_tested=labels.get("tested") is not False,
        )
        self._tokens_per_block = tokens_per_block
        self.break_even = BreakEven(is_enabled=self.config.break_even)
        tracing.configure()
        self._session = SidecarSession(self.config, hello)

    @_never_raises(wire.Tier.MISS)
    def lookup(
        self, block_ids: Sequence[bytes], deadline: float | None = None, *, exhaustive: bool = False
    ) -> list[wire.Tier]:
        """Return the tier of each block, as many as `block_ids` (32 bytes each, kvpool.protocol.keys.block_id).

        All blocks after the first miss are MISS, unless `exhaustive`, which checks each of them. Blocks at most until
        `deadline` (time.monotonic(), seconds); blocks that were not checked by then are MISS. A hit is not a promise:
        the block may be evicted before it is loaded. Each call counts as one lookup in the hit rate.
        """
        result = self.find(block_ids, deadline, exhaustive=exhaustive)
        self.count_lookup(len(block_ids), _found(result), result.reason)
        return result.tiers

    def find(
        self, block_ids: Sequence[bytes], deadline: float | None = None, *, exhaustive: bool = False
    ) -> LookupResult:
        """Do what `lookup` does, and return the reason of the first miss too.

        Not counted in the hit rate: the caller calls `count_lookup` once for each request of its engine.
        """
        result = LookupResult([wire.Tier.MISS] * len(block_ids), Reason.NONE)
        if not block_ids:
            return result
        until = time.monotonic() + self.lookup_seconds if deadline is None else deadline
        span = tracing.start("kvpool.lookup", len(block_ids))
        result = self._session.lookup(block_ids, until, exhaustive, result.tiers)
        if self.break_even.hold_back(result.tiers, exhaustive=exhaustive):
            result = LookupResult(result.tiers, Reason.SLOWER_THAN_COMPUTE)
        if span is not None:
            tracing.end_lookup(span, _found(result), str(result.reason))
        return result

    def count_lookup(self, asked: int, found: int, reason: Reason) -> None:
        """Count one request of the engine in the hit rate: blocks asked for, blocks found, why the next is missing."""
        self._session.stats.add_lookup(asked, found, reason)

    @_never_raises(LoadResult(False, wire.Tier.MISS, Reason.INTERNAL, 0))
    def get_into(
        self, block_ids: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None
    ) -> list[LoadResult]:
        """Load blocks into `buffers`; one result per block, in order.

        Each buffer is writable, contiguous host memory of any format and shape (it is used as flat bytes) whose length
        in bytes equals the block's payload. Blocks at most until `deadline` (time.monotonic(), seconds). A block that
        is not `ok` is a miss: its buffer may hold garbage. After the return no thread writes into any buffer.
        """
        began = time.monotonic()
        views, requests = _requests(block_ids, buffers, writable=True)
        if deadline is None:
            deadline = time.monotonic() + self.load_seconds(sum(len(request.view) for request in requests))
        span = tracing.start("kvpool.load", len(block_ids))
        batch, reason = self._session.load(requests, deadline)
        results = load_results(views, batch.loads, reason, self._session.stats, began)
        if span is not None:
            tracing.end_load(span, results, batch.loads, began)
        self._compare(batch.loads, began)
        return results

    def count_computed(self, tokens: int, seconds: float) -> None:
        """Record tokens that the engine computed, for the comparison with loads (kvpool.break_even)."""
        self.break_even.computed(tokens, seconds)
        counts = Counter({("time", "computed_tokens"): tokens, ("time", "computed_us"): int(seconds * 1e6)})
        self._session.stats.add_all(counts)

    def _compare(self, loads: Sequence[PendingRead], began: float) -> None:
        """Compare a load with computing the same tokens."""
        if not self._tokens_per_block or not loads:
            return
        ended = time.monotonic()
        blocks: Counter[wire.Tier] = Counter()
        last: dict[wire.Tier, float] = {}
        for load in loads:
            if load.ok or load.reason == Reason.DEADLINE:
                blocks[load.tier] += 1
                last[load.tier] = max(last.get(load.tier, 0.0), load.done if load.ok else ended)
        for tier, count in blocks.items():
            self.break_even.loaded(tier, count * self._tokens_per_block, last[tier] - began)
        loaded = sum(load.ok for load in loads) * self._tokens_per_block
        computing = self.break_even.compute_seconds(max(loaded, 1))
        if computing:
            saved = int(1e6 * ((computing if loaded else 0.0) - (ended - began)))
            self._session.stats.add("time", "saved_us" if saved > 0 else "lost_us", abs(saved))

    @_never_raises(StoreResult(False, False, Reason.INTERNAL, 0))
    def put_from(
        self,
        block_ids: Sequence[bytes],
        buffers: Sequence[Buffer],
        deadline: float | None = None,
        *,
        engine_blocks: Sequence[EngineBlock | None] = (),
        salts: Sequence[str | None] = (),
    ) -> list[StoreResult]:
        """Store blocks from `buffers`; one result per block, in order.

        Each buffer is contiguous host memory of any format and shape; it is only read, and must not change until the
        return. Call it from a background thread: it returns when all blocks are written, at the latest at `deadline`
        (time.monotonic(), seconds). While `max_inflight_stores` blocks are being stored it rejects (Reason.BUSY)
        immediately.

        `engine_blocks`: each block's identity in the engine, for pools that publish KV events
        (docs/reference/kv-events.md); `salts`: the cache salt of its request, for pools whose blocks can be purged by
        salt (docs/how-to/operations.md). Each has one entry per block, or is ignored. Headers have keyed tags of salts.
        """
        began = time.monotonic()
        views, requests = _requests(block_ids, buffers, writable=False)
        if deadline is None:
            deadline = time.monotonic() + self.store_seconds(sum(len(request.view) for request in requests))
        engine_blocks = engine_blocks if len(engine_blocks) == len(block_ids) else ()
        salts = salts if len(salts) == len(block_ids) else ()
        span = tracing.start("kvpool.store", len(block_ids))
        batch, reason = self._session.store(requests, deadline, engine_blocks, salts)
        results = store_results(views, batch.outcome, reason, self._session.stats, time.monotonic() - began)
        if span is not None:
            tracing.end_store(span, results)
        return results

    def hint(self, kind: HintKind, session: str, seconds: int = 0, block_ids: Sequence[bytes] = ()) -> bool:
        """Send what a session expects of its blocks (kvpool.protocol.hint); False if it was not sent.

        `session`: its name, at most MAX_SESSION characters, which never leaves this process. `block_ids`: those of the
        session in the prompt's order, at most MAX_HINT_BLOCKS; empty: those that the sidecar knows. Call it from a
        background thread, after the blocks were stored: it may wait `store_seconds` for a connection. No reply.
        """
        deadline = time.monotonic() + self.store_seconds()
        return self._session.hint(kind, session[:MAX_SESSION], seconds, block_ids[:MAX_HINT_BLOCKS], deadline)

    def report(self) -> None:
        """Report corrupt blocks and the growth of the counters to the sidecar. Also called periodically."""
        self._session.report()

    def count_tokens(self, tokens: Mapping[str, int]) -> None:
        """Add tokens that the engine did not have to compute, by tier; only the engine knows the tokens per block."""
        self._session.stats.add_all(Counter({("tokens", tier): n for tier, n in tokens.items()}))

    def stats(self) -> dict[str, dict[str, int]]:
        """Return totals: hits, bytes and tokens by tier, misses by reason, lookups, stores by outcome."""
        return self._session.stats.snapshot()

    def load_seconds(self, payload_bytes: int) -> float:
        """Return the default time limit of a load of `payload_bytes` (see the module)."""
        d = self._session.deadlines
        return max(d.load_min_ms / 1000, 3 * payload_bytes / (max(1, d.load_expected_mb_s) * 1e6))

    @property
    def lookup_seconds(self) -> float:
        """Default time limit of a lookup."""
        return self._session.deadlines.lookup_ms / 1000

    def store_seconds(self, payload_bytes: int = 0) -> float:
        """Return the default time limit of a store of `payload_bytes` (see the module)."""
        d = self._session.deadlines
        base = d.store_ms / 1000
        return max(base, min(_MAX_STORE_S, base + 3 * payload_bytes / (max(1, d.load_expected_mb_s) * 1e6)))

    @property
    def wants_engine_blocks(self) -> bool:
        """True if the pool publishes KV events and so requests each block's identity in the engine."""
        return self._session.wants_engine_blocks

    @property
    def wants_prompt_tokens(self) -> bool:
        """True if the pool publishes the token ids of this tenant's blocks and so requests them."""
        return self._session.wants_prompt_tokens

    @property
    def wants_salts(self) -> bool:
        """True if the pool requests the cache salt of each block's request."""
        return self._session.wants_salts

    @property
    def wants_hints(self) -> bool:
        """True if the sidecar accepts session hints."""
        return bool(self._session.session_key)

    @property
    def connected(self) -> bool:
        """True while there are connections to this node's sidecar."""
        return self._session.connections.connected

    @property
    def reachable(self) -> bool:
        """True while a lookup would be sent: there is a connection and the circuit breaker is not open."""
        return self._session.reachable

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False after `timeout_s`. For tests and start-up checks, never for an engine."""
        return self._session.wait_connected(timeout_s)

    def close(self) -> None:
        """Close all connections; later calls miss. Safe to call twice."""
        self._session.close()


def _requests(
    block_ids: Sequence[bytes], buffers: Sequence[Buffer], *, writable: bool
) -> tuple[list[memoryview | None], list[BlockRequest]]:
    """Return a flat view of each buffer, None for one that cannot be used, and the requests for the usable ones."""
    views = [_bytes_of(buffer, writable=writable) for buffer in buffers]
    if len(views) != len(block_ids):
        views = [None] * len(block_ids)
    return views, [BlockRequest(i, block_ids[i], view) for i, view in enumerate(views) if view is not None]


def _bytes_of(buffer: Buffer, *, writable: bool) -> memoryview | None:
    """Return `buffer` as flat bytes; None if it is not contiguous or, where it must be writable, read-only."""
    try:
        view = memoryview(buffer)
        flat = view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError):
        return None
    return None if writable and flat.readonly else flat


def _found(result: LookupResult) -> int:
    """Return the number of blocks found: all of them if there is no reason of a miss."""
    return sum(1 for tier in result.tiers if tier) if result.reason else len(result.tiers)
