"""`python -m bench data`: the data path of the pool beside the limit of this machine, in one run.

Prints a table and writes out/bench/data.json. Local: a block that is on this node, beside open + preadv + xxh3. Peer:
a block that is on another node, beside sendfile into recv_into + xxh3 over the same network. Store: beside an O_DIRECT
write.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import plain
from bench.measure import Contender, Row, compare
from bench.nodes import Network, Nodes
from kvpool.block import HEADER_BYTES
from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.keys import fingerprint, ident

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
ASKED = {("local", 32 * MIB, 1, 1): 0.9, ("peer", 32 * MIB, 1, 1): 0.8}
FINGERPRINT = fingerprint({"bench": 1})
PATIENT = Deadlines(lookup_ms=2000, load_min_ms=20_000, store_ms=30_000)


def buffer(size: int) -> memoryview:
    """Like an engine's pinned memory: page-aligned, there before it is needed, in huge pages where possible."""
    memory = mmap.mmap(-1, max(size, 2 * MIB))
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)[:size]
    for offset in range(0, size, 4096):
        view[offset] = 1
    return view


def slots(size: int, count: int) -> list[memoryview]:
    memory = buffer(size * count)
    return [memory[i * size : (i + 1) * size] for i in range(count)]


class Blocks:
    """`count` blocks of one size in the pool. `files` is where node a keeps them: both contenders read the same."""

    def __init__(self, size: int, count: int, client: Client, home: Path) -> None:
        self.size = size
        self.idents = [ident(FINGERPRINT, f"{size}/{i}".encode()) for i in range(count)]
        self.files: list[Path] = []
        view = buffer(size)
        known = _files(home)
        for i in range(count):
            view[:] = _pattern(i) * (size // 4096)
            (result,) = client.put_from([self.idents[i]], [view])
            if not result.stored:
                raise RuntimeError(f"block {i} of {size} bytes was not stored: {result.reason}")
            (fresh,) = _files(home) - known
            known.add(fresh)
            self.files.append(fresh)

    def check(self, n: int, view: memoryview) -> None:
        if view[:4096] != _pattern(n) or view[-4096:] != _pattern(n):
            raise RuntimeError(f"block {n} came back with other bytes")


def _files(home: Path) -> set[Path]:
    return {file for file in home.rglob("*") if len(file.name) == 64 and file.is_file()}


def _pattern(n: int) -> bytes:
    return n.to_bytes(8, "little") * 512


def pool_reads(client: Client, blocks: Blocks, batch: int) -> Callable[[int], Callable[[int], None]]:
    def make(thread: int) -> Callable[[int], None]:
        views = slots(blocks.size, batch)

        def operation(n: int) -> None:
            first = (thread * 7 + n) * batch % len(blocks.idents)
            results = client.get_into(blocks.idents[first : first + batch], views)
            if not all(r.ok for r in results):
                raise RuntimeError(f"missed: {next(r for r in results if not r.ok)}")
            blocks.check(first, views[0])

        return operation

    return make


def plain_reads(blocks: Blocks, batch: int) -> Callable[[int], Callable[[int], None]]:
    def make(thread: int) -> Callable[[int], None]:
        views, scratch = slots(blocks.size, batch), buffer(HEADER_BYTES)

        def operation(n: int) -> None:
            first = (thread * 7 + n) * batch % len(blocks.files)
            for file, view in zip(blocks.files[first : first + batch], views, strict=True):
                plain.read_file(file, view, scratch)
            blocks.check(first, views[0])

        return operation

    return make


def plain_receives(sender: plain.Sender, blocks: Blocks, batch: int) -> Callable[[int], Callable[[int], None]]:
    def make(thread: int) -> Callable[[int], None]:
        views, scratch, connection = slots(blocks.size, batch), buffer(HEADER_BYTES), sender.connect()

        def operation(n: int) -> None:
            first = (thread * 7 + n) * batch % len(blocks.files)
            plain.receive(connection, range(first, first + batch), views, scratch)
            blocks.check(first, views[0])

        return operation

    return make


def stores(client: Client, size: int, directory: Path, rounds: int) -> list[Row]:
    counter = iter(range(10**9))

    def pool(_: int) -> Callable[[int], None]:
        view = buffer(size)

        def operation(n: int) -> None:
            (result,) = client.put_from([ident(FINGERPRINT, f"store/{next(counter)}".encode())], [view])
            if not result.stored:
                raise RuntimeError(f"not stored: {result.reason}")

        return operation

    def limit(_: int) -> Callable[[int], None]:
        view, header = buffer(size), buffer(HEADER_BYTES)
        return lambda n: plain.write_file(directory / "written", view, header)

    return compare("store", size, 1, 1, rounds, 4, [Contender("plain", limit), Contender("kvpool", pool)])


def run(directory: Path, network: Network, rounds: int) -> list[Row]:
    rows: list[Row] = []
    with contextlib.closing(Nodes(directory, network, capacity_bytes=64 << 30)) as nodes:
        clients = {
            node: Client(
                ClientConfig(socket=nodes.socket_of(node), deadlines=PATIENT), fingerprint=FINGERPRINT,
                facts={"engine": "bench", "model": "bench"},
            )
            for node in ("a", "b")
        }  # fmt: skip
        try:
            for client in clients.values():
                if not client.wait_connected(10):
                    raise RuntimeError("no connection to a sidecar")
            files = directory / "plain"
            files.mkdir()
            for size, batch, count, operations in ((32 * MIB, 1, 16, 8), (2 * MIB, 64, 128, 4), (MIB // 4, 64, 256, 8)):
                blocks = Blocks(size, count, clients["a"], directory / "a" / "nvme")
                rows += measure(nodes, clients, blocks, batch, rounds, operations)
            rows += stores(clients["a"], 32 * MIB, files, rounds)
        finally:
            for client in clients.values():
                client.close()
    return rows


def measure(
    nodes: Nodes, clients: dict[str, Client], blocks: Blocks, batch: int, rounds: int, operations: int
) -> list[Row]:
    rows: list[Row] = []
    pids = nodes.pids()
    for concurrency in (1, 4) if batch == 1 else (1,):
        local = [
            Contender("plain", plain_reads(blocks, batch)),
            Contender("kvpool", pool_reads(clients["a"], blocks, batch), pids),
        ]
        rows += compare("local", blocks.size, batch, concurrency, rounds, operations, local)
    wait_for_index(clients["b"], blocks)
    sender = plain.Sender(nodes.network, blocks.files)
    try:
        peer = [
            Contender("plain", plain_receives(sender, blocks, batch), [sender.process.pid]),
            Contender("kvpool", pool_reads(clients["b"], blocks, batch), pids),
        ]
        rows += compare("peer", blocks.size, batch, 1, rounds, operations, peer)
    finally:
        sender.close()
    return rows


def wait_for_index(client: Client, blocks: Blocks) -> None:
    deadline = time.monotonic() + 20
    while not all(client.lookup(blocks.idents)):
        if time.monotonic() > deadline:
            raise RuntimeError("node b does not learn of the blocks on node a")
        time.sleep(0.05)


def table(rows: list[Row]) -> str:
    lines = [
        "path   block    batch  threads  system      GB/s    p50 ms    p99 ms  cpu s/GB  of limit  asked",
        "-----  -------  -----  -------  ------  --------  --------  --------  --------  --------  -----",
    ]
    for r in rows:
        asked = ASKED.get((r.path, r.size, r.concurrency, r.batch)) if r.system == "kvpool" else None
        size = f"{r.size // MIB} MiB" if r.size >= MIB else f"{r.size // 1024} KiB"
        lines.append(
            f"{r.path:5s}  {size:>7s}  {r.batch:5d}  {r.concurrency:7d}  {r.system:6s}  {r.gb_s:8.2f}  "
            f"{r.p50_ms:8.2f}  "
            f"{r.p99_ms:8.2f}  {r.cpu_s_per_gb:8.3f}  {r.ratio_to_limit:8.2f}  {f'{asked:.2f}' if asked else '':>5s}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run and print; 1 if a ratio is below what is asked and `--gate` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench data", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="how often the contenders take turns")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="where blocks and results go")
    parser.add_argument("--congestion-control", default="cubic", help="of the peers' network, where the kernel has it")
    parser.add_argument("--loopback", action="store_true", help="no network name spaces, even where they could be made")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a ratio is below what is asked")
    options = parser.parse_args(argv)
    threading.stack_size(256 * 1024)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    network = Network(options.congestion_control, loopback=options.loopback)
    load = os.getloadavg()[0]
    began = time.monotonic()
    try:
        rows = run(directory, network, options.rounds)
    finally:
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"peers: {network.kind}; congestion control {network.congestion_control}; {os.cpu_count()} processors,")
    print(f"load before the run {load:.1f}; {options.rounds} rounds, contenders taking turns; {_seconds(began)} s\n")
    print(table(rows))
    result = options.dir / "data.json"
    result.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    print(f"\nwritten: {result}")
    short = [
        (r, asked)
        for r in rows
        if r.system == "kvpool"
        and (asked := ASKED.get((r.path, r.size, r.concurrency, r.batch))) is not None
        and r.ratio_to_limit < asked
    ]
    for row, asked in short:
        print(f"below what is asked: {row.path} {row.ratio_to_limit:.2f} < {asked:.2f}")
    return 1 if short and options.gate else 0


def _seconds(began: float) -> int:
    return round(time.monotonic() - began)
