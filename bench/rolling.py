"""`python -m bench rolling`: three sidecars are replaced one by one while an engine on each node goes on asking.

Twice: the new sidecar of a node starts beside the old one and takes over (nodes.update.surge), and the old one is
stopped first.

Real sidecars, a real Redis, real clients, each in a process of its own. Each node stores a third of the blocks and asks
for all of them; nothing is copied between nodes, which is the worst case: what a node holds is missed while its sidecar
is away, and its own engine misses everything. `--old DIR`: the sidecars (and the clients of the first and the third
node) begin as another release, whose repository is at DIR; they are replaced by this one, a second set of blocks is
stored, with names (header version 2), and then the sidecars go back to the other release.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.nodes import _free_port, end_with_parent
from kvpool import config

ROOT = Path(__file__).resolve().parents[1]
WINDOWS_S = (10.0, 30.0)
TARGET = 0.8  # of the hit rate before, in any 30 s


def environment(release: Path) -> dict[str, str]:
    paths = [str(release / part / "src") for part in ("client", "sidecar")]
    takeover = {"KVPOOL_ALLOW_TAKEOVER": "true", "KVPOOL_OVERLAP": "true"}  # and its earlier name, for --old
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **takeover}  # earlier name too: `--old`


class Node:
    """A sidecar, and an engine's client beside it. Each sidecar has an address of its own, as pods have."""

    def __init__(self, pool: Pool, number: int, release: Path, client_release: Path) -> None:
        self.name = "abc"[number]
        self.address = ""
        self._lives = 0
        self.home = pool.directory / self.name
        (self.home / "nvme").mkdir(parents=True)
        self.http = _free_port()
        self._pool = pool
        self._number = number
        self._client_release = client_release
        self.process: subprocess.Popen[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.client: subprocess.Popen[bytes] | None = None
        value = config.PoolConfig(
            pool="bench",
            namespace="bench",
            uid="5bd5fcb0-bench",
            local=(config.LocalTier("nvme", str(self.home / "nvme"), 8 << 30, reserve_free_percent=1),),
            index=config.IndexConfig(pool.index_url, username="kvpool", lookup_timeout_ms=300),
            peer=config.PeerConfig(port=_free_port(), connect_timeout_ms=1000),
            events=config.EventsConfig(enabled=True, port=_free_port(), replay_port=_free_port()),
            http_port=self.http,
            admin_port=0,
        )
        (self.home / "pool.json").write_text(config.dumps(value))
        self.start(release)

    def start(self, release: Path) -> None:
        """The next sidecar; the one before goes on if it was not stopped."""
        self._lives += 1
        self.address = f"127.0.{self._number + 1}.{self._lives}"
        command = [
            sys.executable, "-m", "kvpool_sidecar", "serve", "--config", str(self.home / "pool.json"),
            "--secret-dir", str(self._pool.secret), "--node", self.name, "--address", self.address,
            "--socket", f"{self.home / 'kv.sock'}=bench",
        ]  # fmt: skip
        self.process = self._spawn(command, release, "sidecar.log")
        self.processes.append(self.process)

    def start_client(self, blocks: int, size: int) -> None:
        asked = {
            "socket": str(self.home / "kv.sock"),
            "fingerprint": "ab" * 32,
            "block_bytes": size,
            "blocks": blocks,
            "own": self._number,
            "of": 3,
            "results": str(self.home / "results"),
            "done": str(self.home / "done"),
            "second": str(self._pool.directory / "second"),
        }
        command = [sys.executable, str(ROOT / "bench" / "rolling_client.py"), json.dumps(asked)]
        self.client = self._spawn(command, self._client_release, "client.log")

    def _spawn(self, command: list[str], release: Path, log: str) -> subprocess.Popen[bytes]:
        with (self.home / log).open("ab") as out:
            return subprocess.Popen(
                command, env=environment(release), cwd=self.home, stdout=out, stderr=out, preexec_fn=end_with_parent
            )

    def stop(self, process: subprocess.Popen[bytes] | None = None) -> None:
        process = process or self.process
        assert process is not None
        process.terminate()
        process.wait(20)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.address}:{self.http}{path}", timeout=5) as answer:
            body: bytes = answer.read(1 << 20)
        return body

    def is_ready(self) -> bool:
        """As a probe sees it: one that stands by in vain says so, too, so that the old one is stopped."""
        try:
            self.get("/readyz")
        except OSError:
            return False
        return True

    def rows(self) -> list[list[float]]:
        lines = (self.home / "results").read_text().splitlines() if (self.home / "results").exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]


