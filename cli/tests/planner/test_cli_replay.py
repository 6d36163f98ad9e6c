"""Replays of traces with the sidecar's own policies, and traces that are refused."""

from __future__ import annotations

import builtins
import itertools
import json

import pytest

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import replay
from kvpool_sidecar.eviction import POLICIES

BYTES = 1000
"""Of a block, in these tests."""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at, ids, tokens=None):
    return {"timestamp": at, "input_length": tokens or 512 * len(ids), "hash_ids": ids}


def test_a_pool_that_holds_everything_has_the_hits_of_every_repeated_prefix(tmp_path):
    rows = [row(0, [1, 2, 3, 4]), row(1, [1, 2, 9, 4]), row(2, [1, 2, 3, 4], tokens=2000)]
    trace = replay.read_trace(write(tmp_path / "t", rows))
    # the second prompt finds 2 blocks, block 4 is behind a miss; the third finds all
    assert replay.ceiling(trace) == (2 * 512 + 2000) / (4 * 512 + 4 * 512 + 2000)
    assert trace.unique == 5
    for policy in POLICIES:
        assert replay.replay(trace, policy, 100 * BYTES, BYTES).hit_rate == replay.ceiling(trace)


def test_a_small_pool_evicts_by_its_policy(tmp_path):
    # each prompt has 5 blocks of its own; 10 blocks are kept at most, and 7 after an eviction
    rows = [row(n, [100 * n + k for k in range(5)]) for n in (1, 2, 3)] + [row(4, [300, 301, 302, 303, 304])]
    trace = replay.read_trace(write(tmp_path / "t", rows))
    assert replay.replay(trace, "LRU", 12 * BYTES, BYTES).hit_rate == 0.25
    again = [*rows[:3], row(4, [100, 101, 102, 103, 104])]
    assert replay.replay(replay.read_trace(write(tmp_path / "t", again)), "LRU", 12 * BYTES, BYTES).hit_rate == 0


def test_prompts_are_replayed_in_the_order_of_their_times(tmp_path):
    trace = replay.read_trace(write(tmp_path / "t", [row(5, [1]), row(1, [1, 2])]))
    assert [tokens for tokens, _ in trace.prompts] == [1024, 512]


def test_capacities_double_up_to_the_first_that_holds_every_block(tmp_path):
    trace = replay.read_trace(write(tmp_path / "t", [row(0, list(range(100)))]))
    sizes = replay.capacities(trace, BYTES)
    assert sizes[-1] == 128 * BYTES
    assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
    assert replay.capacities(trace, BYTES, (3, 13)) == [3, 6, 12]


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "{", "[]", "null", '{"timestamp": 1}', json.dumps(row(-1, [1])), json.dumps(row(True, [1])),
        json.dumps(row(0, [-1])), json.dumps(row(0, [True])), json.dumps(row(0, [2**63])),
        '{"timestamp": 0, "input_length": 0, "hash_ids": [1]}', json.dumps(row(0, [], tokens=5)), "[" * 100_000,
        '{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}',
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_without_its_content(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(UsageError) as caught:
        replay.read_trace(tmp_path / "t")
    assert len(str(caught.value)) < 300


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError):
        replay.read_trace(tmp_path / "t")


def test_without_the_sidecars_package_the_user_is_asked_to_install_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("kvpool_sidecar"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    trace = replay.read_trace(write(tmp_path / "t", [row(0, [1])]))
    with pytest.raises(UsageError, match=r"kvpool-cli\[trace\]"):
        replay.replay(trace, "LRU", BYTES, BYTES)
