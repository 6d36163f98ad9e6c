"""What sessions said about their blocks: which are no longer needed, and which will be used again in about what time.

Pure; the owner locks. A statement changes the order of eviction only. A block that a session expects to use again has
the value p / (expected time left): p is the share of such statements that came true in this table, so a tenant that
says it of everything loses the advantage. Times are converted to bytes stored since, the clock of
kvpool_sidecar.eviction.reuse_model. Expected blocks take at most a share of the table's bytes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool.protocol.hint import HintKind

__all__ = ["Expectation", "MarkedNode", "MarksStatus", "SessionHint", "SessionMarks"]

_PRIOR_KEPT, _PRIOR_ALL = 40.0, 50.0  # statements that the first assumption is worth
_HALVE_AFTER = 4096.0  # statements, so that last week's truth fades
_LEFT, _LEAST_LEFT = 0.5, 0.1  # of the time: expected rest, and its minimum as a share of the whole
_RATE_S = 300.0  # over which the rate of stores is averaged
_MIN_INTERVAL_S = 0.25
_PENDING = 1 << 13  # blocks that a hint named before they were stored
_MAX_EXPECTATIONS = 1 << 14


class SessionHint(NamedTuple):
    """One hint as a table takes it. `session`: tag. `now`: seconds of a clock that never goes back."""

    kind: HintKind
    session: bytes
    seconds: float = 0.0
    now: float = 0.0


class Expectation:
    """Blocks of one session that it expects to use again at clock `due`."""

    __slots__ = ("due", "is_open", "nodes", "span", "witness")

    def __init__(self, due: int, span: int, witness: bytes) -> None:
        self.due = due
        self.span = span
        self.witness = witness
        self.is_open = True
        self.nodes: list[MarkedNode] = []


class MarksStatus(NamedTuple):
    """Figures of one table."""

    truth: float  # share of expectations that came true
    weight: float  # how many were decided
    expected_bytes: int
    rate: float  # bytes stored a second, recently; 0: unknown

    @classmethod
    def of(cls, marks: SessionMarks) -> MarksStatus:
        """Figures of `marks` now."""
        return cls(marks.truth, marks.decided, marks.expected_bytes, marks.rate)


class MarkedNode:
    """A block of a table, as far as sessions speak of it."""

    __slots__ = ("block_key", "expected", "owner", "retained", "size")

    def __init__(self, block_key: bytes, size: int) -> None:
        self.block_key = block_key
        self.size = size
        self.owner: bytes | None = None  # session tag; empty: several sessions; None: unknown
        self.expected: Expectation | None = None
        self.retained = False  # an application asked to retain it: a class of the reuse model


class SessionMarks:
    """Marks of one table. `capacity_bytes` stands for the rate of stores until it is known."""

    def __init__(self, capacity_bytes: int, share_percent: int = 25) -> None:
        self.share_percent = share_percent
        self.expected_bytes = 0
        self._capacity = capacity_bytes
        self._due: list[tuple[int, int, Expectation]] = []  # heap, the next one first
        self._latest: list[tuple[int, int, Expectation]] = []  # heap, the last one first; some are over
        self._number = 0
        self._witnesses: dict[bytes, Expectation] = {}
        self._pending: OrderedDict[bytes, SessionHint] = OrderedDict()
        self._kept, self._all = _PRIOR_KEPT, _PRIOR_ALL
        self._rate = 0.0  # bytes a second
        self._measured: tuple[float, int] | None = None

    @property
    def truth(self) -> float:
        """Share of the expectations that came true, 0 to 1."""
        return self._kept / self._all

    @property
    def decided(self) -> float:
        """Expectations that came true or did not, lately."""
        return self._all - _PRIOR_ALL if self._all > _PRIOR_ALL else 0.0

    @property
    def rate(self) -> float:
        """Bytes stored a second, recently; 0: unknown."""
        return self._rate

    def value(self, expected: Expectation, clock: int, grain: int) -> float:
        """The chance of a use per step of `grain` bytes stored since, as ReuseModel.index gives it."""
        left = max(_LEFT * (expected.due - clock), _LEAST_LEFT * expected.span, grain)
        return self.truth * grain / left

    def claim(self, node: MarkedNode, session: bytes) -> bool:
        """Record that the session uses the block. True if no other session is known to do so."""
        if node.owner is None:
            node.owner = session
        elif node.owner != session:
            node.owner = b""
        return node.owner == session

    def expect(self, nodes: Sequence[MarkedNode], hint: SessionHint, clock: int, total_bytes: int) -> int:
        """Record that the session's blocks, in the prompt's order, will be used again. Returns how many are marked.

        Those beyond the share of `total_bytes` are not.
        """
        self.expire(clock)
        for node in nodes:
            self.release(node)
        span = max(1, int(hint.seconds * self._rate)) if self._rate else self._capacity
        if len(self._due) >= _MAX_EXPECTATIONS or not nodes:
            return 0
        one = Expectation(clock + span, span, nodes[0].block_key)
        budget = total_bytes * self.share_percent // 100
        for node in nodes:
            if self.expected_bytes + node.size > budget and not self._displace(one.due, node.size):
                break
            node.expected = one
            one.nodes.append(node)
            self.expected_bytes += node.size
        if one.nodes:
            if (before := self._witnesses.get(one.witness)) is not None:
                before.is_open = False  # the session says it again: neither true nor false
            self._witnesses[one.witness] = one
            self._number += 1
            heapq.heappush(self._due, (one.due, self._number, one))
            heapq.heappush(self._latest, (-one.due, self._number, one))
        return len(one.nodes)

    def _displace(self, due: int, size: int) -> bool:
        """Release `size` bytes of blocks that are expected later than `due`; False if there are none."""
        while self._latest and -self._latest[0][0] > due:
            last = self._latest[0][2]
            while last.nodes:
                node = last.nodes.pop()
                if node.expected is last:
                    self.release(node)
                    size -= node.size
                    if size <= 0:
                        return True
            heapq.heappop(self._latest)
        return False

    def on_use(self, block_key: bytes, node: MarkedNode | None) -> None:
        """Record a use: what was expected came true. `node`: what sessions said of the block."""
        if (witness := self._witnesses.get(block_key)) is not None:
            self._resolve(witness, kept=True)
        if node is not None and node.expected is not None:
            self._resolve(node.expected, kept=True)
            self.release(node)

    def release(self, node: MarkedNode) -> None:
        """Treat the block as any other again."""
        if node.expected is not None:
            self.expected_bytes -= node.size
            node.expected = None

    def on_store(self, block_key: bytes) -> SessionHint | None:
        """Return the hint that named this block before it was stored."""
        if (witness := self._witnesses.get(block_key)) is not None:
            self._resolve(witness, kept=True)  # it was evicted too early, and the session did come back
        return self._pending.pop(block_key, None)

    def await_store(self, block_key: bytes, hint: SessionHint) -> None:
        """Keep a hint for a block that is not here; bounded, the oldest goes."""
        self._pending[block_key] = hint
        if len(self._pending) > _PENDING:
            self._pending.popitem(last=False)

    def drop_pending(self, keys: Iterable[bytes]) -> None:
        """Forget hints for blocks that are not here."""
        for key in keys:
            self._pending.pop(key, None)

    def measure(self, now: float, clock: int) -> None:
        """Update the rate of stores."""
        if self._measured is None or now < self._measured[0]:
            self._measured = now, clock
            return
        then, before = self._measured
        if (passed := now - then) < _MIN_INTERVAL_S:
            return
        latest = (clock - before) / passed
        weight = min(1.0, passed / _RATE_S) if self._rate else 1.0
        self._rate += (latest - self._rate) * weight
        self._measured = now, clock

    def expire(self, clock: int) -> None:
        """End expectations whose time is over."""
        while self._due and self._due[0][0] <= clock:
            _, _, one = heapq.heappop(self._due)
            self._resolve(one, kept=False)
            for node in one.nodes:
                if node.expected is one:
                    self.release(node)
            one.nodes.clear()
        if len(self._latest) > 2 * len(self._due) + 64:
            self._latest = [(-due, number, one) for due, number, one in self._due]
            heapq.heapify(self._latest)

    def clear(self) -> None:
        """Forget all marks; what was learned stays."""
        self.expected_bytes = 0
        self._due.clear()
        self._latest.clear()
        self._witnesses.clear()
        self._pending.clear()

    def _resolve(self, one: Expectation, *, kept: bool) -> None:
        if self._witnesses.get(one.witness) is one:
            del self._witnesses[one.witness]
        if not one.is_open:
            return
        one.is_open = False
        self._kept += kept
        self._all += 1
        if self._all > _HALVE_AFTER:
            self._kept, self._all = self._kept / 2, self._all / 2
