"""The table's columns: a model of slots and keys, what a block takes, and that growth is spread over insertions."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_sidecar import eviction as evict
from kvpool_sidecar.eviction import Entry
from kvpool_sidecar.eviction.packed_table import KeyTable, PackedTable
from kvpool_sidecar.eviction.prompt_tree import PromptTree
from kvpool_sidecar.eviction.slot_queue import SlotQueue
from kvpool_testing.blocks import key


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=600))
def test_a_table_finds_what_a_dictionary_would(steps):
    table, model = KeyTable(), {}
    for add, n in steps:
        slot = table.find(key(n))
        assert slot == model.get(key(n), 0)
        if add and not slot:
            model[key(n)] = table.insert(key(n))
        elif slot and not add:
            table.remove(slot)
            table.release(model.pop(key(n)))
    assert sorted(table) == sorted(model.values())
    assert {table.key(slot) for slot in table} == set(model)
    assert len(table) == len(model)
    assert len(set(model.values())) == len(model)


def test_every_block_is_found_while_buckets_split_and_slots_are_used_again():
    table = KeyTable()
    for n in range(20_000):
        table.insert(key(n))
    for n in range(0, 20_000, 2):
        slot = table.find(key(n))
        table.remove(slot)
        table.release(slot)
    slots = table.slots
    for n in range(20_000, 30_000):
        table.insert(key(n))
    assert table.slots == slots
    assert all(table.key(table.find(key(n))) == key(n) for n in range(1, 20_000, 2))
    assert all(table.find(key(n)) for n in range(20_000, 30_000))
    assert not any(table.find(key(n)) for n in range(0, 20_000, 2))


def test_an_insertion_moves_few_blocks_however_many_there_are():
    table, most, count = KeyTable(), 0, 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    for n in range(20_000):
        block_key, count = key(n), 0
        sys.settrace(trace)
        table.insert(block_key)
        sys.settrace(before)
        most = max(most, count)
    assert most < 300


@pytest.mark.parametrize(
    "entry",
    [
        Entry(8192, 4096, 1_700_000_000.5),
        Entry(1, 0, 0.0, 255, b"t" * 16, 1_700_000_000.125, 31),
        Entry((1 << 32) - 1, (1 << 32) - 1, 1e10, 3, b"", 0.0, 253),
    ],
)
def test_an_entry_comes_back_as_it_was(entry):
    table = PackedTable()
    first = table.add(key(0), Entry(1, 1, 1.0))
    slot = table.add(key(1), entry)
    assert table.entry(slot) == entry
    assert table.entry(first) == Entry(1, 1, 1.0)
    assert table.drive(slot) == entry.drive


def test_keys_of_another_length_are_refused():
    table = KeyTable()
    table.insert(b"12345678")
    with pytest.raises(ValueError, match="8"):
        table.insert(b"123456789")
    assert table.find(b"123456789") == 0


@given(st.lists(st.tuples(st.sampled_from("alrfm"), st.integers(1, 9)), max_size=60))
def test_a_queue_of_slots_is_a_list(steps):
    table = KeyTable()
    table.insert(key(0))
    queue, model = SlotQueue(table.column("ahead", "I"), table.column("behind", "I")), []
    for what, slot in steps:
        if what == "r" and slot in model:
            queue.remove(slot)
            model.remove(slot)
        elif what == "f" and model:
            assert queue.pop_first() == model.pop(0)
        elif what == "a" and slot not in model:
            queue.append(slot)
            model.append(slot)
        elif what == "l" and slot not in model:
            queue.append_first(slot)
            model.insert(0, slot)
        assert list(queue) == model
        assert bool(queue) == bool(model)


def test_the_slot_of_a_removed_block_that_others_follow_is_not_used_before_they_have_gone():
    table = PackedTable()
    tree = PromptTree(table)
    slots = [table.add(key(n), Entry(1, 1, 0.0)) for n in range(3)]
    for depth, slot in enumerate(slots):
        tree.add(slot)
        tree.set_depth(slot, depth)
    tree.link(slots[1], slots[0])
    tree.link(slots[2], slots[0])
    tree.remove(slots[0])
    table.remove(slots[0])
    tree.release(slots[0])
    other = table.add(key(9), Entry(1, 1, 0.0))
    tree.add(other)
    assert other not in slots
    assert tree.is_leaf(other)
    for slot in slots[1:]:
        tree.remove(slot)
        table.remove(slot)
        tree.release(slot)
    assert {table.add(key(n), Entry(1, 1, 0.0)) for n in range(20, 23)} == set(slots)


@pytest.mark.parametrize(
    ("policy", "most"), [("PrefixAware", 69), ("LRU", 62), ("FIFO", 62), ("LFU", 66), ("S3FIFO", 64)]
)
def test_a_block_takes_tens_of_bytes(policy, most):
    """In columns; what is constant and the spare room of the allocator come on top."""
    table = evict.create_policy(policy, 1 << 40)
    table.add(key(0), Entry(2 << 20, 2 << 20, 1_700_000_000.5))
    assert len(key(0)) == 32
    assert table.bytes_per_slot <= most
