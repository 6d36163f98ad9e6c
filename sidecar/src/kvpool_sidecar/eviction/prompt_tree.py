"""Which block follows which in the prompts of a table, and which blocks no other one follows: leaves.

The tree is kept in columns of the table. Pure; the owner locks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvpool_sidecar.eviction.slot_queue import SlotQueue

if TYPE_CHECKING:
    from kvpool_sidecar.eviction.packed_table import KeyTable

__all__ = ["PromptTree"]

_INNER, _LEAF, _UNTAUGHT, _ENDED = 1, 2, 3, 4
_WHERE, _IS_ENDED = 7, 8  # bits of a state
_MAX_DEPTH: Final = (1 << 16) - 1  # blocks beyond it have no known predecessor


class PromptTree:
    """Slots of `table`. A removed block that others follow keeps its slot until they have gone as well.

    `leaves`: of known prompts, unordered. `untaught`: leaves whose place in a prompt no lookup showed, in the order of
    their last use. `ended`: leaves of ended sessions, in the order in which they ended.
    """

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self._state = table.column("tree", "B")
        self._depth = table.column("depth", "H")  # blocks before this one, and one; 0: unknown
        # two columns serve all: an untaught block has no predecessor, and a leaf has no children
        self._parent = table.column("parent", "I")  # may have been removed; of untaught leaves the one ahead
        self._children = table.column("children", "I")  # of leaves the place among them, or the one behind
        self.leaves = array("I")
        self.untaught = SlotQueue(self._parent, self._children)
        self.ended: dict[int, None] = {}

    def has(self, slot: int) -> bool:
        """Return whether a block of the tree is in this slot."""
        return self._state[slot] != 0

    def is_leaf(self, slot: int) -> bool:
        """Return whether no block follows this one."""
        return self._state[slot] & _WHERE >= _LEAF

    def is_ended(self, slot: int) -> bool:
        """Return whether only ended sessions use the block."""
        return self._state[slot] & _IS_ENDED != 0

    def parent(self, slot: int) -> int:
        """Return the slot of a block's predecessor, which may have been removed; 0: unknown."""
        return self._parent[slot] if self._depth[slot] else 0

    def has_depth(self, slot: int) -> bool:
        """Return whether a lookup showed the block's place in a prompt."""
        return self._depth[slot] != 0

    def add(self, slot: int) -> None:
        """Add a block; those that followed it when it was removed follow it again."""
        self._state[slot] = _INNER
        if not self._children[slot]:
            self._depth[slot] = 0
            self._enter(slot)

    def remove(self, slot: int) -> None:
        """Remove a block; its predecessor may become a leaf."""
        if self.is_leaf(slot):
            self._leave(slot)
        self._state[slot] = 0
        parent, self._parent[slot] = self._parent[slot], 0
        if parent:
            self._lose_child(parent)

    def release(self, slot: int) -> None:
        """Allow that the slot of a removed block is used again, once no block follows it."""
        if not self._children[slot]:
            self._table.release(slot)

    def link(self, slot: int, parent: int) -> None:
        """Make `parent` the predecessor of `slot`, unless it has one in the tree.

        Depths never change, so inconsistent sequences form no cycle.
        """
        before = self.parent(slot)
        if (before and self._state[before]) or not 0 < self._depth[parent] < self._depth[slot]:
            return
        if before:
            self._lose_child(before)
        self._parent[slot] = parent
        if self.is_leaf(parent):
            self._leave(parent)
        self._children[parent] += 1

    def set_depth(self, slot: int, depth: int) -> None:
        """Set the number of blocks before this one, as a lookup showed it."""
        is_leaf = self.is_leaf(slot)
        if is_leaf:
            self._leave(slot)
        self._depth[slot] = min(depth + 1, _MAX_DEPTH)
        if is_leaf:
            self._enter(slot)

    def set_ended(self, slot: int, *, ended: bool) -> None:
        """Record whether only ended sessions use the block."""
        is_leaf = self.is_leaf(slot)
        if is_leaf:
            self._leave(slot)
        self._state[slot] = self._state[slot] & _WHERE | (_IS_ENDED if ended else 0)
        if is_leaf:
            self._enter(slot)

    def use(self, slot: int) -> None:
        """Record a use."""
        if self._state[slot] & _WHERE == _UNTAUGHT:
            self.untaught.remove(slot)
            self.untaught.append(slot)

    def clear(self) -> None:
        """Remove all blocks, and what is known of their places. O(slots)."""
        self.untaught.clear()
        self.ended.clear()
        del self.leaves[:]
        for slot in range(1, self._table.slots):
            has_children, self._children[slot] = self._children[slot] != 0, 0
            self._state[slot] = self._depth[slot] = self._parent[slot] = 0
            if has_children and not self._table.has(slot):
                self._table.release(slot)

    def _lose_child(self, parent: int) -> None:
        self._children[parent] -= 1
        if self._children[parent]:
            return
        if self._state[parent]:
            self._enter(parent)
        elif not self._table.has(parent):
            self._table.release(parent)

    def _enter(self, slot: int) -> None:
        """Put a block that no other one follows where it belongs."""
        flag = self._state[slot] & _IS_ENDED
        if flag:
            self._state[slot] = _ENDED | flag
            self.ended[slot] = None
        elif not self._depth[slot]:
            self._state[slot] = _UNTAUGHT
            self.untaught.append(slot)
        else:
            self._state[slot] = _LEAF
            self._children[slot] = len(self.leaves)
            self.leaves.append(slot)

    def _leave(self, slot: int) -> None:
        where = self._state[slot] & _WHERE
        self._state[slot] = _INNER | self._state[slot] & _IS_ENDED
        if where == _ENDED:
            del self.ended[slot]
        elif where == _UNTAUGHT:
            self.untaught.remove(slot)
        else:
            last = self.leaves.pop()
            if last != slot:
                self.leaves[self._children[slot]] = last
                self._children[last] = self._children[slot]
            self._children[slot] = 0
