"""The measurement of eviction orders: what a trace must be, what its rows say, and how a node's arrangement counts."""

from __future__ import annotations

import json

import pytest
from bench import trace
from bench.trace_file import TraceError, read
from bench.trace_replay import Arrangement, optimum, replay
from bench.workloads import WORKLOADS

from kvpool_sidecar.eviction import POLICIES

SMALL = trace.make(3)[:1200]


def _line(**changes) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]} | changes)


def _written(path, requests):
    ids: dict[bytes, int] = {}
    path.write_text(
        "\n".join(
            _line(
                timestamp=int(r.at * 1000),
                input_length=r.tokens,
                hash_ids=[ids.setdefault(k, len(ids)) for k in r.keys],
            )
            for r in requests
        )
    )
    return str(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        (_line(input_length=0), "input_length"),
        (_line(input_length="9"), "input_length"),
        (_line(hash_ids=None), "hash_ids"),
        (_line(hash_ids=[0, -1]), "hash_ids"),
        (_line(hash_ids=[0, True]), "hash_ids"),
        (_line(hash_ids=[1 << 63]), "hash_ids"),
        (_line(hash_ids=[0] * 70_000), "hash_ids"),
        (_line(timestamp=-1), "timestamp"),
        (_line(timestamp=float("nan")), "timestamp"),
        ("[" * 100_000, "is not JSON"),
        (" " * ((4 << 20) + 1), "longer than"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_not_repeated(tmp_path, line, problem):
    path = tmp_path / "t.jsonl"
    path.write_text(_line() + "\n" + line + "\n")
    with pytest.raises(TraceError) as raised:
        read(path)
    assert f"{path}:2" in str(raised.value)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_trace_that_is_missing_empty_or_binary_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="no request"):
        read(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        read(tmp_path / "binary")


def test_requests_are_replayed_in_the_order_of_their_times(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(_line(timestamp=5000) + "\n" + _line(timestamp=1000) + "\n")
    assert [request.at for request in read(path)] == [1.0, 5.0]


def test_no_policy_is_above_the_optimum_and_room_for_all_is_the_optimum():
    best = optimum(SMALL, 800)
    assert all(replay(SMALL, policy, 800).percent <= best for policy in POLICIES)
    assert replay(SMALL, "LRU", 10**6).percent == pytest.approx(optimum(SMALL, 10**6))


@pytest.mark.parametrize(
    "arrangement",
    [Arrangement(high=85, low=75), Arrangement(uses_late_s=30.0), Arrangement(is_taught=False)],
)
def test_an_arrangement_changes_the_rate_of_the_default_and_the_same_one_repeats_it(arrangement):
    rate = replay(SMALL, "PrefixAware", 1500, arrangement).percent
    assert rate == replay(SMALL, "PrefixAware", 1500, arrangement).percent
    assert 0 < rate != replay(SMALL, "PrefixAware", 1500).percent


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_with_several_drives_has_the_rate_of_one_drive_of_their_size(policy):
    rates = [replay(SMALL, policy, 1600, Arrangement(drives=drives)).percent for drives in (1, 4, 8)]
    assert max(rates) - min(rates) < 0.5


def test_eight_drives_have_the_rate_of_one():
    for policy in POLICIES:
        assert replay(SMALL, policy, 1500, Arrangement(drives=8)).percent == replay(SMALL, policy, 1500).percent


def test_a_use_that_never_arrives_in_time_makes_lru_a_fifo():
    assert replay(SMALL, "LRU", 1500, Arrangement(uses_late_s=80_000.0)).percent == replay(SMALL, "FIFO", 1500).percent


def test_the_command_writes_a_row_for_each_policy_and_capacity(tmp_path, capsys):
    path = _written(tmp_path / "day.jsonl", SMALL[:300])
    arguments = ["--trace", path, "--capacities", "300", "900", "--drives", "2", "--processes", "1"]
    assert trace.main([*arguments, "--out", str(tmp_path)]) in {0, 1}
    report = json.loads((tmp_path / "trace.json").read_text())
    assert {(row["policy"], row["capacity_tokens"]) for row in report["rows"]} == {
        (policy, blocks * trace.BLOCK) for policy in (*POLICIES, "optimum") for blocks in (300, 900)
    }
    for row in report["rows"]:
        assert (row["trace"], row["drives"]) == ("day", 2)
        assert 0 <= row["hit_rate"] <= 1
        assert row["gap_closed"] is None or row["gap_closed"] <= 1
    assert "optimum" in capsys.readouterr().out


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_a_generated_workload_is_the_same_for_a_seed_and_another_for_another(workload):
    first = WORKLOADS[workload](1)
    assert first == WORKLOADS[workload](1) != WORKLOADS[workload](2)
    assert [one.at for one in first] == sorted(one.at for one in first)
    assert 5000 < len(first) < 20_000
    assert all(0 < one.tokens <= len(one.keys) * trace.BLOCK for one in first)


def test_the_command_says_what_is_wrong_with_a_trace_or_an_option(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text("{}")
    assert trace.main(["--trace", str(tmp_path / "t.jsonl"), "--out", str(tmp_path)]) == 2
    assert "t.jsonl:1: input_length" in capsys.readouterr().err
    for wrong in (["--drives", "0"], ["--watermarks", "50", "80"], ["--uses-late", "-1"], ["--capacities", "0"]):
        with pytest.raises(SystemExit):
            trace.main(wrong)