class Pool:
    """Three nodes until `close`."""

    def __init__(self, directory: Path, old: Path) -> None:
        self.directory = directory
        self.secret = directory / "secret"
        self.secret.mkdir()
        (self.secret / "pool-secret").write_text(secrets.token_hex(32))
        (self.secret / "index-password").write_text(secrets.token_hex(16))
        port = _free_port()
        self.index_url = f"redis://127.0.0.1:{port}/0"
        index = [
            sys.executable, "-m", "kvpool_sidecar", "index-server", "--port", str(port),
            "--dir", str(directory / "index"), "--secret-dir", str(self.secret),
        ]  # fmt: skip
        with (directory / "index.log").open("wb") as log:
            self.index = subprocess.Popen(index, stdout=log, stderr=log, preexec_fn=end_with_parent)
        self.nodes: list[Node] = []
        for number in range(3):
            self.nodes.append(Node(self, number, old, ROOT if number == 1 else old))
        self.wait("the sidecars are ready", lambda: all(node.is_ready() for node in self.nodes))

    def wait(self, what: str, condition: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"not within {seconds:.0f} s: {what}; logs are below {self.directory}")
            time.sleep(0.05)

    def roll(self, release: Path, settle_s: float, *, overlap: bool) -> list[dict[str, float]]:
        """Replace the sidecars one by one, as a DaemonSet does; seconds for which each engine was without."""
        replacements = []
        for node in self.nodes:
            began, wall = time.monotonic(), time.time()
            old = node.process
            if not overlap:
                node.stop()
            node.start(release)
            self.wait(f"{node.name} is ready", node.is_ready)
            ready = time.monotonic()
            self.wait("its engine has hits", lambda node=node, wall=wall: any(r[2] for r in _after(node, wall + 0.4)))
            time.sleep(settle_s)
            if overlap:
                node.stop(old)
            replacements.append({"start_s": round(ready - began, 2), "without_s": round(_without(node, wall), 1)})
        return replacements

    def close(self) -> None:
        for node in self.nodes:
            for process in (node.client, *node.processes):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
        self.index.kill()
        self.index.wait()


def _after(node: Node, wall: float) -> list[list[float]]:
    return [row for row in node.rows() if row[0] > wall]


def _without(node: Node, wall: float) -> float:
    """Seconds since then in which its engine asked and had nothing at all, to the tick of the client's rows."""
    rows = _after(node, wall)
    return sum(now[0] - before[0] for before, now in itertools.pairwise(rows) if now[1] and not now[2])


def _sum(nodes: list[Node], start: float, end: float, column: int) -> float:
    return sum(row[column] for node in nodes for row in node.rows() if start < row[0] <= end)


def rate(nodes: list[Node], start: float, end: float, *, second: bool | None = None) -> float:
    """Of the blocks asked for between these times, the part that was had. `second`: of which set; None: of both."""
    had, asked = _sum(nodes, start, end, 2), _sum(nodes, start, end, 1)
    had_second, asked_second = _sum(nodes, start, end, 3), _sum(nodes, start, end, 4)
    if second is not None:
        had, asked = (had_second, asked_second) if second else (had - had_second, asked - asked_second)
    return had / asked if asked else float("nan")


def lowest(nodes: list[Node], start: float, end: float, window: float) -> float:
    """The lowest hit rate of any window that touches the time from start to end."""
    steps = int((end - start + window) / 0.5)
    return min(rate(nodes, at - window, at) for at in (start + 0.5 * n for n in range(1, steps)) if at <= time.time())


