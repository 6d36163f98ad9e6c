"""The guard of the default order: LRU where that is better, the learned order where it is worth something."""

from __future__ import annotations

import random

import pytest

from kvpool_sidecar.eviction import Entry, Lru, PrefixAware
from kvpool_sidecar.eviction.recency_guard import RecencyGuard
from kvpool_sidecar.eviction.reuse_model import ReuseModel
from kvpool_testing.blocks import key

SIZE = 10


def lose(guard: RecencyGuard, rounds: int, first: int = 0) -> None:
    """The table evicts the block that comes next, which LRU has."""
    for n in range(first, first + rounds):
        for one in (2 * n, 2 * n + 1):
            guard.store(key(one), SIZE)
        guard.evict(key(2 * n + 1))
        guard.store(key(2 * n + 1), SIZE)
        for one in (2 * n, 2 * n + 1):
            guard.evict(key(one))


def win(guard: RecencyGuard, rounds: int, first: int) -> None:
    """The table keeps one block for good, over a block that LRU would rather have and that is used never."""
    guard.store(key(first), SIZE)
    for n in range(first + 1, first + rounds):
        guard.store(key(n), SIZE)
        guard.evict(key(n))
        guard.use(key(first))


def test_an_order_is_trusted_until_it_has_lost_more_than_its_debt_and_again_when_it_has_won_that_back():
    guard = RecencyGuard()
    assert (guard.trust, guard.candidates(32)) == (1.0, 32)
    lose(guard, 40)
    assert guard.candidates(32) == 32
    lose(guard, 35, 40)
    assert 1 < guard.candidates(32) < 32
    lose(guard, 40, 75)
    assert guard.candidates(32) == 1
    win(guard, 200, 10_000)
    assert guard.candidates(32) == 32


def test_gains_of_the_past_are_soon_used_up():
    guard = RecencyGuard()
    win(guard, 20_000, 0)
    lose(guard, 600, 50_000)
    assert guard.candidates(32) == 1


def test_an_order_that_is_lru_has_a_balance_of_nothing_whatever_the_sample():
    for most in (1 << 15, 64):
        guard, table, rng = RecencyGuard(most), Lru(), random.Random(1)
        for _ in range(20_000):
            n = int(rng.paretovariate(0.5)) % 3000
            if table.touch(key(n), 0):
                raise AssertionError
            if key(n) in table:
                guard.use(key(n))
                continue
            table.add(key(n), Entry(SIZE, SIZE, 0))
            guard.store(key(n), SIZE)
            if len(table) > 500:
                guard.evict(table.pop_victims(0, 1, at_least=1)[0][0])
        assert abs(guard.status.balance) < 50
        assert guard.status.accesses > 100
        assert (guard.status.sampled < 1) == (most == 64)


def test_a_removal_that_no_order_decided_and_a_victim_that_was_put_back_are_nobody_s_loss():
    guard = RecencyGuard()
    for n in range(10):
        guard.store(key(n), SIZE)
    guard.discard(key(9))
    guard.store(key(9), SIZE)
    guard.evict(key(9))
    guard.restore(key(9), SIZE)
    guard.store(key(9), SIZE)
    assert guard.status.balance == 0


def replayed(table, prompts: list[list[bytes]], room: int) -> list[int]:
    """Blocks found of each prompt."""
    found = []
    for prompt in prompts:
        found.append(next((n for n, k in enumerate(prompt) if k not in table), len(prompt)))
        table.observe_sequence(prompt)
        for k in prompt:
            if not table.touch(k, 0) and k not in table:
                table.add(k, Entry(SIZE, SIZE, 0))
        if len(table) > room:
            table.pop_victims(0, len(prompt), at_least=len(table) - room)
    return found


def habit(count: int, first: int) -> list[list[bytes]]:
    """Some prompts come back for ever, far apart, and most only once: a learner keeps the former, LRU neither."""
    prompts = []
    for n in range(count):
        number = n % 80 if n % 4 == 0 else first + n
        prompts.append([key(100 * number + d) for d in range(4)])
    return prompts


