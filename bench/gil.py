"""`python -m bench gil`: what an engine's own thread keeps of its time beside loads and stores.

A thread of pure Python stands for the engine's scheduler. Beside it, in the same process, another thread loads or
stores as fast as it can. The scheduler loses the time for which the other thread holds the interpreter's lock.

`python_share` is the scheduler's processor time divided by its time minus its wait for a processor
(/proc/self/task/*/schedstat), so that other programs on the machine do not count. Two limits run in the same rounds:
`nothing` beside it, and `plain-read`, the same bytes from open files by preadv. `copy` shows what a copy under the lock
costs. Writes out/bench/gil.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data import FINGERPRINT, MIB, Blocks, client_of, plain_reads, pool_reads, slots, turns, wait_for_index
from bench.nodes import Network, Nodes
from kvpool.protocol.keys import block_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.client import Client

_SHAPES = ((MIB // 4, 64), (2 * MIB, 8), (32 * MIB, 1))
_PIECE = 5_000  # turns of the scheduler's loop between two looks at the clock: about a quarter of a millisecond
_CASES = ("nothing", "plain-read", "copy", "local", "local-cold", "peer", "store")


@dataclass(frozen=True)
class Row:
    """`gib_per_s` is moved by the other thread; 0 beside nothing."""

    case: str
    size: int
    batch: int
    python_share: float
    gib_per_s: float


class Scheduler:
    """A thread of pure Python. `measure` runs it beside `move`, which returns the bytes that it moved."""

    def measure(self, move: Callable[[], int] | None, seconds: float) -> tuple[float, float]:
        """Return (python_share, bytes per second of the other thread)."""
        stop = threading.Event()
        moved = 0

        def loop() -> None:
            nonlocal moved
            while not stop.is_set():
                moved += move() if move else 0

        other = threading.Thread(target=loop) if move else None
        if other:
            other.start()
        began, waited = time.perf_counter(), _waited_s()
        spent = time.thread_time()
        while (wall := time.perf_counter() - began) < seconds:
            total = 0
            for number in range(_PIECE):
                total += number * number
        spent = time.thread_time() - spent
        waited = _waited_s() - waited
        rate = moved / wall
        stop.set()
        if other:
            other.join()
        return spent / max(wall - waited, 1e-9), rate


def _waited_s() -> float:
    """Seconds for which this thread could run and had no processor."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def _copies(size: int, batch: int) -> Callable[[], int]:
    source, target = slots(size, batch), slots(size, batch)

    def move() -> int:
        for to, view in zip(target, source, strict=True):
            to[:] = view
        return size * batch

    return move


def _in_turn(operation: Callable[[int], None], size: int, batch: int) -> Callable[[], int]:
    numbers = itertools.count()

    def move() -> int:
        operation(next(numbers))
        return size * batch

    return move


def _cold(operation: Callable[[int], None], blocks: Blocks, batch: int) -> Callable[[], int]:
    numbers = itertools.count()

    def move() -> int:
        n = next(numbers)
        first = n * batch % len(blocks.files)
        for file in blocks.files[first : first + batch]:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        operation(n)
        return blocks.size * batch

    return move


def _stores(client: Client, size: int, batch: int) -> Callable[[], int]:
    views, numbers = slots(size, batch), itertools.count()

    def move() -> int:
        names = [block_id(FINGERPRINT, f"gil/{size}/{next(numbers)}".encode()) for _ in views]
        return sum(result.bytes for result in client.put_from(names, views))

    return move


def _moves(size: int, batch: int, a: Client, b: Client, home: Path) -> dict[str, Callable[[], int] | None]:
    blocks = Blocks(size, batch * turns(size, batch), a, home)
    wait_for_index(b, blocks)
    return {
        "nothing": None,
        "plain-read": _in_turn(plain_reads(blocks, batch)(0), size, batch),
        "copy": _copies(size, batch),
        "local": _in_turn(pool_reads(a, blocks, batch)(0), size, batch),
        "local-cold": _cold(pool_reads(a, blocks, batch)(0), blocks, batch),
        "peer": _in_turn(pool_reads(b, blocks, batch)(0), size, batch),
        "store": _stores(a, size, batch),
    }


def rows(directory: Path, network: Network, rounds: int, seconds: float, cases: list[str]) -> list[Row]:
    """Run all cases of each shape in turn, `rounds` times. The medians count."""
    found: list[Row] = []
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(contextlib.closing(Nodes(directory, network, capacity_bytes=4 << 30)))
        a, b = (stack.enter_context(contextlib.closing(client_of(nodes, node))) for node in "ab")
        for size, batch in _SHAPES:
            moves = _moves(size, batch, a, b, directory / "a" / "nvme")
            for name in cases:
                if (move := moves[name]) is not None:
                    move()  # warms the page cache, the buffers and the connections
            measured: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
            for _ in range(rounds):
                for name in cases:
                    measured[name].append(Scheduler().measure(moves[name], seconds))
            for name, figures in measured.items():
                share, rate = (statistics.median(column) for column in zip(*figures, strict=True))
                found.append(Row(name, size, batch, round(share, 4), round(rate / (1 << 30), 3)))
                print(f"{_size(size):>8s} x {batch:2d}  {name:11s} {share:8.1%} {rate / (1 << 30):8.2f}", flush=True)
    return found


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def main(argv: list[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser("python -m bench gil", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each case, which take turns (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement (default 1)")
    parser.add_argument("--cases", default=",".join(_CASES), help=f"comma-separated, of {','.join(_CASES)}")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    options = parser.parse_args(argv)
    cases = options.cases.split(",")
    if unknown := set(cases) - set(_CASES):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(_CASES)}")
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    network = Network("cubic")
    print(f"{os.cpu_count()} processors, load before the run {os.getloadavg()[0]:.1f}; {options.rounds} rounds")
    print("    block       case         python    GiB/s", flush=True)
    try:
        found = rows(directory, network, options.rounds, options.seconds, cases)
    finally:
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    (options.dir / "gil.json").write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    print(f"written: {options.dir / 'gil.json'}")
    return 0
