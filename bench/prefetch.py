"""`python -m bench prefetch`: what reading ahead after a lookup saves, with blocks that only the drive has.

Loads take turns, of the same blocks from the same sidecar. Each time the files leave the page cache first; then, with
reading ahead, the client looks the prompt up, which starts it; then the client waits as long as an engine might before
it loads (0 to 200 ms), and loads. Without reading ahead there is no lookup, so nothing starts. `load` is the time of
the load alone; `all in memory` is the same load without a drive, the best that reading ahead can do. Prints a table
and writes out/bench/prefetch.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.data import MIB, PATIENT, slots
from bench.nodes import end_with_parent
from kvpool import config
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol.keys import block_id, fingerprint

FINGERPRINT = fingerprint({"bench": "prefetch"})
SHAPES = ((2 * MIB, 64), (32 * MIB, 8), (256 * 1024, 256))
GAPS_MS = (0, 5, 20, 50, 200)
KINDS = ("all in memory", "no prefetch", "prefetch")


class Node:
    """One sidecar without an index, and a client of it."""

    def __init__(self, directory: Path, prefetch_bytes: int) -> None:
        directory.mkdir()
        self.nvme = directory / "nvme"
        secret = directory / "secret"
        secret.mkdir()
        (secret / "pool-secret").write_text(secrets.token_hex(32))
        http = _free_port()
        pool = config.PoolConfig(
            pool="bench", namespace="bench", uid="bench",
            local=(config.LocalTier("nvme", str(self.nvme), 8 << 30, reserve_free_percent=1),),
            index=config.IndexConfig(""), cache=config.CacheConfig(prefetch_bytes=prefetch_bytes),
            peer=config.PeerConfig(port=_free_port()), http_port=http,
        )  # fmt: skip
        (directory / "pool.json").write_text(config.dumps(pool))
        path = directory / "kv.sock"
        command = [
            sys.executable, "-m", "kvpool_sidecar", "serve", f"--config={directory / 'pool.json'}",
            f"--secret-dir={secret}", "--node=bench", "--address=127.0.0.1", f"--socket={path}=bench",
        ]  # fmt: skip
        self.status_url = f"http://127.0.0.1:{http}/status"
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
        self.client = Client(ClientConfig(socket=str(path), deadlines=PATIENT), fingerprint=FINGERPRINT)
        if not self.client.wait_connected(20):
            raise RuntimeError(self.log.read_text()[-2000:])

    def status(self) -> dict[str, dict[str, int]]:
        with urllib.request.urlopen(self.status_url, timeout=5) as answer:
            status: dict[str, dict[str, int]] = json.loads(answer.read())
            return status

    def make_cold(self) -> None:
        for file in self.nvme.rglob("*"):
            if len(file.name) == 64:
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(10)


def turn(node: Node, block_ids: list[bytes], views: list[memoryview], gap_ms: int, kind: str) -> tuple[float, float]:
    """Milliseconds of the lookup and of the load."""
    if kind == "all in memory":
        node.client.get_into(block_ids, views)
    else:
        node.make_cold()
    began = time.perf_counter()
    if kind == "prefetch" and not all(node.client.lookup(block_ids)):
        raise RuntimeError("a block is not there")
    looked_up = time.perf_counter()
    if gap_ms:
        time.sleep(gap_ms / 1000)
    load = time.perf_counter()
    results = node.client.get_into(block_ids, views)
    loaded = time.perf_counter()
    if not all(r.ok for r in results):
        raise RuntimeError(f"missed: {next(r for r in results if not r.ok)}")
    return (looked_up - began) * 1e3, (loaded - load) * 1e3


def measure(node: Node, size: int, count: int, rounds: int) -> list[dict[str, object]]:
    block_ids = [block_id(FINGERPRINT, f"{size}/{n}".encode()) for n in range(count)]
    views = slots(size, count)
    for n, view in enumerate(views):
        view[:] = secrets.token_bytes(4096) * (size // 4096)
        (result,) = node.client.put_from([block_ids[n]], [view])
        if not result.stored:
            raise RuntimeError(f"not stored: {result.reason}")
    rows: list[dict[str, object]] = []
    for gap in GAPS_MS:
        loads: dict[str, list[float]] = {kind: [] for kind in KINDS}
        lookups: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-1, rounds):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                lookup_ms, load_ms = turn(node, block_ids, views, gap, kind)
                if number >= 0:
                    lookups[kind].append(lookup_ms)
                    loads[kind].append(load_ms)
        saved = [1 - on / off for on, off in zip(loads["prefetch"], loads["no prefetch"], strict=True)]
        rows += [
            {
                "path": "local-read", "size": size, "batch": count, "concurrency": 1, "gap_ms": gap, "system": kind,
                "lookup_p50_ms": round(statistics.median(lookups[kind]), 2),
                "load_p50_ms": round(statistics.median(loads[kind]), 2), "load_max_ms": round(max(loads[kind]), 2),
                "gb_s": round(size * count / statistics.median(loads[kind]) / 1e6, 2),
                "load_time_saved": round(statistics.median(saved), 3) if kind == "prefetch" else None,
            }
            for kind in KINDS
        ]  # fmt: skip
    return rows


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        f"{'blocks':>15s}  {'gap ms':>6s}  {'':14s}  {'lookup ms':>9s}  {'load ms':>8s}  {'GB/s':>6s}  of load saved"
    ]
    for r in rows:
        saved = r["load_time_saved"]
        lines.append(
            f"{r['batch']!s:>4s} x {int(str(r['size'])) // 1024:4d} KiB  {r['gap_ms']:6d}  {r['system']!s:14s}  "
            f"{r['lookup_p50_ms']:9.2f}  {r['load_p50_ms']:8.2f}  {r['gb_s']:6.2f}  "
            + (f"{float(str(saved)):8.0%}" if saved is not None else "")
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run, print, write the JSON. 0."""
    parser = argparse.ArgumentParser(prog="python -m bench prefetch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurement rounds; all systems run in each round")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    load = os.getloadavg()[0]
    rows: list[dict[str, object]] = []
    try:
        with contextlib.ExitStack() as stack:
            node = Node(directory / "node", 512 * MIB)
            stack.callback(node.close)
            for size, count in SHAPES:
                rows += measure(node, size, count, options.rounds)
            counted = node.status()["prefetch"]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {options.rounds} rounds, systems alternate")
    print(f"prefetched: {counted}\n")
    print(table(rows))
    result = options.dir / "prefetch.json"
    result.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nwritten: {result}")
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