def trap(count: int, first: int) -> list[list[bytes]]:
    """What was used much is never used again; each new prompt comes back once, within what LRU keeps, and no more."""
    rng = random.Random(3)
    prompts: list[list[bytes]] = []
    recent: list[int] = []
    for n in range(count):
        recent.append(first + n)
        prompts.append([key(100 * (first + n) + d) for d in range(4)])
        if len(recent) > 30:
            back = recent.pop(rng.randrange(4))
            prompts.append([key(100 * back + d) for d in range(4)])
    return prompts


def test_the_learned_order_gains_on_habits_falls_back_where_they_break_and_gains_again():
    table, lru, room = PrefixAware(160 * SIZE), Lru(), 160
    phases = [habit(3000, 1000), trap(3000, 100_000), habit(6000, 500_000)]
    rates = []
    for prompts in phases:
        mine, plain = replayed(table, prompts, room), replayed(lru, prompts, room)
        blocks = sum(map(len, prompts))
        rates.append((sum(mine) / blocks, sum(plain) / blocks))
    assert table.guard.accesses > 0
    assert rates[0][0] > rates[0][1] + 0.05
    assert rates[1][0] > rates[1][1] - 0.02
    assert rates[2][0] > rates[2][1] + 0.05


def test_the_same_traffic_is_evicted_alike_each_time():
    prompts = habit(400, 1000) + trap(400, 100_000)
    first, second = (PrefixAware(160 * SIZE) for _ in range(2))
    assert replayed(first, prompts, 160) == replayed(second, prompts, 160)
    assert list(first) == list(second)


def test_blocks_of_which_no_lookup_told_the_place_go_in_the_order_of_last_use():
    table, lru, rng = PrefixAware(1 << 20), Lru(), random.Random(5)
    for _ in range(5000):
        n = int(rng.paretovariate(0.6)) % 2000
        for one in (table, lru):
            if not one.touch(key(n), 0) and key(n) not in one:
                one.add(key(n), Entry(SIZE, SIZE, 0))
        if len(table) > 300:
            assert table.pop_victims(0, 1, at_least=1)[0][0] == lru.pop_victims(0, 1, at_least=1)[0][0]
    assert set(table) == set(lru)


def test_a_lookup_after_a_restart_teaches_the_place_of_blocks_that_are_there():
    table = PrefixAware(1 << 20)
    for n in range(8):
        table.add(key(n), Entry(SIZE, SIZE, n))
    table.sort_by_last_use()
    table.observe_sequence([key(n) for n in range(4)])
    for n in range(4):
        table.touch(key(n), 0)
    assert [k for k, _ in table.pop_victims(0, 8, at_least=8)] == [key(n) for n in (4, 5, 6, 7, 3, 2, 1, 0)]


@pytest.mark.parametrize("remembered", [200, 1 << 15])
def test_a_small_memory_learns_the_same_from_a_sample_of_blocks(remembered):
    """Half of the blocks come back after 2,000 others, far beyond what 200 remembered blocks would see unsampled."""
    ages = ReuseModel(1 << 11, remembered)
    for n in range(40_000):
        ages.clock += 1
        ages.record(key(n), 0)
        if n >= 2000 and n % 2:
            ages.record(key(n - 2000), 5)
        ages.refit()
    assert ages.index(0, ages.clock - 1500) > 2 * ages.index(0, ages.clock - 3000)
    assert (ages.sampled < 1) == (remembered == 200)


def test_blocks_that_still_wait_count_so_that_a_young_memory_is_not_too_hopeful():
    """A hundredth comes back at once; of the rest nothing is known but that they wait."""
    ages = ReuseModel(1 << 22)
    for n in range(6000):
        ages.clock += 1 << 14
        ages.record(key(n), 0)
        if n % 100 == 0:
            ages.record(key(n), 1)
        ages.refit()
    hope = ages.index(0, ages.clock)
    for n in range(6000, 12_000):
        ages.clock += 1 << 14
        ages.record(key(n), 0)
        ages.record(key(n), 1)
        ages.refit()
    assert ages.index(0, ages.clock) > 20 * hope
