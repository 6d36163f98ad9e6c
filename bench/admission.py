"""`python -m bench admission`: 160 loads at once against one node, admitted a few at a time, beside all at once.

`limit` is the plainest program: 160 threads, each open + preadv + xxh3, all let in at once. `kvpool` is eight clients
of twenty threads each on one node; a load that cannot be had by its deadline (the pool's rule: bytes / 1 GB/s x 3, at
least 100 ms) is turned away, and its thread then computes instead: it sleeps for `--compute-ms`. Both run in one
process, take turns, and read the same files out of the page cache into the same buffers; all blocks are alike.

By Little's law the mean time in the system is what waits divided by what is served: nobody can serve 160 waiting loads
sooner than all at once does. What admission does is to turn away at once what could not have been in time, so that what
is let in is served while somebody still waits for it. So the rows also tell what was served within the deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench import plain
from bench.data import FINGERPRINT, MIB, buffer
from bench.nodes import end_with_parent
from kvpool import config
from kvpool.client import Client
from kvpool.protocol.block import HEADER_BYTES
from kvpool.protocol.keys import block_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TARGET = 0.25  # p50 of the limit's, at the same GB/s
_PODS = 8
_BUFFERS = 32


Row = dict[str, object]


@dataclass
class Tally:
    """Of one contender: seconds of what was served and of what was turned away; bytes a second of each round."""

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    cpu: float = 0.0


@contextlib.contextmanager
def node(directory: Path) -> Iterator[tuple[list[str], int]]:
    """One sidecar without an index; the sockets of its pods, and its process id."""
    (directory / "secret").mkdir()
    (directory / "secret" / "pool-secret").write_text(secrets.token_hex(32))
    (directory / "nvme").mkdir()
    pool = config.PoolConfig(
        pool="bench",
        namespace="bench",
        uid="5bd5fcb0-bench",
        local=(config.LocalTier("nvme", str(directory / "nvme"), 64 << 30, reserve_free_percent=1),),
        index=config.IndexConfig(""),
        peer=config.PeerConfig(port=0),
        http_port=0,
    )
    (directory / "pool.json").write_text(config.dumps(pool))
    sockets = [str(directory / f"pod-{n}.sock") for n in range(_PODS)]
    command = [
        *(sys.executable, "-m", "kvpool_sidecar", "serve", "--node", "a", "--config", str(directory / "pool.json")),
        *("--secret-dir", str(directory / "secret"), *(f"--socket={path}=bench" for path in sockets)),
    ]
    with (directory / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        yield sockets, process.pid
    finally:
        process.terminate()
        process.wait(20)


def cpu_seconds(pid: int) -> float:
    """Processor time of this process and of the sidecar."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def turn(loads: int, seconds: float, operation: Callable[[int, int, Tally], None], tally: Tally, pid: int) -> None:
    """`loads` threads at once, each one load after another, for so many seconds."""
    known = len(tally.served)
    go = threading.Barrier(loads + 1)
    until = 0.0

    def loop(thread: int) -> None:
        n = 0
        go.wait()
        while time.perf_counter() < until:
            operation(thread, n, tally)
            n += 1

    threads = [threading.Thread(target=loop, args=(thread,)) for thread in range(loads)]
    for thread in threads:
        thread.start()
    began, before = time.perf_counter(), cpu_seconds(pid)
    until = began + seconds
    go.wait()
    for thread in threads:
        thread.join()
    tally.cpu += cpu_seconds(pid) - before
    tally.rates.append((len(tally.served) - known) / (time.perf_counter() - began))


