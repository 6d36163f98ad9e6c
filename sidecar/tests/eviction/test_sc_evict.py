"""What every order of eviction must keep to, and what each is for. The model is a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.protocol.hint import HintKind
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.eviction import PERSIST_EVERY_S, Entry, PrefixAware
from kvpool_sidecar.eviction.prefix_aware import SequenceHints
from kvpool_sidecar.eviction.reuse_model import ReuseModel
from kvpool_sidecar.eviction.session_marks import SessionHint
from kvpool_testing.blocks import key

CAPACITY = 1000
PINNED = [f"{policy} with pins" for policy in [*evict.POLICIES, "PerTenant"]]
every_policy = pytest.mark.parametrize("policy", [*evict.POLICIES, "PerTenant", *PINNED])


def make(policy: str) -> evict.EvictionPolicy:
    name, _, pinned = policy.partition(" with ")

    def plain(order: str) -> evict.EvictionPolicy:
        return evict.create_policy(order, CAPACITY, evict.PinSet(CAPACITY // 5, 2, halve_after=25) if pinned else None)

    return evict.PerTenant(lambda _tenant: plain("PrefixAware")) if name == "PerTenant" else plain(name)


def table_of(policy: str, count: int, size: int = 10) -> evict.EvictionPolicy:
    table = make(policy)
    for n in range(count):
        table.add(key(n), Entry(size, size, n))
    return table


def gone(table: evict.EvictionPolicy, count: int) -> list[bytes]:
    return [k for k, _ in table.pop_victims(0, count, at_least=count)]


@every_policy
class TestEveryPolicy:
    def test_all_can_go_once_each(self, policy):
        table = table_of(policy, 50)
        table.observe_sequence([key(n) for n in range(50)])
        assert sorted(gone(table, 99)) == sorted(key(n) for n in range(50))
        assert len(table) == table.total_bytes == 0

    def test_no_more_go_than_needed_nor_than_allowed(self, policy):
        assert len(table_of(policy, 9).pop_victims(11, 99)) == 2
        assert len(table_of(policy, 9).pop_victims(999, 2)) == 2
        assert not table_of(policy, 9).pop_victims(0, 99)

    def test_a_victim_that_could_not_go_is_here_again(self, policy):
        table = table_of(policy, 5)
        (victim, entry), *_ = table.pop_victims(1, 1)
        table.reinsert(victim, entry)
        assert victim in table
        assert table.total_bytes == 50

    def test_after_a_scan_the_oldest_go_first(self, policy):
        table = make(policy)
        for n in reversed(range(30)):
            table.add(key(n), Entry(100, 100, n * 1000))
        table.sort_by_last_use()
        assert len(table) == 30
        assert sum(int(k in {key(n) for n in range(15)}) for k in gone(table, 5)) == 5

    def test_uses_are_saved_now_and_then_only(self, policy):
        table = table_of(policy, 1)
        assert not table.touch(key(0), PERSIST_EVERY_S - 1)
        assert table.touch(key(0), PERSIST_EVERY_S + 1) == table.persists_uses
        assert not table.touch(key(0), PERSIST_EVERY_S + 2)
        assert not table.touch(key(9), 0)

    @settings(max_examples=60)
    @given(steps=st.lists(st.tuples(st.sampled_from("atdvblsh"), st.integers(0, 14), st.integers(1, 50)), max_size=80))
    def test_it_holds_what_a_dictionary_would(self, policy, steps):
        table, model, now = make(policy), {}, 0.0
        for what, n, size in steps:
            now += size
            if what == "a":
                table.add(key(n), Entry(size, size, now, tenant=bytes([n % 2])))
                model[key(n)] = size
            elif what == "t":
                table.touch(key(n), now)
            elif what == "d":
                assert table.discard(key(n)) == (model.pop(key(n), None) is not None)
            elif what == "l":
                table.observe_sequence([key((n + i * size) % 15) for i in range(8)], bytes([n % 3]))
            elif what == "h":
                said = SessionHint(HintKind(n % 6 + 1), bytes([n % 3]) * 16, size, now)
                table.hint(said, [key((n + i) % 15) for i in range(size)], bytes([n % 2]))
            elif what == "s":
                table.sort_by_last_use()
            else:
                for victim, entry in table.pop_victims(size, n):
                    assert model.pop(victim) == entry.size
                    if what == "b":
                        table.reinsert(victim, entry)
                        model[victim] = entry.size
            assert set(table) == set(model)
            assert table.total_bytes == sum(model.values())
            assert all(table.get(k) is not None for k in model)
        assert len(table.pop_victims(0, 99, at_least=99)) == len(model)


def test_fifo_does_not_care_for_uses_and_lfu_counts_them():
    for policy, first in (("FIFO", 0), ("LRU", 1), ("LFU", 2)):
        table = table_of(policy, 3)
        for n in (0, 0, 1, 1, 0):
            table.touch(key(n), 0)
        if policy == "LRU":
            table.touch(key(2), 0)
        assert gone(table, 1) == [key(first)]


def test_s3fifo_lets_a_flood_of_new_blocks_pass_by_what_was_used():
    table = table_of("S3FIFO", 10)
    for n in range(10):
        table.touch(key(n), 0)
    for n in range(10, 200):
        table.add(key(n), Entry(10, 10, n))
        if table.total_bytes > 200:
            table.pop_victims(10, 1)
    assert all(key(n) in table for n in range(10))


def test_s3fifo_knows_what_comes_back():
    table = table_of("S3FIFO", 10)
    (victim, _), *_ = table.pop_victims(1, 1)
    table.add(victim, Entry(10, 10, 0))
    assert victim not in gone(table, 9)


def test_the_end_of_a_prompt_goes_before_its_beginning():
    table = table_of("PrefixAware", 20)
    table.observe_sequence([key(n) for n in range(20)])
    assert gone(table, 20) == [key(n) for n in reversed(range(20))]


def test_a_block_stored_after_its_lookup_is_known_to_build_on_the_one_before_it():
    table = PrefixAware(CAPACITY)
    table.observe_sequence([key(n) for n in range(10)])
    for n in range(10):
        table.add(key(n), Entry(10, 10, 0))
    assert gone(table, 10) == [key(n) for n in reversed(range(10))]


def test_a_prefix_that_many_prompts_share_goes_last():
    table = PrefixAware(CAPACITY)
    prompts = [[key(0), key(1), *(key(100 * p + n) for n in range(5))] for p in range(1, 9)]
    for prompt in prompts:
        table.observe_sequence(prompt)
        for k in prompt:
            if not table.touch(k, 0) and k not in table:
                table.add(k, Entry(10, 10, 0))
    order = gone(table, 99)
    assert order[-2:] == [key(1), key(0)]
    for prompt in prompts:
        assert [k for k in order if k in prompt] == prompt[::-1]


def test_what_is_used_often_stays_longer():
    table = table_of("PrefixAware", 40)
    for _ in range(6):
        for n in range(20):
            table.touch(key(n), 0)
    assert sum(k in {key(n) for n in range(20)} for k in gone(table, 20)) <= 2


def test_a_made_up_circle_of_prompts_keeps_nothing_for_ever():
    table = table_of("PrefixAware", 3)
    for prompt in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0], [0, 0, 1, 1]):
        table.observe_sequence([key(n) for n in prompt])
    assert sorted(gone(table, 3)) == sorted(key(n) for n in range(3))


def test_what_one_tenant_asks_does_not_push_out_what_another_told():
    hints = SequenceHints(per_tenant=10, tenants=4)
    hints.add(b"quiet", key(1), key(0), 1)
    for n in range(1000):
        hints.add(b"loud", key(n), key(n + 1), 2)
    assert len(hints) == 11
    assert hints.pop(b"quiet", key(1)) == (key(0), 1)
    assert hints.pop(b"quiet", key(1)) is None
    assert hints.pop(b"quiet", key(999)) is None
    for n in range(9):
        hints.add(bytes([n]), key(1), key(0), 1)
    assert len(hints) <= 4 * 10


def test_ages_are_learned():
    """Blocks that come back after 100 steps and those that never do: at age 90 the former are the better kept."""
    ages = ReuseModel(1 << 11)
    for n in range(6000):
        ages.clock += 1
        ages.record(key(n), 0)
        ages.record(key(n % 100), 3)
        ages.refit()
    assert ages.index(4, ages.clock - 90) > 3 * ages.index(0, ages.clock - 90)


def test_a_restart_knows_the_uses_again():
    when = evict.encode_mtime_ns(1_700_000_000.9, 12)
    assert when // 1_000_000_000 == 1_700_000_000
    assert evict.decode_uses(when) == 12
    assert evict.decode_uses(evict.encode_mtime_ns(5.0, 9999)) == 255
    assert evict.decode_uses(1_700_000_000_123_456_789) == 0


def test_what_is_idle_or_old_is_named():
    table = evict.create_policy("LRU", CAPACITY)
    table.persist_every_s = 10
    for n, (used, made) in enumerate([(100, 50), (100, 90), (80, 90), (100, 0)]):
        table.add(key(n), Entry(10, 10, used, created=made))
    assert table.expired(99, 0) == [key(2)]
    assert table.expired(0, 60) == [key(0)]
    table.touch(key(2), 200)
    assert table.expired(99, 0) == []


def test_the_tenant_that_takes_the_most_makes_room():
    table = make("PerTenant")
    for n in range(30):
        table.add(key(n), Entry(10, 10, n, tenant=b"loud" if n < 20 else b"quiet"))
    assert table.tenants() == {b"loud": 200, b"quiet": 100}
    assert {e.tenant for _, e in table.pop_victims(100, 99)} == {b"loud"}
    assert {e.tenant for _, e in table.pop_victims_of(b"quiet", 30, 99)} == {b"quiet"}
    assert table.tenants() == {b"loud": 100, b"quiet": 70}
    assert table.pop_victims_of(b"nobody", 30, 99) == []
    assert table.total_bytes == 170


@pytest.mark.parametrize("policy", PINNED)
class TestPinning:
    def test_what_is_used_often_outlives_a_flood_and_goes_when_nothing_else_is_left(self, policy):
        table = table_of(policy, 10)
        for _ in range(2):
            assert table.touch(key(3), 0) is False
        assert table.pinned_bytes == 10
        for n in range(100, 200):
            table.add(key(n), Entry(10, 10, n))
            assert key(3) not in gone(table, 1)
        assert gone(table, 999)[-1] == key(3)
        assert table.pinned_bytes == table.total_bytes == 0

    def test_no_more_is_pinned_than_there_is_room_for(self, policy):
        table = table_of(policy, 40)
        for n in range(40):
            table.touch(key(n), 0)
            table.touch(key(n), 0)
        assert 0 < table.pinned_bytes <= CAPACITY // 5

    def test_what_was_popular_gives_its_place_back(self, policy):
        table = table_of(policy, 10)
        for n in (1, 1):
            table.touch(key(n), 0)
        assert table.pinned_bytes == 10
        for n in range(120):  # other uses, which halve the count
            table.touch(key(2 + n % 2), 0)
        assert table.pinned_bytes == 20
        assert key(1) in gone(table, 8)

    def test_a_pinned_block_that_is_removed_or_replaced_is_pinned_no_more(self, policy):
        table = table_of(policy, 3)
        for n in (1, 1, 2, 2):
            table.touch(key(n), 0)
        table.discard(key(1))
        table.add(key(2), Entry(30, 30, 0))
        assert (table.pinned_bytes, table.total_bytes) == (0, 40)
        assert sorted(gone(table, 9)) == sorted([key(0), key(2)])

    def test_a_restart_knows_how_often_it_was_used(self, policy):
        table = table_of(policy, 1)
        for _ in range(7):
            table.touch(key(0), PERSIST_EVERY_S - 1)
        assert table.uses(key(0)) == 7
        table.touch(key(0), PERSIST_EVERY_S + 1)
        entry = table.get(key(0))
        assert entry is not None
        assert entry.uses == 8
