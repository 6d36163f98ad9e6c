"""Lookups of an engine count once for each request: polls, repeats, ranks and cache groups do not add to them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from kvpool.engines.common.lookups import LookupTable
from kvpool.engines.lmcache.fingerprint import leading_chunks
from kvpool.engines.lmcache.rechecks import Rechecks
from kvpool.engines.vllm.pool_lookups import PoolLookups, tokens_per_block
from kvpool.protocol.wire import Tier
from kvpool.stats import Reason
from kvpool.transport.responses import LookupResult


class Source:
    """Answers with `present`; `gate` holds the answers back."""

    wait_s = 0.05

    def __init__(self, *present: bytes) -> None:
        self.present = present
        self.gate = threading.Event()
        self.gate.set()
        self.counted: list[tuple[int, int, Reason]] = []

    def query(self, keys: Any, deadline: float) -> LookupResult:
        self.gate.wait(5)
        return LookupResult([Tier.PEER if key in self.present else Tier.MISS for key in keys], Reason.NEVER_STORED)

    def count(self, keys: Any, hits: Any, reason: Reason) -> None:
        self.counted.append((len(keys), sum(hits), reason))


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_polls_of_a_request_count_once() -> None:
    source = Source(b"a", b"b")
    table = LookupTable(source)
    for _ in range(5):
        answers = [table.lookup(key, "r") for key in (b"a", b"b", b"c", b"d")]
        table.flush()
        until(lambda: len(source.counted) == 1)
    assert answers == [True, True, False, False]
    assert source.counted == [(4, 2, Reason.NEVER_STORED)]
    table.lookup(b"a", "another request")
    table.flush()
    until(lambda: len(source.counted) == 2)
    table.close()


def test_an_answer_that_came_too_late_found_nothing() -> None:
    source = Source(b"a")
    source.gate.clear()
    table = LookupTable(source)
    table.lookup(b"a", "r")
    table.flush()
    until(lambda: table.lookup(b"a", "r") is False)
    source.gate.set()
    until(lambda: source.counted)
    assert source.counted == [(1, 0, Reason.LATE)]
    table.close()


class Counting:
    """Stands for a client."""

    def __init__(self) -> None:
        self.counted: list[tuple[int, int, Reason]] = []

    def count_lookup(self, asked: int, found: int, reason: Reason) -> None:
        self.counted.append((asked, found, reason))


def test_a_token_with_a_block_in_several_cache_groups_counts_once() -> None:
    client: Any = Counting()
    lookups = PoolLookups(lambda: client, lambda _, keys: list(keys), (256, 128))
    assert tokens_per_block((256, 128)) == 128
    full = [bytes(8) + bytes([0, 0, 0, 0]) for _ in range(4)]  # 4 blocks of 256 tokens
    window = [bytes(8) + bytes([0, 0, 0, 1]) for _ in range(2)]  # the last 2 of 128
    lookups.count([*full, *window], [True, True, False, False, True, True], Reason.EXPIRED)
    assert client.counted == [(8, 4, Reason.EXPIRED)]


def test_lmcaches_second_question_for_the_chunks_it_loads_is_a_repeat() -> None:
    now = [0.0]
    rechecks = Rechecks(0, lambda: now[0])
    prompt = [b"a", b"b", b"c", b"d"]
    assert not rechecks.is_repeat(prompt)
    rechecks.counted(prompt, 2)
    assert rechecks.is_repeat(prompt[:2])
    assert not rechecks.is_repeat(prompt[:2]), "a new request for the same prompt"
    rechecks.counted(prompt[:2], 2)
    rechecks.counted(prompt[:2], 2)
    assert [rechecks.is_repeat([b"b"]) for _ in range(3)] == [True, True, False], "two requests, two repeats"
    rechecks.counted(prompt, 4)
    now[0] = 61.0
    assert not rechecks.is_repeat(prompt), "it was never loaded"
    for n in range(10_000):
        rechecks.counted([b"chunk %d" % n], 1)
    assert len(rechecks._pending) == 4096


def test_one_rank_counts_the_lookups_of_an_lmcache_inside_an_engine() -> None:
    for rank, counted in ((0, [(4, 2, Reason.EXPIRED), (2, 2, Reason.NONE)]), (1, [])):
        client: Any = Counting()
        rechecks = Rechecks(rank)
        prompt = [b"a", b"b", b"c", b"d"]
        rechecks.count(client, prompt, 2, Reason.EXPIRED)
        rechecks.count(client, prompt[:2], 2, Reason.NONE)  # before the load
        rechecks.count(client, prompt[:2], 2, Reason.NONE)  # another request
        assert client.counted == counted


def test_a_chunk_of_an_lmcache_server_counts_once_for_all_ranks() -> None:
    keys = [SimpleNamespace(chunk_hash=bytes([chunk]), rank=rank) for chunk in range(4) for rank in range(2)]
    assert leading_chunks(keys, set()) == (4, 0)
    assert leading_chunks(keys, set(range(8))) == (4, 4)
    assert leading_chunks(keys, {0, 1, 2, 3, 5, 6, 7}) == (4, 2), "a rank lacks its part of the third"
