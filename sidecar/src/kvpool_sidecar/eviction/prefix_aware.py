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
from operator import attrgetter
from typing import TYPE_CHECKING

from kvpool.protocol.hint import HintKind
from kvpool_sidecar.eviction.policy import EvictionPolicy
from kvpool_sidecar.eviction.recency_guard import RecencyGuard
from kvpool_sidecar.eviction.reuse_model import CLASSES, REMEMBERED, ReuseModel
from kvpool_sidecar.eviction.session_marks import MarkedNode, SessionMarks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.eviction.policy import Entry
    from kvpool_sidecar.eviction.session_marks import SessionHint

__all__ = ["PrefixAware", "SequenceHints"]

_SAMPLE = 32
_HINTS = 1 << 14  # per tenant
_TENANTS = 64
_LAST_USE = attrgetter("last")
_EARLY = (HintKind.ENDED, HintKind.TTL)  # hold for blocks whose store is under way


class _Node(MarkedNode):
    __slots__ = ("alive", "children", "depth", "drive", "last", "parent", "place", "uses")

    def __init__(self, block_key: bytes, entry: Entry, uses: int, last: int) -> None:
        super().__init__(block_key, entry.size)
        self.drive = entry.drive
        self.uses = uses
        self.last = last
        self.parent: _Node | None = None
        self.children = 0
        self.depth = -1  # from the first lookup; below 0: unknown
        self.place = -1  # among the leaves
        self.alive = True


