"""The replay with real sidecars and a real Redis, and that nothing of a demo outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[3]
MARK = "KVDEMO_TEST_MARK"


class Demo:
    """One replay in a process of its own. `left` finds what it has started."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.mark = uuid.uuid4().hex
        self.temporary = out / "tmp"
        self.temporary.mkdir(parents=True)
        command = [sys.executable, "-m", "kvpool_demo", "--engine=replay", "--users=2", "--rounds=3", f"--out={out}"]
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": str(ROOT / "examples" / "demo"),
            "TMPDIR": str(self.temporary),
        }
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def left(self) -> list[str]:
        """Processes of this demo, without its own. Redis paints over its environment, but works in its directory."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == self.process.pid:
                continue
            try:
                marked = f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes()
                if marked or (process / "cwd").readlink().is_relative_to(self.out):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended while we looked
        return found

    def close(self) -> None:
        """For a test that failed half-way."""
        self.process.kill()
        self.process.communicate(timeout=30)

    def wait_for_line(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"the demo ended before it said {text!r}")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path)
    yield made
    made.close()


def until(what: str, true: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_a_replay_moves_real_blocks_through_real_sidecars(tmp_path: Path, demo: Demo):
    output, _ = demo.process.communicate(timeout=90)
    assert demo.process.returncode == 0, output
    assert "NO ENGINE RAN" in output
    made = json.loads((tmp_path / "demo.json").read_text())
    assert made["engine"] == "replay"
    assert made["blocks_equal"] is True
    assert made["tokens_identical"] is None
    found = made["tokens_from"]
    # in the second round each user's blocks are on the other node; in the last one node's blocks are only shared
    assert found["peer"] > 0
    assert found["shared"] > 0
    later = [r["tokens_from"] for r in made["by_round"][1:]]
    assert all(r["computed"] < 0.25 * sum(r.values()) for r in later)
    assert (tmp_path / "demo.png").stat().st_size > 0
    assert demo.left() == []
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.parametrize("at", ["Starting: a pool", "three sidecars", "round 1  user 1", "is stopped"])
def test_ctrl_c_leaves_no_process_behind(demo: Demo, at: str):
    demo.wait_for_line(at)
    if at != "Starting: a pool":
        assert any("kvpool_sidecar serve" in line for line in demo.left()), "the control: the mark is inherited"
    demo.process.send_signal(signal.SIGINT)
    output, _ = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 130, output
    assert "Traceback" not in output
    until("processes are left", lambda: demo.left() == [])
    assert list(demo.temporary.iterdir()) == []


def test_a_killed_demo_takes_its_processes_along(demo: Demo):
    demo.wait_for_line("round 1  user 0")
    assert len(demo.left()) == 5, "three sidecars, Redis and what answers for it"
    demo.process.kill()
    demo.process.communicate(timeout=30)
    until("processes are left", lambda: demo.left() == [])


def test_a_second_demo_in_the_same_clone_is_refused(tmp_path: Path, demo: Demo):
    demo.wait_for_line("Starting: a pool")
    command = [sys.executable, "-m", "kvpool_demo", "--engine=replay", f"--out={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples" / "demo")}
    refused = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    demo.process.send_signal(signal.SIGTERM)
    demo.process.communicate(timeout=30)
    assert refused.returncode == 1
    assert "another demo runs" in refused.stderr
    assert demo.process.returncode == 128 + signal.SIGTERM
    until("processes are left", lambda: demo.left() == [])
