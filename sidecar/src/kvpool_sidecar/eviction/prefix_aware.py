"""Prefix-aware eviction, the default: evicts leaves only, those with the lowest expected value first.

A block is useless without its predecessors in the prompt. So the last block of a prompt is evicted first, and a prefix
shared by many prompts stays as long as one of them does. `kvpool_sidecar.eviction.reuse_model` decides which prompt
loses its end, among a random sample of leaves, so reads maintain no order. How far it decides is measured:
`kvpool_sidecar.eviction.recency_guard` limits the choice to the leaves used least recently where LRU does better.
Blocks of which no lookup showed the place, as after a restart, go in the order of their last uses.

Session hints (kvpool_sidecar.eviction.session_marks) change the value of the blocks that only that session uses: those
of an ended session go first; those that it expects to use again compete with all others on one scale. Nothing is exempt
from eviction.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from heapq import nsmallest
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvpool.protocol.hint import HintKind
from kvpool_sidecar.eviction.policy import EvictionPolicy
from kvpool_sidecar.eviction.prompt_tree import PromptTree
from kvpool_sidecar.eviction.recency_guard import RecencyGuard
from kvpool_sidecar.eviction.reuse_model import CLASSES, REMEMBERED, ReuseModel
from kvpool_sidecar.eviction.session_marks import MarkedNode, SessionMarks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.eviction.packed_table import Entry
    from kvpool_sidecar.eviction.recency_guard import GuardStatus
    from kvpool_sidecar.eviction.session_marks import Expectation, SessionHint

__all__ = ["PrefixAware", "SequenceHints"]

_SAMPLE = 32
_HINTS = 1 << 14  # per tenant
_TENANTS = 64
_MAX_WORD = (1 << 32) - 1
_EARLY = (HintKind.ENDED, HintKind.TTL)  # hold for blocks whose store is under way


class SequenceHints:
    """Predecessors of blocks that are not stored yet: recorded by lookups, used by the stores that follow.

    Bounded per tenant, so that one tenant's lookups do not displace the hints of another.
    """

    def __init__(self, per_tenant: int = _HINTS, tenants: int = _TENANTS) -> None:
        self._per_tenant = per_tenant
        self._tenants = tenants
        self._by_tenant: OrderedDict[bytes, OrderedDict[bytes, tuple[bytes, int]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, tenant: bytes, block_key: bytes, before: bytes, depth: int) -> None:
        """Record that `before` precedes `block_key`; `depth` is the number of predecessors."""
        hints = self._by_tenant.get(tenant)
        if hints is None:
            hints = self._by_tenant[tenant] = OrderedDict()
            if len(self._by_tenant) > self._tenants:
                self._by_tenant.popitem(last=False)
        hints[block_key] = before, depth
        if len(hints) > self._per_tenant:
            hints.popitem(last=False)

    def pop(self, tenant: bytes, block_key: bytes) -> tuple[bytes, int] | None:
        """Return and remove the predecessor of `block_key` and its depth."""
        hints = self._by_tenant.get(tenant)
        return None if hints is None else hints.pop(block_key, None)


class PrefixAware(EvictionPolicy):
    """See the module. `capacity_bytes` is of the node; `seed` makes the choice among prompts repeatable.

    `remembered`: see ReuseModel.
    """

    def __init__(self, capacity_bytes: int, seed: int = 1, *, remembered: int = REMEMBERED) -> None:
        super().__init__()
        self._model = ReuseModel(capacity_bytes, remembered)
        self._guard = RecencyGuard()
        self._hints = SequenceHints()
        self._random = random.Random(seed).random  # noqa: S311 - a sample, not a secret
        self._tree = PromptTree(self._table)
        self._counts = self._table.column("count", "B")  # uses, at most CLASSES - 1
        self._last = self._table.column("last", "I")  # of the clock, in grains, modulo one word
        self._grain = max(1, capacity_bytes >> 20)
        self._next = 0  # the rest of a prompt that has begun to go
        self._marks = SessionMarks(capacity_bytes)
        self._marked: dict[int, MarkedNode] = {}  # blocks of which sessions speak, by slot

    def _uses_of(self, slot: int) -> int:
        return self._counts[slot]

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        tree, before, key_before = self._tree, 0, b""
        for depth, key in enumerate(keys):
            slot = self._table.find(key)
            if slot and tree.has(slot):
                if not tree.has_depth(slot):
                    tree.set_depth(slot, depth)
                if before:
                    tree.link(slot, before)
                before = slot
            else:
                self._hints.add(tenant, key, key_before, depth)
                before = 0
            key_before = key

    @property
    def marks(self) -> SessionMarks:
        return self._marks

    @property
    def guard(self) -> GuardStatus:
        """How far this order may be trusted, and why."""
        return self._guard.status

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        marks, clock = self._marks, self._model.clock
        marks.measure(hint.now, clock)
        if hint.kind is HintKind.FORGET:
            marks.drop_pending(keys)
        own: list[int] = []
        for key in keys:
            slot = self._table.find(key)
            if slot and self._tree.has(slot) and marks.claim(self._mark_of(slot), hint.session):
                own.append(slot)
            elif not slot and hint.kind in _EARLY:
                marks.await_store(key, hint)
        return self._mark(own, hint)

    def _mark_of(self, slot: int) -> MarkedNode:
        if (node := self._marked.get(slot)) is None:
            node = self._marked[slot] = MarkedNode(self._table.key(slot), self._table.size[slot])
        return node

    def _mark(self, own: list[int], hint: SessionHint) -> int:
        """Apply a hint to blocks of this session only, in the prompt's order; return how many took it."""
        nodes = [self._marked[slot] for slot in own]
        if hint.kind is HintKind.KEEP:
            for slot in own:
                self._unmark_ended(slot)
            return self._marks.expect(nodes, hint, self._model.clock, self.total_bytes)
        for slot, node in zip(own, nodes, strict=True):
            if hint.kind is HintKind.ENDED:
                self._marks.release(node)
                self._tree.set_ended(slot, ended=True)
            elif hint.kind is HintKind.TTL:
                node.retained = True
                self._model.retain(node.block_key)
            elif hint.kind is HintKind.FORGET:
                self._marks.release(node)
                self._unmark_ended(slot)
                node.owner = None
        return len(own)

    def _unmark_ended(self, slot: int) -> None:
        if self._tree.is_ended(slot):
            self._tree.set_ended(slot, ended=False)

    def _admit(self, block_key: bytes, slot: int) -> None:
        model, table = self._model, self._table
        size, entry_uses = table.size[slot], table.saved_uses(slot)
        model.clock += size
        self._counts[slot] = model.record(block_key, min(entry_uses, CLASSES - 1))
        self._last[slot] = model.clock // self._grain & _MAX_WORD
        self._guard.store(block_key, size)
        self._tree.add(slot)
        if (hint := self._hints.pop(table.tenant(slot), block_key)) is not None:
            before, depth = hint
            self._tree.set_depth(slot, depth)
            if (parent := table.find(before)) and self._tree.has(parent):
                self._tree.link(slot, parent)
        early = self._marks.on_store(block_key)
        if early is not None and self._marks.claim(self._mark_of(slot), early.session):
            self._mark([slot], early)

    def _use(self, block_key: bytes, slot: int) -> None:
        self._unmark_ended(slot)
        self._marks.on_use(block_key, self._marked.get(slot))
        self._counts[slot] = self._model.record(block_key, self._counts[slot] + 1)
        self._last[slot] = self._model.clock // self._grain & _MAX_WORD
        self._guard.use(block_key)
        self._tree.use(slot)

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        self._guard.restore(block_key, entry.size)
        super().reinsert(block_key, entry)

    def _forget(self, block_key: bytes, slot: int) -> None:
        self._guard.discard(block_key)
        self._remove(slot)

    def _remove(self, slot: int) -> None:
        if (node := self._marked.pop(slot, None)) is not None:
            self._marks.release(node)
        self._tree.remove(slot)
        if self._next == slot:
            self._next = 0

    def _release(self, slot: int) -> None:
        self._tree.release(slot)

    def _evict(self) -> int:
        tree, slot = self._tree, self._next
        if not slot or not tree.is_leaf(slot) or (tree.ended and not tree.is_ended(slot)):
            slot = next(iter(tree.ended), 0) or self._least_valuable_leaf()
        parent = tree.parent(slot)
        goes_on = parent and tree.has(parent) and self._goes_with(parent, slot)
        self._guard.evict(self._table.key(slot))
        self._remove(slot)
        self._next = parent if goes_on else 0
        return slot

    def _goes_with(self, parent: int, slot: int) -> bool:
        """Return whether the block before an evicted one is the next victim, without a new sample."""
        if self._tree.is_ended(slot):
            return self._tree.is_ended(parent)
        return self._counts[parent] == self._counts[slot] and self._expected(parent) is self._expected(slot)

    def _expected(self, slot: int) -> Expectation | None:
        node = self._marked.get(slot)
        return None if node is None else node.expected

    def _find_on(self, drive: int) -> int:
        """The end of a prompt, on this drive, that is next in the order; blocks behind it stay on other drives."""
        tree = self._tree
        first = chain(islice(tree.ended, _SAMPLE), islice(tree.untaught, _SAMPLE))
        for slot in chain(first, sorted(self._sample(), key=self._rank)):
            here = slot
            while here and tree.has(here):
                if self._table.drive(here) == drive:
                    return here
                here = tree.parent(here)
        return super()._find_on(drive)

    def _least_valuable_leaf(self) -> int:
        """The least promising of a sample of leaves; the one that waits for longest among equals.

        Where LRU does better it is one of those used least recently, unless a session expects to use it again.
        """
        some: Sequence[int] = self._sample()
        few = self._guard.candidates(_SAMPLE)
        if few < _SAMPLE:
            old = nsmallest(few, (slot for slot in some if self._expected(slot) is None), key=self._recency)
            some = old + [slot for slot in some if self._expected(slot) is not None]
        leaf = min(some, key=self._rank, default=0)
        other = self._tree.untaught.first
        if not leaf or not other:
            return leaf or other
        key = self._rank if self._expected(other) is not None else self._recency
        return min(other, leaf, key=key)

    def _sample(self) -> Sequence[int]:
        self._model.refit()
        self._marks.expire(self._model.clock)
        leaves = self._tree.leaves
        count = len(leaves)
        return leaves if count <= _SAMPLE else [leaves[int(self._random() * count)] for _ in range(_SAMPLE)]

    def _recency(self, slot: int) -> int:
        """Higher: used later."""
        return -(self._model.clock // self._grain - self._last[slot] & _MAX_WORD)

    def _rank(self, slot: int) -> tuple[float, int]:
        recency = self._recency(slot)
        node = self._marked.get(slot)
        if node is not None and node.expected is not None:
            return self._marks.value(node.expected, self._model.clock, self._model.grain), recency
        last, retained = self._model.clock + recency * self._grain, node is not None and node.retained
        return self._model.index(self._counts[slot], last, retained=retained), recency

    def _reset(self) -> None:
        self._tree.clear()
        self._guard.clear()
        self._marks.clear()
        self._marked.clear()
        self._next = 0