def phase(pool: Pool, name: str, release: Path, settle_s: float, *, overlap: bool) -> dict[str, Any]:
    before = rate(pool.nodes, time.time() - 10, time.time())
    start = time.time()
    rolls = pool.roll(release, settle_s, overlap=overlap)
    time.sleep(max(WINDOWS_S) / 3)
    end = time.time()
    return {
        "phase": name,
        "before": round(before, 3),
        "after": round(rate(pool.nodes, end - 8, end), 3),
        "lowest": {f"{w:.0f} s": round(lowest(pool.nodes, start, end, w) / before, 3) for w in WINDOWS_S},
        "asked": int(_sum(pool.nodes, start, end, 1)),
        "wrong": int(_sum(pool.nodes, start, end, 5)),
        "failed": int(_sum(pool.nodes, start, end, 6)),
        "late": int(_sum(pool.nodes, start, end, 7)),
        "rolls": rolls,
    }


def run(directory: Path, old: Path, blocks: int, size: int, settle_s: float) -> dict[str, Any]:
    pool = Pool(directory, old)
    try:
        for node in pool.nodes:
            node.start_client(blocks, size)
        pool.wait("all blocks are stored", lambda: all((n.home / "done").exists() for n in pool.nodes))
        time.sleep(max(12.0, max(WINDOWS_S)))  # a window at rest
        phases = [phase(pool, "overlap", ROOT, settle_s, overlap=True)]
        result: dict[str, Any] = {"phases": phases}
        if old == ROOT:
            time.sleep(max(WINDOWS_S))
            phases.append(phase(pool, "stop first", ROOT, settle_s, overlap=False))
        else:
            (pool.directory / "second").write_text("")
            pool.wait("the second set is stored", lambda: all((n.home / "done-second").exists() for n in pool.nodes))
            time.sleep(12)
            now = time.time()
            result["second_set_before_rollback"] = round(rate(pool.nodes, now - 8, now, second=True), 3)
            phases.append(phase(pool, "back, stop first", old, settle_s, overlap=False))
            now = time.time()
            result["first_set_after_rollback"] = round(rate(pool.nodes, now - 8, now, second=False), 3)
            result["second_set_after_rollback"] = round(rate(pool.nodes, now - 8, now, second=True), 3)
        return result
    finally:
        pool.close()


def main(argv: list[str]) -> int:
    """Run and print. Return 1 if a target is missed and `--gate` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench rolling", description=__doc__)
    parser.add_argument("--old", type=Path, default=ROOT, help="repository of the other release (default: this one)")
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--size", type=int, default=64 << 10, help="block size in bytes")
    parser.add_argument(
        "--settle", type=float, default=20.0, help="seconds between two nodes: nodes.update.minReadySeconds"
    )
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for results")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="rolling-", dir=options.dir)).resolve()
    load = os.getloadavg()[0]
    result = run(directory, options.old.resolve(), options.blocks, options.size, options.settle)
    shutil.rmtree(directory, ignore_errors=True)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {options.settle:.0f} s between two nodes")
    for p in result["phases"]:
        start = statistics.median(r["start_s"] for r in p["rolls"])
        without = max(r["without_s"] for r in p["rolls"])
        print(
            f"{p['phase']:10s} hit rate before {p['before']:.3f}, after {p['after']:.3f}; lowest of before: "
            + ", ".join(f"{share:.2f} in {window}" for window, share in p["lowest"].items())
            + f"; {p['asked']} blocks asked for, {p['wrong']} wrong, {p['failed']} calls failed, {p['late']} late; "
            f"start {start:.1f} s, an engine without any hit for at most {without:.1f} s"
        )
    for name, value in result.items():
        if name != "phases":
            print(f"{name.replace('_', ' ')}: {value:.3f}")
    file = options.dir / "rolling.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {file}")
    asked = [p for p in result["phases"] if p["phase"] == "overlap"]
    bad = [p for p in result["phases"] if p["wrong"] or p["failed"] or (p in asked and p["lowest"]["30 s"] < TARGET)]
    return 1 if bad and options.gate else 0
