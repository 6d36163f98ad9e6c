"""`python -m bench index_restart`: how long peers' blocks are not found when the index is lost, by what is behind it.

`empty`: Redis starts anew without entries, and a node announces them again as fast as it can. `kept`: it starts with
the entries that it wrote when it ended. `replica`: the server is killed, a Sentinel (it waits 5 s) names
the replica, and the index finds it. Real servers on loopback; the entries are 1,000,000 blocks of one node.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.nodes import _free_port, end_with_parent
from kvpool.errors import KVPoolError
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.redis_server import server_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = NodeInfo("node-a", "127.0.0.1", 7421, 1)
DOWN_AFTER_MS = 5000
_BATCH = 256


class Servers:
    """Processes that end with this one."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        self.all.append(subprocess.Popen(command, stdout=null, stderr=null, preexec_fn=end_with_parent))
        return self.all[-1]

    def close(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def keys(count: int) -> Iterator[bytes]:
    for n in range(count):
        yield n.to_bytes(16, "little") * 2


def fill(index: RedisIndex, number: int, count: int) -> float:
    """Announce them all; seconds."""
    began, batch = time.monotonic(), []
    for key in keys(count):
        batch.append((key, Record(number, 1 << 20, 1)))
        if len(batch) == _BATCH:
            index.announce(batch)
            batch = []
    index.announce(batch)
    return time.monotonic() - began


def until_found(index: RedisIndex, count: int, began: float) -> float:
    """Seconds from `began` until the last entry is found."""
    last = (count - 1).to_bytes(16, "little") * 2
    while True:
        try:
            if index.locate([last])[0]:
                return time.monotonic() - began
        except KVPoolError:
            pass
        time.sleep(0.01)


def until_answered(index: RedisIndex, began: float) -> float:
    """Seconds from `began` until a node has its lease there."""
    while True:
        try:
            index.join(PEER)
        except KVPoolError:
            time.sleep(0.01)
        else:
            return time.monotonic() - began


def managed(directory: Path, count: int, *, keep: bool) -> dict[str, float]:
    servers, port = Servers(), _free_port()
    command = [
        sys.executable, "-m", "kvpool_sidecar", "index-server", "--port", str(port), "--dir", str(directory),
        "--max-memory", str(1 << 30), "--secret-dir", str(directory / "none"), *(["--persist"] if keep else []),
    ]  # fmt: skip
    index = RedisIndex(f"redis://127.0.0.1:{port}/0", timeout_s=5, slow_timeout_s=20, lease_s=3600)
    try:
        server = servers.spawn(*command)
        until_answered(index, time.monotonic())
        fill(index, index.join(PEER), count)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM if keep else signal.SIGKILL)
        server.wait()
        ended = time.monotonic()
        servers.spawn(*command)
        times = {"end_s": ended - began, "answers_s": until_answered(index, ended)}
        if not keep:
            times["announced_again_s"] = fill(index, index.join(PEER), count)
        return times | {"found_again_s": until_found(index, count, ended)}
    finally:
        index.close()
        servers.close()


def replica(directory: Path, count: int) -> dict[str, float]:
    servers, ports = Servers(), [_free_port() for _ in range(3)]
    folders = [directory / name for name in ("first", "second", "sentinel")]
    for folder in folders:
        folder.mkdir()
    (folders[2] / "conf").write_text(
        f"sentinel monitor blocks 127.0.0.1 {ports[0]} 1\nsentinel down-after-milliseconds blocks {DOWN_AFTER_MS}\n"
        "sentinel failover-timeout blocks 30000\n"
    )
    options = ["--save", "", "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
    first = servers.spawn(server_binary(), "--port", str(ports[0]), "--dir", str(folders[0]), *options)
    second = ["--port", str(ports[1]), "--dir", str(folders[1]), "--replicaof", "127.0.0.1", str(ports[0]), *options]
    servers.spawn(server_binary(), *second)
    sentinel = [str(folders[2] / "conf"), "--sentinel", "--port", str(ports[2]), "--dir", str(folders[2])]
    index = RedisIndex(f"redis+sentinel://127.0.0.1:{ports[2]}/blocks/0", timeout_s=5, slow_timeout_s=20, lease_s=3600)
    try:
        time.sleep(1)
        servers.spawn(server_binary(), *sentinel, "--bind", "127.0.0.1")
        until_answered(index, time.monotonic())
        fill(index, index.join(PEER), count)
        time.sleep(12)  # a Sentinel looks for replicas every ten seconds
        first.send_signal(signal.SIGKILL)
        ended = time.monotonic()
        return {"answers_s": until_answered(index, ended), "found_again_s": until_found(index, count, ended)}
    finally:
        index.close()
        servers.close()


def main(argv: list[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench index_restart", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for results")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    load, result = os.getloadavg()[0], dict[str, Any]()
    for name in ("empty", "kept", "replica"):
        directory = Path(tempfile.mkdtemp(prefix="index-restart-", dir=options.dir)).resolve()
        try:
            if name == "replica":
                result[name] = replica(directory, options.entries)
            else:
                result[name] = managed(directory, options.entries, keep=name == "kept")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {options.entries:,} entries; seconds\n")
    for name, times in result.items():
        print(f"{name:8s} " + ", ".join(f"{what[:-2].replace('_', ' ')} {s:.2f}" for what, s in times.items()))
    file = options.dir / "index_restart.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {file}")
    return 0
