"""`kvpool simulate`: with nothing, everything and half of it; failures, routers, and the command."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvpool_cli.main import main
from kvpool_cli.planner.replay import TRACE_BLOCK, Trace, read_trace
from kvpool_cli.simulator.pool import simulate
from kvpool_cli.simulator.routers import make_router
from kvpool_cli.simulator.settings import ROUTERS, NodeHardware, NodeOutage, PoolSettings
from kvpool_cli.simulator.workload import make_requests, reuse_bound
from kvpool_sidecar.eviction import POLICIES

KIB = 1 << 10
BLOCK = 28 * KIB
SIZE = 32 * KIB
"""Of a block's file."""
EVERY_S = 30.0


def sessions(count=12, turns=6, first=5, more=2, system=1, seed=3):
    """Lines of a trace: sessions take turns at random, and each prompt repeats the last one and adds to it."""
    rng = random.Random(seed)
    prompts = {n: list(range(system)) for n in range(count)}
    fresh = system
    order = [n for n in range(count) for _ in range(turns)]
    rng.shuffle(order)
    lines = []
    for at, n in enumerate(order):
        added = first if len(prompts[n]) == system else more
        prompts[n] += range(fresh, fresh + added)
        fresh += added
        ids = list(prompts[n])
        lines.append({"timestamp": at * EVERY_S * 1000, "input_length": TRACE_BLOCK * len(ids), "hash_ids": ids})
    return lines


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in sessions()))
    return path


@pytest.fixture
def requests(trace_file):
    return make_requests(read_trace(trace_file))


def pool(blocks, **changes):
    """A pool whose drives have room for this number of blocks each."""
    hardware = replace(NodeHardware(drive_bytes=blocks * SIZE), **changes.pop("hardware", {}))
    return PoolSettings(hardware=hardware, block_bytes=BLOCK, **changes)


def unique(requests):
    return len({key for request in requests for key in request.keys})


def test_nothing_gives_zeros_and_no_ratio():
    data = simulate(pool(10), make_requests(Trace((), 0))).data()
    assert data["requests"] == data["tokens"] == data["hit_rate"] == data["reuse_bound"] == data["written_bytes"] == 0
    assert set(data["bytes"].values()) == {0}
    assert set(data["busiest_over_mean"].values()) == {None}
    assert data["first_token_s"] == {"p50": None, "p95": None}


@pytest.mark.parametrize("router", ROUTERS)
def test_with_room_for_everything_the_hit_rate_is_the_bound_of_the_trace(requests, router):
    outcome = simulate(pool(2 * unique(requests), router=router), requests)
    assert outcome.hit_rate == outcome.bound == reuse_bound(requests, TRACE_BLOCK) > 0.5
    path = outcome.counts.path
    assert path.local + path.peer + path.computed == BLOCK * sum(len(r.keys) for r in requests)
    assert path.computed == BLOCK * unique(requests)
    assert outcome.evicted_blocks == 0


