"""The figures of the hit rate: what a client counts and reports for lookups that find nothing, half, or all."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool.stats import Reason, Stats, depth_label, ratio_text
from kvpool.transport.connection import Reply
from kvpool.transport.responses import lookup_tiers, miss_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

FP = b"f" * 32
NAMES = [block_id_of(f"block {n}") for n in range(8)]


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    deadlines = Deadlines(lookup_ms=2000, breaker_failures=100)
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50, deadlines=deadlines), fingerprint=FP)
    assert client.wait_connected(5)
    yield client
    client.close()


def plant(fake: FakeSidecar, count: int) -> None:
    for name in NAMES[:count]:
        fake.plant(name, FP, b"x" * 4096)


@pytest.mark.parametrize(
    ("found", "misses", "depth"),
    [(0, {"absent": 8}, {"start": 1}), (4, {"absent": 4}, {"below-16": 1}), (8, {}, {})],
    ids=["nothing", "half", "all"],
)
def test_a_lookup_counts_what_it_asked_for_and_what_it_found(
    fake: FakeSidecar, client: Client, found: int, misses: dict[str, int], depth: dict[str, int]
) -> None:
    plant(fake, found)
    client.lookup(NAMES)
    stats = client.stats()
    assert stats["lookup"]["asked_blocks"] == 8
    assert stats["lookup"]["found_blocks"] == found
    assert stats["lookup"]["requests"] == 1
    assert stats["lookup"].get("complete", 0) == (found == 8)
    assert stats["lookup_misses"] == misses
    assert stats["lookup_depth"] == depth
    assert stats["misses"] == {}, "a block that was not found was never promised"


def test_blocks_that_nobody_has_are_asked_for_all_the_same(fake: FakeSidecar, client: Client) -> None:
    """1,000 prompts without a hit and one with hits are a hit rate of 0, not of 1."""
    plant(fake, 8)
    for n in range(1000):
        client.lookup([block_id_of(f"new {n}/{i}") for i in range(16)])
    client.lookup(NAMES)
    client.report()
    reported: dict[str, int] = {}
    for report in fake.reports:
        for figure, n in report.get("lookup", {}).items():
            reported[figure] = reported.get(figure, 0) + n
    assert reported == {"requests": 1001, "complete": 1, "asked_blocks": 16_008, "found_blocks": 8}
    assert ratio_text(reported["found_blocks"], reported["asked_blocks"]) == "0.00"


def test_a_lookup_that_gets_no_answer_counts_as_asked_for() -> None:
    client = Client(ClientConfig(socket="/nowhere/kv.sock"), fingerprint=FP)
    client.lookup(NAMES)
    client.close()
    assert client.stats()["lookup"] == {"requests": 1, "asked_blocks": 8, "found_blocks": 0}
    assert client.stats()["lookup_misses"] == {"no-sidecar": 8}


def test_find_counts_nothing_until_the_plug_in_does(fake: FakeSidecar, client: Client) -> None:
    plant(fake, 2)
    tiers, reason = client.find(NAMES)
    assert [bool(tier) for tier in tiers] == [True] * 2 + [False] * 6
    assert reason == Reason.ABSENT
    assert client.find(NAMES[:2]).reason == Reason.NONE
    assert client.stats()["lookup"] == {}
    client.count_lookup(5, 2, reason)
    assert client.stats()["lookup"] == {"requests": 1, "asked_blocks": 5, "found_blocks": 2}


def test_what_was_counted_is_reported_when_the_client_closes(fake: FakeSidecar, client: Client) -> None:
    client.lookup(NAMES)
    client.close()
    assert sum(report["lookup"]["asked_blocks"] for report in fake.reports if "lookup" in report) == 8


def test_what_was_counted_is_reported_within_seconds(fake: FakeSidecar, client: Client) -> None:
    client.lookup(NAMES)
    deadline = time.monotonic() + 30
    while not any("lookup" in report for report in fake.reports):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_handshake_offers_reports_and_the_tokens_of_a_block(fake: FakeSidecar) -> None:
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP, tokens_per_block=64)
    assert client.wait_connected(5)
    client.close()
    assert fake.hellos[0].lookup_reports
    assert fake.hellos[0].tokens_per_block == 64
    hello = wire.ClientHello.unpack(fake.hellos[0].pack())
    assert hello == fake.hellos[0]
    with pytest.raises(ProtocolError):
        wire.ClientHello.unpack(wire.ClientHello(FP, tokens_per_block=wire.MAX_BLOCK_TOKENS + 1).pack())


def answer(body: bytes) -> Any:
    return Reply(len(body), body, [])


def test_the_first_miss_may_carry_a_cause() -> None:
    evicted = wire.MISS_CAUSE + wire.MissCause.EVICTED_CAPACITY
    assert lookup_tiers(answer(b"\1\2\0\0"), 4) == (b"\1\2\0\0", None)
    tiers, cause = lookup_tiers(answer(bytes([1, 2, evicted, 0])), 4)
    assert (bytes(tiers), cause) == (b"\1\2\0\0", wire.MissCause.EVICTED_CAPACITY)
    assert miss_reason(wire.MissCause.EVICTED_CAPACITY) == Reason.EVICTED_CAPACITY
    assert miss_reason(99) == Reason.ABSENT, "a cause of a later release"
    for wrong in (b"\x04\0", bytes([0, evicted]), bytes([evicted, evicted])):
        with pytest.raises(ProtocolError):
            lookup_tiers(answer(wrong), 2)


def test_every_cause_is_a_reason() -> None:
    assert {cause.label for cause in wire.MissCause} <= {reason.value for reason in Reason}


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, ""), (0, 7, "0.00"), (1, 2, "0.50"), (9999, 10_000, "0.99"), (7, 7, "1.00"), (16, 16_016, "0.00")],
)
def test_a_rate_is_empty_only_if_nothing_was_asked_and_one_only_if_all_was_found(part: int, whole: int, text: str):
    assert ratio_text(part, whole) == text


def test_depths_cover_every_number_of_blocks() -> None:
    assert [depth_label(n) for n in (0, 1, 3, 4, 63, 64, 256)] == [
        "start", "below-4", "below-4", "below-16", "below-64", "below-256", "deep",
    ]  # fmt: skip


def test_an_empty_lookup_is_no_lookup() -> None:
    stats = Stats()
    stats.add_lookup(0, 0, Reason.NONE)
    assert stats.take_report() == {}


def test_counting_waits_for_no_thread_that_reads_the_totals() -> None:
    stats = Stats()
    ended = threading.Event()

    def count() -> None:
        for _ in range(1000):
            stats.add_lookup(4, 2, Reason.NEVER_STORED)
        ended.set()

    with stats._lock:
        threading.Thread(target=count, daemon=True).start()
        assert ended.wait(30)
    assert stats.snapshot()["lookup"] == {"requests": 1000, "asked_blocks": 4000, "found_blocks": 2000}