def run(directory: Path, size: int, loads: int, rounds: int, seconds: float, compute_s: float) -> list[Row]:
    with node(directory) as (sockets, pid), contextlib.ExitStack() as made:
        clients = [Client(config.ClientConfig(socket=path), fingerprint=FINGERPRINT) for path in sockets]
        for client in clients:
            made.callback(client.close)
            if not client.wait_connected(20):
                raise RuntimeError(f"no sidecar: {(directory / 'sidecar.log').read_text()[-2000:]}")
        views = [buffer(size) for _ in range(_BUFFERS)]
        block_ids = [block_id(FINGERPRINT, f"admission/{n}".encode()) for n in range(16)]
        for one in block_ids:
            if not clients[0].put_from([one], [views[0]])[0].stored:
                raise RuntimeError("not stored")
        files = [file for file in directory.rglob("*") if len(file.name) == 64 and file.is_file()]
        deadline_s = clients[0].load_seconds(size)
        scratch = [buffer(HEADER_BYTES) for _ in range(loads)]

        def limit(thread: int, n: int, tally: Tally) -> None:
            began = time.perf_counter()
            plain.read_file(files[(thread + n) % len(files)], views[thread % _BUFFERS], scratch[thread])
            tally.served.append(time.perf_counter() - began)

        def kvpool(thread: int, n: int, tally: Tally) -> None:
            began = time.perf_counter()
            client = clients[thread % len(clients)]
            (result,) = client.get_into([block_ids[(thread + n) % len(block_ids)]], [views[thread % _BUFFERS]])
            took = time.perf_counter() - began
            if result.ok:
                tally.served.append(took)
                return
            tally.refused.append(took)
            tally.reasons[result.reason] = tally.reasons.get(result.reason, 0) + 1
            time.sleep(compute_s)

        contenders = {"limit": (limit, Tally()), "kvpool": (kvpool, Tally())}
        for operation, _ in contenders.values():
            turn(loads, 0.5, operation, Tally(), pid)  # warms
        for number in range(rounds):
            for system in sorted(contenders, reverse=bool(number % 2)):
                turn(loads, seconds, *contenders[system], pid)
        tallies = {system: tally for system, (_, tally) in contenders.items()}
        return [row(system, tally, tallies["limit"], size, loads, deadline_s) for system, tally in tallies.items()]


def row(system: str, tally: Tally, limit: Tally, size: int, loads: int, deadline_s: float) -> Row:
    served, refused = sorted(tally.served), sorted(tally.refused)
    asked = len(served) + len(refused)
    gb = len(served) * size / 1e9
    ratios = [mine / theirs for mine, theirs in zip(tally.rates, limit.rates, strict=True)]
    rate = statistics.median(tally.rates)
    return {
        "path": "local-read", "size": size, "concurrency": loads, "batch": 1, "system": system,
        "gb_s": round(rate * size / 1e9, 3),
        "p50_ms": _percentile(served, 0.5), "p99_ms": _percentile(served, 0.99),
        "cpu_s_per_gb": round(tally.cpu / gb, 4),
        "ratio_to_limit": round(statistics.median(ratios), 3),
        "mean_ms": round(statistics.fmean(served) * 1e3, 2),
        "p50_to_limit": round(statistics.median(served) / statistics.median(limit.served), 3),
        "mean_to_limit": round(statistics.fmean(served) / statistics.fmean(limit.served), 3),
        "in_time_gb_s": round(rate * size / 1e9 * sum(s <= deadline_s for s in served) / max(1, len(served)), 3),
        "deadline_ms": round(deadline_s * 1e3),
        "refused_share": round(len(refused) / asked, 3),
        "refused_p50_ms": _percentile(refused, 0.5), "refused_p99_ms": _percentile(refused, 0.99),
        "reasons": tally.reasons,
    }  # fmt: skip


def _percentile(seconds: list[float], share: float) -> float | None:
    return round(seconds[min(len(seconds) - 1, int(len(seconds) * share))] * 1e3, 2) if seconds else None


def main(argv: list[str]) -> int:
    """Run and print. Return 1 if p50 is above its target and `--gate` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench admission", description=__doc__)
    parser.add_argument("--loads", type=int, default=160, help="concurrent loads")
    parser.add_argument("--size", type=int, default=32 * MIB, help="block size in bytes")
    parser.add_argument("--rounds", type=int, default=4, help="measurement rounds; all systems run in each round")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds of one measurement")
    parser.add_argument("--compute-ms", type=float, default=100, help="time to recompute the blocks of a rejected load")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    parser.add_argument("--gate", action="store_true", help="exit 1 if p50 is above its target")
    options = parser.parse_args(argv)
    threading.stack_size(256 * 1024)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    try:
        rows = run(directory, options.size, options.loads, options.rounds, options.seconds, options.compute_ms / 1e3)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for entry in rows:
        print("  ".join(f"{name}={value}" for name, value in entry.items() if name not in ("path", "batch")))
    result = options.dir / "admission.json"
    result.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nwritten: {result}")
    reached = float(str(rows[-1]["p50_to_limit"]))
    print(f"p50 at {options.loads} loads: {reached} of the limit's (target: at most {TARGET})")
    return 1 if reached > TARGET and options.gate else 0