def test_a_sticky_router_reads_almost_nothing_from_peers_and_a_random_one_most(requests):
    room = 2 * unique(requests)
    paths = {router: simulate(pool(room, router=router), requests).counts.path for router in ("sticky", "random")}
    assert paths["sticky"].peer < 0.1 * paths["sticky"].local
    assert paths["random"].peer > paths["random"].local


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_half_the_rate_is_between_nothing_and_the_bound_and_drives_stay_within_limits(requests, policy):
    half = unique(requests) // 2 // 3
    outcome = simulate(pool(half, policy=policy), requests)
    tiny = simulate(pool(9, policy=policy), requests)
    assert tiny.hit_rate < outcome.hit_rate < outcome.bound
    assert outcome.evicted_blocks > 0
    stored = outcome.written_bytes // SIZE - outcome.evicted_blocks
    assert 0 < stored <= 3 * (half * 85 // 100)


def test_no_tables_of_drives_mean_no_hits(requests):
    assert simulate(pool(1), requests).hit_rate == 0


def test_equal_seeds_give_equal_results_and_others_another(requests):
    results = [simulate(pool(20, router="random", seed=seed), requests).data() for seed in (1, 1, 2)]
    assert results[0] == results[1]
    assert results[0]["bytes"] != results[2]["bytes"]


def test_several_drives_share_the_blocks_of_a_node(requests):
    one = simulate(pool(64), requests)
    four = simulate(pool(16, hardware={"drives": 4}), requests)
    assert four.hit_rate == pytest.approx(one.hit_rate, rel=0.1)


def test_a_slow_network_makes_loads_late_and_their_tokens_are_computed(requests):
    room = 2 * unique(requests)
    slow = simulate(pool(room, router="round-robin", hardware={"network": 100e3}), requests)
    fast = simulate(pool(room, router="round-robin"), requests)
    assert fast.counts.late_bytes == 0 < slow.counts.late_bytes
    assert slow.counts.found_tokens < fast.counts.found_tokens
    assert slow.counts.found_tokens + slow.counts.computed_tokens == slow.counts.tokens


def test_break_even_holds_blocks_back_that_load_slower_than_they_are_computed(requests):
    slow = {"network": 400e3, "prefill_rate": 1e5}
    requests = [request._replace(at=request.at / EVERY_S) for request in requests]  # several between two trials
    held = simulate(pool(400, router="round-robin", hardware=slow, break_even=True), requests)
    read = simulate(pool(400, router="round-robin", hardware=slow), requests)
    assert held.counts.path.peer + held.counts.late_bytes < read.counts.path.peer + read.counts.late_bytes


def test_a_shared_tier_serves_what_the_drives_lost(requests):
    without = simulate(pool(12), requests)
    outcome = simulate(pool(12, shared=1e9), requests)
    assert outcome.counts.path.shared > 0 == without.counts.path.shared
    assert outcome.hit_rate == outcome.bound > without.hit_rate


def test_a_failed_node_loses_its_hits_and_has_them_again_when_it_returns(requests):
    room = 2 * unique(requests)
    whole = simulate(pool(room), requests)
    half = EVERY_S * len(requests) / 2
    gone = simulate(pool(room, outages=(NodeOutage(2, half),)), requests)
    back = simulate(pool(room, outages=(NodeOutage(2, half, 4 * EVERY_S),)), requests)
    assert gone.counts.requests == back.counts.requests == whole.counts.requests
    assert gone.hit_rate < back.hit_rate < whole.hit_rate


def test_requests_of_a_failed_node_begin_again_and_without_nodes_they_are_refused(requests):
    slow = {"prefill_rate": 20.0}  # each request takes minutes: one is under way when the node fails
    outcome = simulate(pool(400, hardware=slow, outages=(NodeOutage(1, 700.0),)), requests)
    assert outcome.counts.interrupted > 0
    assert outcome.counts.requests == len(requests)
    everything = tuple(NodeOutage(n, 0.0) for n in (1, 2, 3))
    assert simulate(pool(400, outages=everything), requests[1:]).counts.refused == len(requests) - 1


def test_copies_share_system_prompts_only(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in sessions(count=40, turns=3)))
    one = make_requests(read_trace(path))
    three = make_requests(read_trace(path), copies=3)
    assert len(three) == 3 * len(one)
    assert unique(three) == 3 * (unique(one) - 1) + 1
    assert [r.at for r in three] == sorted(r.at for r in three)
    assert len({r.session for r in three}) == 3 * 40
    assert all(r.session == r.keys[1] for r in one)


def test_a_kv_aware_router_prefers_the_blocks_until_their_node_is_busy(requests):
    nodes = simulate.__globals__["PoolSimulator"](pool(100), requests)._nodes
    request = requests[5]
    router = make_router("kv-aware", random.Random(1), lambda key: [2] if key in request.keys else [], TRACE_BLOCK)
    assert router.choose(request, nodes, 0.0) is nodes[1]
    nodes[1].engine.serve(0.0, 1e9)
    assert router.choose(request, nodes, 0.0) is not nodes[1]


def command(trace_file, *more):
    return ["simulate", "--trace", str(trace_file), "--drives", "2x4Mi", "--block-bytes", "28Ki", *more]


def test_the_command_prints_fixed_names_and_a_table(trace_file, capsys):
    assert main(command(trace_file, "--nodes", "4", "--fail", "2@10m+5m", "-o", "json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    assert data["settings"]["nodes"] == 4
    assert data["settings"]["outages"] == [{"node": 2, "at": 600.0, "seconds": 300.0}]
    assert set(data["bytes"]) == {"local", "peer", "shared", "computed"}
    assert {"hit_rate", "reuse_bound", "busiest_over_mean", "written_bytes_per_drive_day"} <= set(data)
    assert main(command(trace_file)) == 0
    text = capsys.readouterr().out
    assert text.startswith("Simulated: 3 nodes, sticky router, 72 requests")
    assert "DWPD" in text


@pytest.mark.parametrize(
    "more",
    [
        ("--nodes", "0"),
        ("--fail", "4@1s"),
        ("--fail", "x"),
        ("--watermarks", "70", "80"),
        ("--drives", "65x1Ti"),
        ("--block-bytes", "1Ti"),
        ("--network", "0"),
        ("--prefill-rate", "nan"),
        ("--warm-up", "1"),
        ("--copies", "0"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_sentence(trace_file, capsys, more):
    assert main(command(trace_file, *more)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_an_empty_trace_ends_with_2(tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    assert main(command(tmp_path / "empty")) == 2
    assert "no prompt with blocks" in capsys.readouterr().err


def test_an_interruption_ends_with_130_and_no_result(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in sessions(count=400, turns=6)))
    started = tmp_path / "started"
    # the first progress is reported when the simulation runs
    program = (
        "import sys, pathlib; from kvpool_cli.commands import simulate; from kvpool_cli.main import main; "
        f"simulate.progress = lambda text: pathlib.Path({str(started)!r}).touch(); sys.exit(main(sys.argv[1:]))"
    )
    arguments = command(path, "--copies", "40")
    done = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 120
        while not started.exists() and time.monotonic() < until:
            assert done.poll() is None
            time.sleep(0.02)
        os.kill(done.pid, signal.SIGINT)
        out, err = done.communicate(timeout=60)
    finally:
        done.kill()
    assert done.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
