"""A drive that returns errors or does not return at all is passed by until a canary comes back from it."""

from __future__ import annotations

import errno
import itertools
import threading

import pytest
from sc_nodes import wait_for

from kvpool_sidecar.storage.local.health import DriveHealth

EIO = OSError(errno.EIO, "Input/output error")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Canary:
    def __init__(self) -> None:
        self.sent = 0
        self.error: OSError | None = None

    def __call__(self) -> None:
        self.sent += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def canary():
    return Canary()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fence(canary, clock):
    return DriveHealth("nvme", canary, strikes=3, window_s=10, hung_s=5, retry_s=1, clock=clock)


def settle(fence, canary, sent):
    wait_for(lambda: canary.sent == sent and not fence._trying, f"canary {sent} has an answer")


def test_errors_spread_over_time_do_not_fence(fence, clock):
    for _ in range(10):
        fence.record_error(EIO)
        clock.now += 6
    assert not fence.fenced


def test_three_errors_in_a_short_time_fence_whatever_worked_between_them(fence):
    for n in range(3):
        assert not fence.fenced, n
        fence.record_error(EIO)
        with fence:
            pass
    assert fence.fenced


def test_a_canary_lets_the_drive_back_and_the_count_begins_anew(fence, canary):
    for _ in range(3):
        fence.record_error(EIO)
    fence.tick()
    settle(fence, canary, 1)
    assert not fence.fenced
    fence.record_error(EIO)
    fence.record_error(EIO)
    assert not fence.fenced


def test_canaries_that_are_lost_come_less_and_less_often(fence, canary, clock):
    canary.error = EIO
    for _ in range(3):
        fence.record_error(EIO)
    sent_at = []
    for _ in range(100):
        before = canary.sent
        fence.tick()
        if fence._trying or canary.sent > before:
            settle(fence, canary, before + 1)
            sent_at.append(clock.now)
        clock.now += 0.5
    waits = [b - a for a, b in itertools.pairwise(sent_at)]
    assert waits == [1, 2, 4, 8, 16]
    assert fence.fenced


def test_a_call_that_does_not_return_fences_and_the_drive_is_back_when_it_does(fence, canary, clock):
    gate, inside = threading.Event(), threading.Event()

    def hang() -> None:
        with fence:
            inside.set()
            gate.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait()
    clock.now += 4
    fence.tick()
    assert not fence.fenced
    clock.now += 2
    fence.tick()
    assert fence.fenced
    settle(fence, canary, 1)
    assert fence.fenced, "a canary came back, but the call still hangs"
    gate.set()
    thread.join()
    clock.now += 2
    fence.tick()
    settle(fence, canary, 2)
    assert not fence.fenced


def test_a_canary_that_hangs_is_the_only_one(fence, canary, clock):
    gate = threading.Event()
    sent = []
    fence._canary = lambda: (sent.append(1), gate.wait())
    for _ in range(3):
        fence.record_error(EIO)
    for _ in range(20):
        fence.tick()
        clock.now += 100
    wait_for(lambda: sent, "the canary is on its way")
    assert (len(sent), fence.fenced) == (1, True)
    gate.set()
    wait_for(lambda: not fence.fenced, "the canary came back")