def _goes_with(parent: _Node, node: _Node) -> bool:
    """Return whether the block before an evicted one is the next victim, without a new sample."""
    return parent.ended if node.ended else parent.uses == node.uses and parent.expected is node.expected


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
        self._nodes: dict[bytes, _Node] = {}
        self._leaves: list[_Node] = []
        self._untaught: OrderedDict[_Node, None] = OrderedDict()  # no leaf of a known prompt; in the order of last use
        self._hints = SequenceHints()
        self._random = random.Random(seed).random  # noqa: S311 - a sample, not a secret
        self._next: _Node | None = None  # the rest of a prompt that has begun to go
        self._marks = SessionMarks(capacity_bytes)
        self._ended: dict[_Node, None] = {}  # leaves of ended sessions, in the order in which they ended

    def _uses_of(self, block_key: bytes) -> int:
        node = self._nodes.get(block_key)
        return 0 if node is None else node.uses

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        before: _Node | None = None
        key_before = b""
        for depth, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is not None:
                if node.depth < 0:
                    self._place(node, depth)
                if before is not None and (node.parent is None or not node.parent.alive):
                    self._link(node, before)
            else:
                self._hints.add(tenant, key, key_before, depth)
            before, key_before = node, key

    @property
    def marks(self) -> SessionMarks:
        return self._marks

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        marks, clock = self._marks, self._model.clock
        marks.measure(hint.now, clock)
        if hint.kind is HintKind.FORGET:
            marks.drop_pending(keys)
        own: list[_Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and marks.claim(node, hint.session):
                own.append(node)
            elif node is None and key not in self._entries and hint.kind in _EARLY:
                marks.await_store(key, hint)
        return self._mark(own, hint)

    def _mark(self, own: list[_Node], hint: SessionHint) -> int:
        """Apply a hint to blocks of this session only, in the prompt's order; return how many took it."""
        if hint.kind is HintKind.KEEP:
            for node in own:
                self._unmark_ended(node)
            return self._marks.expect(own, hint, self._model.clock, self.total_bytes)
        for node in own:
            if hint.kind is HintKind.ENDED:
                self._marks.release(node)
                node.ended = True
                if node.place >= 0:
                    self._from_leaves(node)
                    self._to_leaves(node)
            elif hint.kind is HintKind.TTL:
                node.retained = True
                self._model.retain(node.block_key)
            elif hint.kind is HintKind.FORGET:
                self._marks.release(node)
                self._unmark_ended(node)
                node.owner = None
        return len(own)

    def _unmark_ended(self, node: _Node) -> None:
        if node.ended:
            is_leaf = node.place >= 0
            if is_leaf:
                self._from_leaves(node)
            node.ended = False
            if is_leaf:
                self._to_leaves(node)

    def _admit(self, block_key: bytes, entry: Entry) -> None:
        ages = self._model
        ages.clock += entry.size
        node = _Node(block_key, entry, ages.record(block_key, min(entry.uses, CLASSES - 1)), ages.clock)
        self._guard.store(block_key, entry.size)
        self._nodes[block_key] = node
        self._to_leaves(node)
        if (hint := self._hints.pop(entry.tenant, block_key)) is not None:
            before, depth = hint
            self._place(node, depth)
            if (parent := self._nodes.get(before)) is not None:
                self._link(node, parent)
        if (early := self._marks.on_store(node)) is not None and self._marks.claim(node, early.session):
            self._mark([node], early)

    def _use(self, block_key: bytes) -> None:
        node = self._nodes[block_key]
        self._unmark_ended(node)
        self._marks.on_use(node)
        node.uses = self._model.record(block_key, node.uses + 1)
        node.last = self._model.clock
        self._guard.use(block_key)
        if node in self._untaught:
            self._untaught.move_to_end(node)

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        self._guard.restore(block_key, entry.size)
        super().reinsert(block_key, entry)

    def _forget(self, block_key: bytes) -> None:
        self._guard.discard(block_key)
        self._remove(block_key)

    def _remove(self, block_key: bytes) -> None:
        node = self._nodes.pop(block_key)
        node.alive = False
        self._marks.release(node)
        if node.place >= 0:
            self._from_leaves(node)
        parent, node.parent = node.parent, None
        if parent is not None:
            parent.children -= 1
            if parent.children == 0 and parent.alive:
                self._to_leaves(parent)

    def _evict(self) -> bytes:
        node = self._next
        if node is None or not node.alive or node.place < 0 or (self._ended and not node.ended):
            node = next(iter(self._ended)) if self._ended else self._least_valuable_leaf()
        self._next = node.parent if node.parent is not None and _goes_with(node.parent, node) else None
        self._guard.evict(node.block_key)
        self._remove(node.block_key)
        return node.block_key

    def _find_on(self, drive: int) -> bytes:
        """The end of a prompt, on this drive, that is next in the order; blocks behind it stay on other drives."""
        first = chain(islice(self._ended, _SAMPLE), islice(self._untaught, _SAMPLE))
        for node in chain(first, sorted(self._sample(), key=self._rank)):
            here: _Node | None = node
            while here is not None and here.alive:
                if here.drive == drive:
                    return here.block_key
                here = here.parent
        return super()._find_on(drive)

    def _least_valuable_leaf(self) -> _Node:
        """The least promising of a sample of leaves; the one that waits for longest among equals.

        Where LRU does better it is one of those used least recently, unless a session expects to use it again.
        """
        some = self._sample()
        few = self._guard.candidates(_SAMPLE)
        if few < _SAMPLE:
            old = nsmallest(few, (node for node in some if node.expected is None), key=_LAST_USE)
            some = old + [node for node in some if node.expected is not None]
        leaf = min(some, key=self._rank, default=None)
        other = next(iter(self._untaught), None)
        if leaf is None or other is None:
            return leaf or next(iter(self._untaught))
        key = self._rank if other.expected is not None else _LAST_USE
        return min(other, leaf, key=key)

    def _sample(self) -> list[_Node]:
        self._model.refit()
        self._marks.expire(self._model.clock)
        leaves = self._leaves
        count = len(leaves)
        return leaves if count <= _SAMPLE else [leaves[int(self._random() * count)] for _ in range(_SAMPLE)]

    def _rank(self, node: _Node) -> tuple[float, int]:
        return self._value(node), node.last

    def _value(self, node: _Node) -> float:
        if node.expected is not None:
            return self._marks.value(node.expected, self._model.clock, self._model.grain)
        return self._model.index(node.uses, node.last, retained=node.retained)

    def _reset(self) -> None:
        for node in self._nodes.values():
            node.alive = False
        self._nodes.clear()
        self._leaves.clear()
        self._untaught.clear()
        self._ended.clear()
        self._guard.clear()
        self._marks.clear()
        self._next = None

    def _link(self, node: _Node, parent: _Node) -> None:
        """Make `parent` the predecessor of `node`. Depths never change, so inconsistent sequences form no cycle."""
        if not 0 <= parent.depth < node.depth:
            return
        node.parent = parent
        parent.children += 1
        if parent.place >= 0:
            self._from_leaves(parent)

    def _place(self, node: _Node, depth: int) -> None:
        """Set the number of blocks before this one, as a lookup showed it."""
        is_leaf = node.place >= 0
        if is_leaf:
            self._from_leaves(node)
        node.depth = depth
        if is_leaf:
            self._to_leaves(node)

    def _to_leaves(self, node: _Node) -> None:
        if node.ended or node.depth < 0:
            node.place = 0
            (self._ended if node.ended else self._untaught)[node] = None
            return
        node.place = len(self._leaves)
        self._leaves.append(node)

    def _from_leaves(self, node: _Node) -> None:
        if self._ended.pop(node, self) is None or self._untaught.pop(node, self) is None:
            node.place = -1
            return
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.place] = last
            last.place = node.place
        node.place = -1
