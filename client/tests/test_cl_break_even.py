"""A tier that loads slower than the engine computes is not promised, until a trial shows that it became fast."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_clock import Clock
from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.break_even import BreakEven
from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.engines.vllm.prefill_meter import PrefillMeter
from kvpool.protocol.wire import Op, Tier
from kvpool.stats import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

FP = b"f" * 32
TOKENS = 256
LOCAL, PEER, SHARED, MISS = Tier.LOCAL, Tier.PEER, Tier.SHARED, Tier.MISS


def measured(clock: Clock, *, is_enabled: bool = True) -> BreakEven:
    """An engine that computes 10,000 tokens a second, a fast drive, and a shared tier that takes twice as long."""
    even = BreakEven(is_enabled=is_enabled, clock=clock)
    even.computed(10_000, 1.0)
    for _ in range(4):
        even.loaded(LOCAL, 1000, 0.01)
        even.loaded(SHARED, 1000, 0.2)
    return even


def held_back(even: BreakEven, *tiers: Tier, exhaustive: bool = False) -> list[Tier]:
    asked = list(tiers)
    assert even.hold_back(asked, exhaustive=exhaustive) == (asked != list(tiers))
    return asked


def test_a_slow_tier_is_not_promised_and_a_fast_one_is(clock: Clock) -> None:
    even = measured(clock)
    assert held_back(even, LOCAL, SHARED) == [LOCAL, SHARED], "the first one is a trial"
    assert held_back(even, LOCAL, LOCAL, SHARED, LOCAL) == [LOCAL, LOCAL, MISS, MISS], "a prefix ends there"
    assert held_back(even, SHARED, LOCAL, SHARED, exhaustive=True) == [MISS, LOCAL, MISS]
    assert held_back(even, LOCAL, PEER, MISS) == [LOCAL, PEER, MISS], "a tier that was never measured is promised"


def test_nothing_is_held_back_before_both_sides_are_measured(clock: Clock) -> None:
    even = BreakEven(is_enabled=True, clock=clock)
    for _ in range(10):
        even.loaded(SHARED, 1000, 60.0)
    assert held_back(even, SHARED) == [SHARED]
    even.computed(1000, 0.001)
    even.loaded(SHARED, 1000, 60.0)
    assert held_back(even, SHARED) == [SHARED], "too few computed tokens"
    even = BreakEven(is_enabled=True, clock=clock)
    even.computed(10_000, 0.1)
    for _ in range(3):
        even.loaded(SHARED, 1000, 60.0)
    assert held_back(even, SHARED) == [SHARED], "too few loads"


def test_nothing_is_held_back_while_it_is_off(clock: Clock) -> None:
    even = measured(clock, is_enabled=False)
    for _ in range(3):
        assert held_back(even, SHARED) == [SHARED]


def test_trials_come_regularly_and_a_tier_that_became_fast_is_promised_again(clock: Clock) -> None:
    even = measured(clock)
    trials = 0
    for _ in range(300):  # half a minute
        trials += held_back(even, SHARED) == [SHARED]
        clock.now += 0.1
    assert trials == 3
    for _ in range(6):  # the trials' loads
        even.loaded(SHARED, 1000, 0.02)
    assert all(held_back(even, SHARED) == [SHARED] for _ in range(10))


def test_a_tier_near_the_limit_does_not_flap(clock: Clock) -> None:
    even = measured(clock)
    held_back(even, SHARED)
    for seconds in [0.09, 0.11] * 20:  # around the engine's own 0.1
        even.loaded(SHARED, 1000, seconds)
        assert held_back(even, SHARED) == [MISS]
    even = measured(clock)
    for seconds in [0.09, 0.11] * 20:
        even.loaded(LOCAL, 1000, seconds)
        assert held_back(even, LOCAL) == [LOCAL]


def test_a_prefill_is_measured_by_the_blocks_of_a_step() -> None:
    clock, counted = Clock(), []

    class Counting:
        def count_computed(self, tokens: int, seconds: float) -> None:
            counted.append((tokens, round(seconds, 3)))

    client: Any = Counting()
    meter = PrefillMeter(lambda: client, (TOKENS,), clock)
    for blocks, seconds in ((0, 0.1), (0, 0.5), (0, 0.02), (0, 0.02), (16, 0.02), (0, 0.02), (1, 9.0), (16, 0.1)):
        meter.offered(blocks)
        clock.now += seconds
        meter.step_ended()
    assert counted == [(16 * TOKENS, 0.5)], "the longest of the last steps; none after a pause"
    several = PrefillMeter(lambda: client, (TOKENS, 16), clock)
    for _ in range(9):
        several.offered(64)
        clock.now += 0.1
        several.step_ended()
    assert len(counted) == 1


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    deadlines = Deadlines(lookup_ms=5000, load_min_ms=20_000, breaker_failures=100)
    config = ClientConfig(socket=fake.path, connect_retry_ms=50, deadlines=deadlines, break_even=True)
    client = Client(config, fingerprint=FP, tokens_per_block=TOKENS)
    assert client.wait_connected(5)
    yield client
    client.close()


def test_a_client_stops_promising_a_slow_tier_and_recovers(fake: FakeSidecar, client: Client) -> None:
    names = [block_id_of(f"block {n}") for n in range(4)]
    for name in names:
        fake.plant(name, FP, b"x" * 4096)
    pause = threading.Event()
    slow = [True]

    def delay(*_: Any) -> bool:
        if slow[0]:
            pause.wait(0.2)
        return False

    fake.faults = {Op.OPEN: delay}
    client.count_computed(100_000, 0.01)  # 0.01 ms for the 1,024 tokens
    for _ in range(4):
        assert client.lookup(names) == [LOCAL] * 4
        assert all(r.ok for r in client.get_into(names, [bytearray(4096) for _ in names]))
    client.find(names)  # the trial
    tiers, reason = client.find(names)
    assert tiers == [MISS] * 4
    assert reason == Reason.SLOWER_THAN_COMPUTE
    client.lookup(names)
    stats = client.stats()
    assert stats["lookup_misses"] == {"slower-than-compute": 4}
    assert stats["time"]["lost_us"] > 4 * 150_000
    assert "saved_us" not in stats["time"]
    slow[0] = False
    client.count_computed(1_000_000, 1000.0)  # and the engine is busy: a token takes a millisecond
    for _ in range(60):
        client.count_computed(1_000_000, 1000.0)
    deadline = time.monotonic() + 30
    while client.find(names).reason == Reason.SLOWER_THAN_COMPUTE:
        assert time.monotonic() < deadline
        assert all(r.ok for r in client.get_into(names, [bytearray(4096) for _ in names]))  # of a trial
    assert client.stats()["time"]["saved_us"] > 0
