"""`python -m bench lookup`: a lookup as the engine sees it (`Client.lookup`) beside one MGET of the same keys.

Two nodes and their index (bench.nodes), one client on each. `local`: the blocks are on the client's node. `peer`: they
are on the other node, and the sidecar remembers where. `unknown`: no node has them, and each lookup asks for other
blocks. MGET is that of redis-py with hiredis, to the server of the index, from the same thread. The two take turns,
call by call; each row has the 20th percentiles in microseconds, and their ratio. Writes out/bench/lookup.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data import Blocks, client_of, wait_for_index
from bench.nodes import Network, Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COUNTS = (80, 1250)
CASES = ("local", "peer", "unknown")
_BLOCK = 16 << 10  # bytes: a lookup does not depend on it
_WARM = 5  # calls of each contender that do not count


@dataclass(frozen=True)
class Row:
    """One line of the table. `us` and `mget_us` are the 20th percentiles of one call."""

    hashes: int
    case: str
    us: float
    mget_us: float
    ratio: float


def percentile(times: Sequence[float], share: float) -> float:
    """The value below which `share` of the times lie."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def take_turns(contenders: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Call each contender once in each round, in alternating order; return seconds by contender."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(-_WARM, rounds):
        order = range(len(contenders)) if number % 2 else reversed(range(len(contenders)))
        for i in order:
            began = time.perf_counter()
            contenders[i]()
            took = time.perf_counter() - began
            if number >= 0:
                times[i].append(took)
    return times


def row_of(hashes: int, case: str, lookups: Sequence[float], mgets: Sequence[float]) -> Row:
    """Return the row of two lists of seconds."""
    us, mget_us = (percentile(times, 0.2) * 1e6 for times in (lookups, mgets))
    return Row(hashes, case, round(us, 1), round(mget_us, 1), round(us / mget_us, 3))


def run(nodes: Nodes, counts: Sequence[int], rounds: int) -> list[Row]:
    """Measure every case for every number of blocks."""
    rows = []
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(contextlib.closing(client_of(nodes, node))) for node in "ab")
        blocks = Blocks(_BLOCK, max(counts), a, nodes.directory / "a" / "nvme")
        wait_for_index(b, blocks)
        server = stack.enter_context(contextlib.closing(nodes.index_client()))
        names = [b"b" + bytes.fromhex(file.name)[:16] for file in blocks.files]
        if None in server.mget(names):
            raise RuntimeError("the index does not have the blocks")
        for hashes in counts:
            ids, keys = blocks.block_ids[:hashes], names[:hashes]
            calls: dict[str, Callable[[], Sequence[int]]] = {
                "local": lambda ids=ids: a.lookup(ids),  # type: ignore[misc]
                "peer": lambda ids=ids: b.lookup(ids),  # type: ignore[misc]
                "unknown": lambda hashes=hashes: b.lookup(_fresh(hashes, 32)),  # type: ignore[misc]
            }
            for case in CASES:
                expected = 0 if case == "unknown" else hashes

                def look(call: Callable[[], Sequence[int]] = calls[case], expected: int = expected) -> None:
                    found = call()
                    if len(found) - found.count(0) != expected:
                        raise RuntimeError(f"a lookup found {found.count(0)} blocks too few or too many")

                def mget(case: str = case, keys: Sequence[bytes] = keys) -> None:
                    server.mget([b"b" + key for key in _fresh(len(keys), 16)] if case == "unknown" else keys)

                lookups, mgets = take_turns((look, mget), rounds)
                rows.append(row_of(hashes, case, lookups, mgets))
    return rows


def _fresh(count: int, size: int) -> list[bytes]:
    data = os.urandom(count * size)
    return [data[n : n + size] for n in range(0, len(data), size)]


def table(rows: Sequence[Row]) -> str:
    lines = ["blocks  case          us   MGET us  ratio", "------  -------  -------  -------  -----"]
    lines += [f"{r.hashes:6d}  {r.case:7s}  {r.us:7.1f}  {r.mget_us:7.1f}  {r.ratio:5.2f}" for r in rows]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench lookup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="calls of each contender for each row (default 300)")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    parser.add_argument("--loopback", action="store_true", help="use the loopback interface, not network namespaces")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="lookup-", dir=options.dir)).resolve()
    load = os.getloadavg()[0]
    network = Network("cubic", loopback=options.loopback)
    try:
        with contextlib.closing(Nodes(directory, network, capacity_bytes=1 << 30)) as nodes:
            rows = run(nodes, COUNTS, options.rounds)
    finally:
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {network.kind}\n")
    print(table(rows))
    file = options.dir / "lookup.json"
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"\nwritten: {file}")
    return 0
