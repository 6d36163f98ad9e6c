"""A history checker: every call of a client is recorded and held against the promise. FAULTS, invariants I1 to I4.

=====  ==============================================================================================================
I1     identity: a load that is `ok` brought exactly the bytes that were stored under that name
I2     bounded time: every call returned by its deadline, plus what the scheduler may take (below)
I3     isolation: no call ever brought a block of another tenant
I4     whatever is lost is a miss: nothing was raised, every call has one result per block
=====  ==============================================================================================================

The allowance of I2. A call may be late by a fixed 250 ms (some turns of the interpreter's lock among a hundred threads,
and copying one block), and by twice the time for which the machine woke an idle process late while the call ran
(kvpool_testing.stalls): a call needs several turns (to ask, to wait, to read) where the witness needs one. The witness
is a process of its own, so what the client does to its own process is not excused. What waits for a sidecar, a drive or
a peer is not excused either: that delays no timer. Time for which a test stopped the process on purpose is left out.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.client import Client
    from kvpool.protocol.wire import Tier
    from kvpool.results import LoadResult, StoreResult
    from kvpool_testing.stalls import Stalls

__all__ = ["ALLOWANCE_S", "BrokenPromise", "Call", "History", "RecordingClient"]

ALLOWANCE_S = 0.25
_KEPT = 20_000


class BrokenPromise(NamedTuple):
    """One violation: `invariant` is I1 to I7."""

    invariant: str
    what: str


class Call(NamedTuple):
    """One call, as it was seen from outside. Times of time.monotonic()."""

    op: str
    tenant: str
    names: tuple[bytes, ...]
    outcome: tuple[str, ...]  # of each block: a tier, a store's outcome, or the reason of a miss
    started: float
    ended: float
    deadline: float

    @property
    def late_s(self) -> float:
        return self.ended - self.deadline


class History:
    """What was stored, what came back, when. Thread-safe.

    `expected(tenant, block_id)` is asked for blocks that this history did not see being stored (another process did):
    the
    checksum of the payload (kvpool.protocol.block.checksum), or None if no one can have stored it.
    """

    def __init__(
        self,
        stalls: Stalls | None = None,
        *,
        expected: Callable[[str, bytes], bytes | None] | None = None,
        allowance_s: float = ALLOWANCE_S,
        stopped_s: Callable[[float, float], float] = lambda _started, _ended: 0.0,
    ) -> None:
        self._stalls = stalls
        self._elsewhere = expected
        self._allowance_s = allowance_s
        self._stopped_s = stopped_s  # seconds between two times for which this process was stopped on purpose
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, bytes], bytes] = {}
        self._owners: dict[bytes, str] = {}
        self.calls: collections.deque[Call] = collections.deque(maxlen=_KEPT)
        self.counts: collections.Counter[str] = collections.Counter()
        self.latest_s = 0.0  # the worst lateness that was seen, forgiven or not
        self._broken: list[BrokenPromise] = []

    def client(self, client: Client, tenant: str) -> RecordingClient:
        """The same calls, recorded."""
        return RecordingClient(self, client, tenant)

    def will_store(self, tenant: str, block_id: bytes, payload_sum: bytes) -> None:
        """From now on this block may be found with these bytes, and with no others."""
        with self._lock:
            before = self._sums.setdefault((tenant, block_id), payload_sum)
            self._owners[payload_sum] = tenant
        assert before == payload_sum, "a test stores two payloads under one name"

    def loaded(self, tenant: str, block_id: bytes, payload_sum: bytes) -> None:
        """A load says that these bytes are that block."""
        with self._lock:
            expected = self._sums.get((tenant, block_id))
            owner = self._owners.get(payload_sum)
        if expected is None and self._elsewhere is not None:
            expected = self._elsewhere(tenant, block_id)
        if payload_sum == expected:
            return
        name = block_id.hex()[:12]
        if owner is not None and owner != tenant:
            self.breaks("I3", f"{tenant} asked for {name} and got a block of another tenant")
        elif expected is None:
            self.breaks("I1", f"{tenant} got {name}, which nobody stored")
        else:
            self.breaks("I1", f"{tenant} got other bytes than were stored as {name}")

    def returned(self, call: Call) -> None:
        """A call has come back."""
        self.calls.append(call)
        with self._lock:
            self.counts[call.op] += 1
            for outcome in call.outcome:
                self.counts[f"{call.op}:{outcome}"] += 1
            self.latest_s = max(self.latest_s, call.late_s)
        if call.late_s > self._allowance_s:
            stalled = self._stalls.between(call.started, call.ended) if self._stalls else 0.0
            stopped = self._stopped_s(call.started, call.ended)
            if call.late_s > self._allowance_s + 2 * stalled + stopped:
                took, given = call.ended - call.started, call.deadline - call.started
                self.breaks(
                    "I2",
                    f"{call.op} of {len(call.names)} took {took:.3f} s of {given:.3f} s; the machine stalled "
                    f"{stalled:.3f} s; {', '.join(sorted(set(call.outcome)))}",
                )
        if len(call.outcome) != len(call.names):
            self.breaks("I4", f"{call.op} of {len(call.names)} blocks gave {len(call.outcome)} results")

    def breaks(self, invariant: str, what: str) -> None:
        """Note a violation."""
        with self._lock:
            self._broken.append(BrokenPromise(invariant, what))

    @property
    def broken(self) -> list[BrokenPromise]:
        with self._lock:
            return list(self._broken)

    def check(self) -> None:
        """AssertionError that names what was broken."""
        broken = self.broken
        assert not broken, "\n".join(f"{b.invariant}: {b.what}" for b in broken[:20])
        assert self.calls, "nothing was called: nothing was checked"


class RecordingClient:
    """kvpool.client.Client with a witness."""

    def __init__(self, history: History, client: Client, tenant: str) -> None:
        self._history = history
        self._client = client
        self.tenant = tenant

    def lookup(
        self, block_ids: Sequence[bytes], deadline: float | None = None, *, exhaustive: bool = False
    ) -> list[Tier]:
        started = time.monotonic()
        until = started + self._client.lookup_seconds if deadline is None else deadline
        tiers: list[Tier] = []
        with self._nothing_escapes("lookup"):
            tiers = self._client.lookup(block_ids, until, exhaustive=exhaustive)
        self._note("lookup", block_ids, [tier.name.lower() for tier in tiers], started, until)
        return tiers

    def get_into(
        self, block_ids: Sequence[bytes], buffers: Sequence[bytearray | memoryview], deadline: float | None = None
    ) -> list[LoadResult]:
        started = time.monotonic()
        if deadline is None:
            deadline = started + self._client.load_seconds(sum(map(len, buffers)))
        results: list[LoadResult] = []
        with self._nothing_escapes("load"):
            results = self._client.get_into(block_ids, buffers, deadline)
        outcome = [r.tier.name.lower() if r.ok else r.reason for r in results]
        self._note("load", block_ids, outcome, started, deadline)
        for block_id, buffer, result in zip(block_ids, buffers, results, strict=False):
            if result.ok:
                self._history.loaded(self.tenant, block_id, block.checksum(buffer))
        return results

    def put_from(
        self,
        block_ids: Sequence[bytes],
        buffers: Sequence[bytes | bytearray | memoryview],
        deadline: float | None = None,
    ) -> list[StoreResult]:
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            self._history.will_store(self.tenant, block_id, block.checksum(buffer))
        started = time.monotonic()
        until = started + self._client.store_seconds() if deadline is None else deadline
        results: list[StoreResult] = []
        with self._nothing_escapes("store"):
            results = self._client.put_from(block_ids, buffers, until)
        outcome = ["stored" if r.stored else "have" if r.ok else r.reason for r in results]
        self._note("store", block_ids, outcome, started, until)
        return results

    def _note(self, op: str, block_ids: Sequence[bytes], outcome: list[str], started: float, deadline: float) -> None:
        ended = time.monotonic()
        self._history.returned(Call(op, self.tenant, tuple(block_ids), tuple(outcome), started, ended, deadline))

    @contextlib.contextmanager
    def _nothing_escapes(self, op: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self._history.breaks("I4", f"{op} raised {type(e).__name__}: {e}")
