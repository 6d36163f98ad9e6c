"""A history checker: every call of a client is recorded and held against the promise. FAULTS, invariants I1 to I4.

=====  ==============================================================================================================
I1     identity: a load that is `ok` brought exactly the bytes that were stored under that name
I2     bounded time: every call returned by its deadline, plus what the scheduler may take (below)
I3     isolation: no call ever brought a block of another tenant
I4     whatever is lost is a miss: nothing was raised, every call has one result per block
=====  ==============================================================================================================

The allowance of I2. A deadline is kept by timers of this process, so a call can be late by the time for which no thread
of this process, or not this one, got a processor. `Stalls` measures that in the same process and at the same time: a
thread that asks to be woken every 20 ms and notes by how much it was late. The kernel tells how long the calling thread
itself was ready to run and did not (schedstat). A call is forgiven a fixed 250 ms (some turns of the interpreter's lock
among a hundred threads, and copying one block) and twice what was noted while it ran: it takes several turns (to ask,
to wait, to read) where the witness takes one. What waits for a sidecar, a drive or a peer is not forgiven: that stalls
no timer, and is not ready to run. On a machine with time to spare the allowance is the 250 ms.
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
    from typing import Self

    from kvpool.client import Client
    from kvpool.protocol.wire import Tier
    from kvpool.results import LoadResult, StoreResult

__all__ = ["ALLOWANCE_S", "BrokenPromise", "Call", "History", "RecordingClient", "Stalls"]

ALLOWANCE_S = 0.25
_TICK_S = 0.02
_NOTED_S = 0.002  # an idle machine wakes within a tenth of this; a hundred threads wait so long for each of their turns
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
    starved_s: float = 0.0  # its thread was ready to run, and did not

    @property
    def late_s(self) -> float:
        return self.ended - self.deadline


def starved_s() -> float:
    """How long this thread was ready to run and did not, since it began; 0 where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as told:
            return int(told.read(200).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Stalls:
    """`with Stalls() as stalls`: how late timers of this process were, and when. Thread-safe."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, float]] = collections.deque(maxlen=_KEPT)
        self._due = float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, started: float, ended: float) -> float:
        """Seconds by which timers were late in that time, together."""
        total = 0.0
        # the witness may itself not have been woken yet: so far it is late by as much
        for due, woken in [*self._seen, (self._due, time.monotonic())]:
            total += max(0.0, min(woken, ended) - max(due, started))
        return total

    @property
    def worst_s(self) -> float:
        return max((woken - due for due, woken in list(self._seen)), default=0.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            due = self._due = time.monotonic() + _TICK_S
            self._stop.wait(_TICK_S)
            woken = time.monotonic()
            if woken - due > _NOTED_S:
                self._seen.append((due, woken))
        self._due = float("inf")


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
    ) -> None:
        self._stalls = stalls
        self._elsewhere = expected
        self._allowance_s = allowance_s
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
            stalled += call.starved_s if self._stalls else 0.0
            if call.late_s > self._allowance_s + 2 * stalled:
                took, given = call.ended - call.started, call.deadline - call.started
                self.breaks(
                    "I2",
                    f"{call.op} of {len(call.names)} took {took:.3f} s of {given:.3f} s; it or timers waited "
                    f"{stalled:.3f} s for a processor; {', '.join(sorted(set(call.outcome)))}",
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
        started, starved = time.monotonic(), starved_s()
        until = started + self._client.lookup_seconds if deadline is None else deadline
        tiers: list[Tier] = []
        with self._nothing_escapes("lookup"):
            tiers = self._client.lookup(block_ids, until, exhaustive=exhaustive)
        self._note("lookup", block_ids, [tier.name.lower() for tier in tiers], started, until, starved)
        return tiers

    def get_into(
        self, block_ids: Sequence[bytes], buffers: Sequence[bytearray | memoryview], deadline: float | None = None
    ) -> list[LoadResult]:
        started, starved = time.monotonic(), starved_s()
        if deadline is None:
            deadline = started + self._client.load_seconds(sum(map(len, buffers)))
        results: list[LoadResult] = []
        with self._nothing_escapes("load"):
            results = self._client.get_into(block_ids, buffers, deadline)
        outcome = [r.tier.name.lower() if r.ok else r.reason for r in results]
        self._note("load", block_ids, outcome, started, deadline, starved)
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
        started, starved = time.monotonic(), starved_s()
        until = started + self._client.store_seconds if deadline is None else deadline
        results: list[StoreResult] = []
        with self._nothing_escapes("store"):
            results = self._client.put_from(block_ids, buffers, until)
        outcome = ["stored" if r.stored else "have" if r.ok else r.reason for r in results]
        self._note("store", block_ids, outcome, started, until, starved)
        return results

    def _note(
        self, op: str, block_ids: Sequence[bytes], outcome: list[str], started: float, deadline: float, starved: float
    ) -> None:
        ended, waited = time.monotonic(), starved_s() - starved
        self._history.returned(
            Call(op, self.tenant, tuple(block_ids), tuple(outcome), started, ended, deadline, waited)
        )

    @contextlib.contextmanager
    def _nothing_escapes(self, op: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self._history.breaks("I4", f"{op} raised {type(e).__name__}: {e}")
