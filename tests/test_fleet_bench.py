"""`make bench BENCH=fleet`: that it measures what it names, without judging any time."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import hiredis

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.__main__ import names
from bench.fleet import COMMANDS, Server, heartbeat, main, real_node, register, short_of

FIXED = ("announce_visible_1s", "lease_missing", "roster_core_share", "roster_mb_per_s")


def test_the_output_has_the_fixed_names(tmp_path):
    assert "fleet" in names()
    assert main(["--nodes", "20", "--seconds", "0.5", "--heartbeats", "5", f"--dir={tmp_path}"]) == 0
    result = json.loads((tmp_path / "fleet.json").read_text())
    for name in FIXED:
        assert list(result[name]) == ["20"]
    assert 1 <= result["busiest_over_mean"] < 16
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.json"]


def test_a_played_heartbeat_has_the_commands_of_a_real_one(tmp_path):
    """Else the load beside the real node would be another one."""
    reader = hiredis.Reader()
    reader.feed(heartbeat(7, 50) * 2)
    commands = [reader.gets() for _ in range(2 * COMMANDS)]
    assert all(isinstance(command, list) for command in commands)
    assert reader.gets() is False
    with contextlib.closing(Server(tmp_path)) as server:
        register(server, 50)

        def processed():
            return server.client.info("stats")["total_commands_processed"]

        with real_node(server, 50) as (registration, _):
            for _ in range(3):
                registration._heartbeat()
            before = processed()
            for _ in range(10):
                registration._heartbeat()
            assert COMMANDS - 1 <= (processed() - before) / 10 <= COMMANDS + 1  # probes may meet in a small pool


def test_missed_targets_are_named():
    good = {name: {"100": 0.0} for name in FIXED} | {"busiest_over_mean": 1.2}
    good["announce_visible_1s"] = {"100": 0.995, "10000": 1.0}
    assert short_of(good) == []
    bad = good | {"busiest_over_mean": 1.6, "lease_missing": {"10000": 0.01}, "roster_mb_per_s": {"5000": 6.0}}
    assert len(short_of(bad)) == 3
