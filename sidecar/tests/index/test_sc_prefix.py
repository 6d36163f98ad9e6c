"""How far a prompt reaches, with two questions: right for every whole chain, and holes are found by the load."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import RetryableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index import prefix
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_testing.index import key

PEER = NodeInfo("peer", "127.0.0.2", 2, 22)
LONG = 1250


def search(count, truth, doubtful=()):
    """What the search says of each block, and how many were asked for."""
    found = {n: truth(n) for n in prefix.first_query(count, doubtful)}
    if count > prefix.EXACT:
        found.update((n, truth(n)) for n in prefix.second_query(found))
        found = dict(sorted(found.items()))
    said = {n for n, there in found.items() if there}
    return said.union(*prefix.presumed(found)), len(found)


def leading(count, said) -> int:
    return next((n for n in range(count) if n not in said), count)


@given(st.integers(1, 3000), st.data())
def test_a_chain_without_holes_is_found_to_its_last_block(count, data):
    end = data.draw(st.integers(0, count))
    said, asked = search(count, lambda n: n < end)
    assert said == set(range(end))
    assert asked <= max(prefix.EXACT, prefix.PROBES + count // (prefix.PROBES - 1))


@given(st.integers(1, 2000), st.sets(st.integers(0, 1999)), st.integers(0, 2000), st.sets(st.integers(0, 1999)))
def test_with_holes_only_what_lies_between_two_that_are_there_is_presumed(count, holes, end, doubtful):
    doubtful = sorted(n for n in doubtful if n < count)
    present = {n for n in range(count) if n < end and n not in holes}
    said, _ = search(count, present.__contains__, doubtful)
    assert count > prefix.EXACT or said == present
    for n in said - present:
        assert n not in doubtful[:32]
        assert any(m in present for m in range(n))
        assert any(m in present for m in range(n + 1, count))
    # what is said to be the end is an end
    reach = leading(count, said)
    assert reach == count or reach not in present or leading(count, present) <= reach


def test_few_blocks_are_asked_for_one_by_one():
    assert prefix.first_query(prefix.EXACT, []) == list(range(prefix.EXACT))
    assert len(prefix.first_query(prefix.EXACT + 1, range(100))) <= prefix.PROBES + 32


# -- the directory asks like that


class Counting(MemoryIndex):
    def __init__(self):
        super().__init__(lease_s=60)
        self.asked: list[tuple[int, int]] = []

    def query(self, keys, numbers):
        self.asked.append((len(keys), len(numbers)))
        return super().query(keys, numbers)


@pytest.fixture
def index():
    return Counting()


def reach(directory, keys) -> list[bool]:
    return [bool(there) for there in directory.longest_prefix(keys, 10)]


@pytest.fixture
def directory(index):
    guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
    yield BlockResolver(index, guard, lambda: 9, lease_s=60, lookup_s=10)
    guard.close()


def announce(index, numbers):
    number = index.join(PEER)
    index.announce([(key(n), Record(number, 777, 22)) for n in numbers])
    return number


@pytest.mark.parametrize("end", [0, 1, 80, 83, 84, 600, 1249, LONG])
def test_a_long_prompt_takes_two_questions_even_of_a_node_nobody_knows_yet(index, directory, end):
    announce(index, range(end))
    keys = [key(n) for n in range(LONG)]
    assert reach(directory, keys) == [True] * end + [False] * (LONG - end)
    assert len(index.asked) <= 2
    assert sum(count for count, _ in index.asked) <= prefix.PROBES + LONG // (prefix.PROBES - 1) + 1


def test_a_short_prompt_takes_one_question_once_the_nodes_are_known(index, directory):
    announce(index, range(80))
    reach(directory, [key(0)])
    index.asked.clear()
    assert reach(directory, [key(n) for n in range(80)]) == [True] * 80
    assert index.asked == [(79, 0)]
    assert reach(directory, [key(n) for n in range(80)]) == [True] * 80
    assert index.asked == [(79, 0)]  # all remembered


def test_without_an_answer_nothing_is_presumed_between_what_is_remembered(index, directory, monkeypatch):
    announce(index, range(LONG))
    keys = [key(n) for n in range(LONG)]
    assert all(found is not None for found in directory.locate([keys[0], keys[LONG - 1]], 10))

    def away(*_):
        raise RetryableError("away")

    monkeypatch.setattr(index, "query", away)
    said = reach(directory, keys)
    assert (said[0], said[1], said[600], said[-1]) == (True, False, False, True)


def test_a_hole_is_found_by_the_load_and_doubted_from_then_on(index, directory):
    announce(index, [n for n in range(LONG) if n != 500])
    keys = [key(n) for n in range(LONG)]
    assert reach(directory, keys)[500]
    loaded = directory.locate(keys[480:520], 10)
    assert [found is not None for found in loaded] == [n != 500 for n in range(480, 520)]
    again = reach(directory, keys)
    assert again[:500] == [True] * 500
    assert not again[500]
    announce(index, [500])
    assert reach(directory, keys) == [True] * LONG
    assert directory.locate([keys[500]], 10)[0] is not None


def test_the_blocks_of_a_node_that_is_dead_are_no_part_of_a_chain(index, directory):
    announce(index, range(LONG))
    dead = index.join(PEER._replace(node="dead"))
    for n in range(300, 900):
        index.withdraw(index.join(PEER), [key(n)])
        index.announce([(key(n), Record(dead, 777, 22))])
    index.leave(dead, PEER._replace(node="dead"))
    keys = [key(n) for n in range(LONG)]
    for _ in range(2):
        said = reach(directory, keys)
        assert not any(said[300:900])
        assert leading(LONG, {n for n, is_there in enumerate(said) if is_there}) <= 300
    assert sum(said[:300]) == 300  # now that it is known to be dead, the end is exact


def test_a_node_seen_first_in_the_second_answer_counts_from_the_next_heartbeat(index, directory):
    announce(index, range(LONG))
    stranger = PEER._replace(node="stranger")
    number = index.join(stranger)
    index.withdraw(index.join(PEER), [key(n) for n in range(601, LONG)])
    index.announce([(key(n), Record(number, 777, 22)) for n in range(601, 620)])
    directory.locate([key(0)], 10)
    keys = [key(n) for n in range(LONG)]
    index.asked.clear()
    assert reach(directory, keys) == [True] * 601 + [False] * (LONG - 601)
    assert len(index.asked) == 2
    directory.refresh()
    assert reach(directory, keys) == [True] * 620 + [False] * (LONG - 620)
