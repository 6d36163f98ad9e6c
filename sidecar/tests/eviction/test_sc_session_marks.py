"""What a session says of its blocks changes their order, within bounds, and nothing else."""

from __future__ import annotations

import pytest

from kvpool.protocol.hint import HintKind
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.eviction import Entry, PerTenant, PrefixAware
from kvpool_sidecar.eviction.session_marks import SessionHint
from kvpool_testing.blocks import key

CAPACITY = 1000
ONE, OTHER = b"1" * 16, b"2" * 16


def prompt(table: evict.EvictionPolicy, numbers: list[int], tenant: bytes = b"") -> list[bytes]:
    """Look up and store a prompt of blocks of 10 bytes."""
    keys = [key(n) for n in numbers]
    table.observe_sequence(keys, tenant)
    for k in keys:
        if not table.touch(k, 0) and k not in table:
            table.add(k, Entry(10, 10, 0, tenant=tenant))
    return keys


def gone(table: evict.EvictionPolicy, count: int) -> list[bytes]:
    return [k for k, _ in table.pop_victims(0, count, at_least=count)]


def test_the_blocks_of_an_ended_session_are_evicted_first_and_from_their_end():
    table = PrefixAware(CAPACITY)
    ended = prompt(table, list(range(10)))
    prompt(table, list(range(20, 30)))
    assert table.hint(SessionHint(HintKind.ENDED, ONE), ended) == 10
    assert gone(table, 10) == ended[::-1]


def test_a_prefix_that_another_session_uses_stays_when_one_session_ends():
    table = PrefixAware(CAPACITY)
    first = prompt(table, [0, 1, 2, 3])
    second = prompt(table, [0, 1, 4, 5])
    table.hint(SessionHint(HintKind.TURN, OTHER), second)
    assert table.hint(SessionHint(HintKind.ENDED, ONE), first) == 2
    assert gone(table, 2) == [key(3), key(2)]
    assert set(table) == set(second)


def test_a_session_that_continues_after_all_is_no_longer_ended():
    table = PrefixAware(CAPACITY)
    ended = prompt(table, [0, 1])
    table.hint(SessionHint(HintKind.ENDED, ONE), ended)
    prompt(table, [0, 1])
    other = prompt(table, [5, 6])
    table.hint(SessionHint(HintKind.ENDED, OTHER), other)
    assert gone(table, 2) == other[::-1]


def test_blocks_that_are_stored_after_the_end_of_their_session_are_evicted_first():
    table = PrefixAware(CAPACITY)
    prompt(table, [5, 6])
    table.hint(SessionHint(HintKind.ENDED, ONE), [key(0), key(1)])
    late = prompt(table, [0, 1])
    assert gone(table, 2) == late[::-1]


def test_blocks_that_a_session_expects_to_use_soon_outlive_others():
    table = PrefixAware(CAPACITY)
    kept = prompt(table, [0, 1])
    for n in range(100, 140):
        prompt(table, [n])
    table.hint(SessionHint(HintKind.KEEP, ONE, 1.0, now=0.0), [])
    for n in range(200, 210):
        prompt(table, [n])
    assert table.hint(SessionHint(HintKind.KEEP, ONE, 1.0, now=10.0), kept) == 2
    assert not set(kept) & set(gone(table, 30))


def test_expected_blocks_take_no_more_than_their_share():
    table = PrefixAware(CAPACITY)
    keys = prompt(table, list(range(40)))
    assert table.hint(SessionHint(HintKind.KEEP, ONE, 60.0), keys) == 10
    assert table.marks.expected_bytes == 100
    for k in keys[:5]:
        table.discard(k)
    assert table.marks.expected_bytes == 50


def test_what_is_expected_sooner_replaces_what_is_expected_later():
    table = PrefixAware(CAPACITY)
    table.hint(SessionHint(HintKind.TURN, ONE, now=0.0), [])
    late, soon = prompt(table, list(range(10))), prompt(table, list(range(10, 40)))
    table.hint(SessionHint(HintKind.KEEP, ONE, 600.0, now=10.0), late)
    assert table.hint(SessionHint(HintKind.KEEP, OTHER, 5.0, now=10.0), soon) == 10
    assert table.marks.expected_bytes <= 100


def test_nothing_is_exempt_from_eviction():
    table = PrefixAware(CAPACITY)
    keys = prompt(table, list(range(8)))
    table.hint(SessionHint(HintKind.KEEP, ONE, 3600.0), keys)
    table.hint(SessionHint(HintKind.TTL, ONE, 3600.0), keys)
    assert sorted(gone(table, 99)) == sorted(keys)
    assert table.marks.expected_bytes == 0


def test_a_session_that_never_returns_lowers_the_worth_of_expectations_and_one_that_returns_raises_it():
    table = PrefixAware(CAPACITY)
    before = table.marks.truth
    for n in range(60):
        keys = prompt(table, [n * 2, n * 2 + 1])
        table.hint(SessionHint(HintKind.KEEP, bytes([n]) * 16, 1.0, now=float(n)), keys)
        gone(table, len(table) - 40 if len(table) > 40 else 0)
    assert table.marks.truth < before / 2
    low = table.marks.truth
    for n in range(60):
        keys = prompt(table, [1000, 1001])
        table.hint(SessionHint(HintKind.KEEP, ONE, 600.0, now=100.0 + n), keys)
    assert table.marks.truth > low


def test_a_session_that_is_forgotten_is_as_if_it_had_said_nothing():
    table = PrefixAware(CAPACITY)
    keys = prompt(table, [0, 1, 2])
    table.hint(SessionHint(HintKind.KEEP, ONE, 60.0), keys)
    table.hint(SessionHint(HintKind.ENDED, ONE), keys)
    table.hint(SessionHint(HintKind.FORGET, ONE), keys)
    assert table.marks.expected_bytes == 0
    other = prompt(table, [5, 6])
    table.hint(SessionHint(HintKind.ENDED, OTHER), other)
    assert gone(table, 2) == other[::-1]


def test_a_retention_is_learned_from_and_promises_nothing():
    asked, plain = PrefixAware(CAPACITY), PrefixAware(CAPACITY)
    for table in (asked, plain):
        keys = prompt(table, list(range(50)))
        if table is asked:
            assert table.hint(SessionHint(HintKind.TTL, ONE, 300.0), keys) == 50
        prompt(table, list(range(100, 150)))
    assert gone(asked, 50) == gone(plain, 50)


def test_a_tenant_that_hints_does_not_change_the_order_of_a_silent_one():
    def order(says: bool) -> list[bytes]:
        table = PerTenant(lambda _tenant: PrefixAware(CAPACITY))
        for n in range(20):
            keys = prompt(table, [100 * n, 100 * n + 1, 100 * n + 2], b"loud")
            prompt(table, [100 * n + 50, 100 * n + 51, 100 * n + 52], b"silent")
            if says:
                assert table.hint(SessionHint(HintKind.KEEP, bytes([n]) * 16, 3600.0, now=n), keys, b"loud") >= 0
        return [k for k, _ in table.pop_victims_of(b"silent", 1 << 30, 30)]

    assert order(says=True) == order(says=False)


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "S3FIFO"])
def test_other_orders_take_no_hints(policy):
    table = evict.create_policy(policy, CAPACITY)
    keys = prompt(table, [0, 1])
    assert table.hint(SessionHint(HintKind.ENDED, ONE), keys) == 0
    assert table.marks is None
