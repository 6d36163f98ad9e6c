"""`python -m bench data`: the pool's data path against this machine's limit and other systems, in one run.

Prints a table and writes out/bench/data.json and data.png. local-read: a block on this node; the limit is open + preadv
+ xxh3 of a copy whose page cache is in large folios. peer-read: a block on another node; the limit is sendfile of such
copies into recv_into + xxh3 over the same network. `plain` is the limit's program on the pool's own files, however they
are cached. shared-read: a block in a shared directory. local-write: an O_DIRECT write. Other systems (bench/peers):
LMCache's fs, redis and resp connectors, vLLM's fs tier, Mooncake's store over TCP, plain Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import folios, picture, plain
from bench.measure import Contender, Row, compare, table
from bench.nodes import Network, Nodes
from bench.peers import environment
from bench.peers.systems import NAMES, Peers
from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.protocol.block import HEADER_BYTES, decode_header
from kvpool.protocol.keys import block_id, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MIB = 1 << 20
SIZES = {"256K": MIB // 4, "2M": 2 * MIB, "32M": 32 * MIB}
PATHS = ("local-read", "peer-read", "shared-read", "local-write")
SHAPES = ((MIB // 4, (8, 32, 64)), (2 * MIB, (1, 8, 64)), (32 * MIB, (1, 8)))
FULL = tuple((size, (1, 8, 32, 64, 160)) for size in SIZES.values())
# path, block size in bytes, threads, batch size -> minimum ratio to the limit
TARGETS = {
    ("local-read", 32 * MIB, 1, 1): 0.95,
    ("local-read", 2 * MIB, 1, 1): 0.95,
    ("local-read", 2 * MIB, 1, 64): 0.95,
    ("local-read", MIB // 4, 1, 32): 0.8,
    ("local-read", MIB // 4, 1, 64): 1.0,
    ("local-write", 32 * MIB, 1, 1): 0.9,
    ("local-write", 2 * MIB, 1, 1): 0.9,
    ("peer-read", 32 * MIB, 1, 1): 0.9,
    ("peer-read", 2 * MIB, 1, 1): 0.85,
    ("peer-read", 2 * MIB, 1, 64): 0.9,
    ("peer-read", MIB // 4, 1, 64): 0.9,
}
_made = itertools.count()
_WORKING_SET = 128 * MIB  # minimum, so that the blocks exceed every processor cache
_LARGE = 0.9  # of the limit's bytes are in large folios, otherwise it is no true limit
_PEERS_UP_TO = 1 << 30  # bytes of blocks that are read in turn; more needs several times as much memory
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
        self.block_ids = [block_id(FINGERPRINT, f"{size}/{next(_made)}".encode()) for _ in range(count)]
        view = buffer(size)
        known = _files(home)
        for i, one in enumerate(self.block_ids):
            view[:] = _pattern(i) * (size // 4096)
            (result,) = client.put_from([one], [view])
            if not result.stored:
                raise RuntimeError(f"block {i} of {size} bytes was not stored: {result.reason}")
        by_ident = {_block_id(file): file for file in _files(home) - known}
        self.files = [by_ident[one] for one in self.block_ids]

    @contextlib.contextmanager
    def copies(self, directory: Path) -> Iterator[list[Path]]:
        """Copies of the files that are in the page cache in large folios: what the limit reads."""
        home = directory / f"limit-{next(_made)}"
        try:
            yield folios.copy_large(self.files, home)
        finally:
            shutil.rmtree(home)

    def check(self, n: int, view: memoryview) -> None:
        if view[:4096] != _pattern(n) or view[-4096:] != _pattern(n):
            raise RuntimeError(f"block {n} came back with other bytes")


def _files(home: Path) -> set[Path]:
    return {file for file in home.rglob("*") if len(file.name) == 64 and file.is_file()}


def _block_id(file: Path) -> bytes:
    """Of a block's file, which is out of the page cache afterwards: the pool itself brings it there."""
    fd = os.open(file, os.O_RDONLY)
    try:
        found = decode_header(os.pread(fd, HEADER_BYTES, 0)).block_id
        folios.drop(fd)
    finally:
        os.close(fd)
    return found


def _pattern(n: int) -> bytes:
    return n.to_bytes(8, "little") * 512


def pool_reads(client: Client, blocks: Blocks, batch: int) -> Callable[[int], Callable[[int], None]]:
    def make(thread: int) -> Callable[[int], None]:
        views = slots(blocks.size, batch)

        def operation(n: int) -> None:
            first = (thread * 7 + n) * batch % len(blocks.block_ids)
            results = client.get_into(blocks.block_ids[first : first + batch], views)
            if not all(r.ok for r in results):
                raise RuntimeError(f"missed: {next(r for r in results if not r.ok)}")
            blocks.check(first, views[0])

        return operation

    return make


def plain_reads(
    blocks: Blocks, batch: int, files: Sequence[Path] | None = None
) -> Callable[[int], Callable[[int], None]]:
    """Read `files`, or those of the pool."""
    files = blocks.files if files is None else files

    def make(thread: int) -> Callable[[int], None]:
        views, scratch = slots(blocks.size, batch), buffer(HEADER_BYTES)

        def operation(n: int) -> None:
            first = (thread * 7 + n) * batch % len(files)
            for file, view in zip(files[first : first + batch], views, strict=True):
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


def writes(client: Client, size: int, directory: Path) -> list[Contender]:
    counter = iter(range(10**9))

    def pool(_: int) -> Callable[[int], None]:
        view = buffer(size)

        def operation(n: int) -> None:
            (result,) = client.put_from([block_id(FINGERPRINT, f"store/{size}/{next(counter)}".encode())], [view])
            if not result.stored:
                raise RuntimeError(f"not stored: {result.reason}")

        return operation

    def limit(_: int) -> Callable[[int], None]:
        view, header = buffer(size), buffer(HEADER_BYTES)
        return lambda n: plain.write_file(directory / "written", view, header)

    return [Contender("limit", limit), Contender("kvpool", pool)]


class Run:
    """One run of the benchmark: what was chosen, and the rows so far."""

    def __init__(self, directory: Path, network: Network, options: argparse.Namespace, peers: Peers | None) -> None:
        self.directory = directory
        self.network = network
        self.rounds: int = options.rounds
        self.shapes = [
            (s, b) for s, batches in (FULL if options.full else SHAPES) for b in batches if s in options.sizes
        ]
        self.paths: list[str] = options.paths
        self.peers = peers
        self.rows: list[Row] = []

    def all(self) -> list[Row]:
        if set(self.paths) - {"shared-read"}:
            with contextlib.closing(Nodes(self.directory, self.network, capacity_bytes=64 << 30)) as nodes:
                self._near(nodes)
        if "shared-read" in self.paths:
            home = self.directory / "by-directory"
            home.mkdir()
            with contextlib.closing(Nodes(home, self.network, 64 << 30, shared=self.directory / "shared")) as nodes:
                self._shared(nodes)
        return self.rows

    def _near(self, nodes: Nodes) -> None:
        with contextlib.ExitStack() as stack:
            a, b = (stack.enter_context(contextlib.closing(client_of(nodes, node))) for node in "ab")
            for size, batch in self.shapes:
                blocks = Blocks(size, batch * turns(size, batch), a, self.directory / "a" / "nvme")
                with blocks.copies(self.directory) as copies:
                    if "local-read" in self.paths:
                        self._compare("local-read", blocks, batch, self._local(nodes, a, blocks, batch, copies))
                    if "peer-read" in self.paths:
                        wait_for_index(b, blocks)
                        self._peers(nodes, b, blocks, batch, copies)
            files = self.directory / "plain"
            files.mkdir()
            for size in sorted({size for size, _ in self.shapes}) if "local-write" in self.paths else ():
                contenders = writes(a, size, files)
                contenders[1].pids = nodes.pids()
                if self.peers is not None:
                    contenders += self.peers.writers(size)
                self._measure("local-write", size, 1, 1, contenders)

    def _local(
        self, nodes: Nodes, client: Client, blocks: Blocks, batch: int, copies: Sequence[Path]
    ) -> list[Contender]:
        return [
            Contender("limit", plain_reads(blocks, batch, copies), files=copies),
            Contender("kvpool", pool_reads(client, blocks, batch), nodes.pids(), blocks.files),
            Contender("plain", plain_reads(blocks, batch), files=blocks.files),
        ]

    def _peers(self, nodes: Nodes, client: Client, blocks: Blocks, batch: int, copies: Sequence[Path]) -> None:
        with contextlib.ExitStack() as stack:
            limit, small = (
                stack.enter_context(contextlib.closing(plain.Sender(self.network, files)))
                for files in (copies, blocks.files)
            )
            reads = [
                Contender("limit", plain_receives(limit, blocks, batch), [limit.process.pid], copies),
                Contender("kvpool", pool_reads(client, blocks, batch), nodes.pids(), blocks.files),
                Contender("plain", plain_receives(small, blocks, batch), [small.process.pid], blocks.files),
            ]
            self._compare("peer-read", blocks, batch, reads)

    def _shared(self, nodes: Nodes) -> None:
        with contextlib.ExitStack() as stack:
            a, b = (stack.enter_context(contextlib.closing(client_of(nodes, node))) for node in "ab")
            for size, batch in self.shapes:
                blocks = Blocks(size, batch * turns(size, batch), a, nodes.directory / "a" / "nvme")
                wait_for_index(b, blocks)  # by asking the directory
                with blocks.copies(self.directory) as copies:
                    self._compare("shared-read", blocks, batch, self._local(nodes, b, blocks, batch, copies))

    def _compare(self, path: str, blocks: Blocks, batch: int, contenders: list[Contender]) -> None:
        if self.peers is not None and blocks.size * len(blocks.files) <= _PEERS_UP_TO:
            contenders += self.peers.readers(path, blocks.size, batch, len(blocks.files))
        self._measure(path, blocks.size, batch, 1, contenders)
        if path == "local-read" and batch == 1 and blocks.size == 32 * MIB:
            self._measure(path, blocks.size, batch, 4, contenders[:2])  # peers have one caller in their process

    def _measure(self, path: str, size: int, batch: int, concurrency: int, contenders: list[Contender]) -> None:
        operations = max(2, min(16, (64 * MIB) // (size * batch)))
        rows = compare(path, size, batch, concurrency, self.rounds, operations, contenders)
        self.rows += rows
        print(table(rows, asked_of, head=len(self.rows) == len(rows)), flush=True)


def turns(size: int, batch: int) -> int:
    """How many batches are read in turn."""
    return 1 if size * batch > _PEERS_UP_TO else max(2, -(-_WORKING_SET // (size * batch)))


def client_of(nodes: Nodes, node: str) -> Client:
    client = Client(
        ClientConfig(socket=nodes.socket_of(node), deadlines=PATIENT), fingerprint=FINGERPRINT,
        labels={"engine": "bench", "model": "bench"},
    )  # fmt: skip
    if not client.wait_connected(10):
        raise RuntimeError("no connection to a sidecar")
    return client


def wait_for_index(client: Client, blocks: Blocks) -> None:
    deadline = time.monotonic() + 20
    while not all(client.lookup(blocks.block_ids)):
        if time.monotonic() > deadline:
            raise RuntimeError("node b does not learn of the blocks on node a")
        time.sleep(0.05)


def asked_of(row: Row) -> float | None:
    return TARGETS.get((row.path, row.size, row.concurrency, row.batch)) if row.system == "kvpool" else None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench data", description=__doc__)
    made.add_argument(
        "--rounds", type=int, default=8, help="measurement rounds; all systems run in each round (default 8)"
    )
    made.add_argument("--full", action="store_true", help="batches of 1, 8, 32, 64 and 160 blocks of every size: 10 GB")
    made.add_argument(
        "--paths", type=_some_of(PATHS), default=list(PATHS), help=f"comma-separated paths, of {','.join(PATHS)}"
    )
    made.add_argument(
        "--sizes",
        type=_some_of(SIZES),
        default=list(SIZES.values()),
        help=f"comma-separated block sizes, of {','.join(SIZES)}",
    )
    made.add_argument(
        "--systems", type=_some_of(("kvpool", *NAMES)), default=None,
        help=f"of kvpool (always there),{','.join(NAMES)}; default: all of them if the engine's environment, 6 GB, "
        "is in the cache; a name that is given brings it",
    )  # fmt: skip
    made.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    made.add_argument(
        "--congestion-control",
        default="cubic",
        help="TCP congestion control of the peer network, if the kernel supports it",
    )
    made.add_argument(
        "--loopback", action="store_true", help="use the loopback interface instead of network namespaces"
    )
    made.add_argument("--gate", action="store_true", help="exit 1 if a ratio misses its target")
    return made


def _some_of(known: Sequence[str] | Mapping[str, int]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
        return [known[name] for name in names] if isinstance(known, Mapping) else names

    return parse


def main(argv: list[str]) -> int:
    """Run and print. Return 1 if a ratio misses its target and `--gate` was given."""
    options = parser().parse_args(argv)
    names = [name for name in (options.systems or NAMES) if name != "kvpool"]
    if options.systems is None and not environment.engine_is_there():
        print(
            "bench: peers are left out, for they need the engine's environment (6 GB): --systems names and brings them"
        )
        names = []
    threading.stack_size(256 * 1024)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    network = Network(options.congestion_control, loopback=options.loopback)
    load = os.getloadavg()[0]
    began = time.monotonic()
    print(f"peers: {network.kind}; congestion control {network.congestion_control}; {os.cpu_count()} processors,")
    print(f"load before the run {load:.1f}; {options.rounds} rounds, systems alternate\n", flush=True)
    try:
        with contextlib.ExitStack() as stack:
            peers = None
            if names:
                print("bench: starting the peers", file=sys.stderr, flush=True)
                peers = stack.enter_context(contextlib.closing(Peers(names, network, directory / "peers")))
            rows = Run(directory, network, options, peers).all()
    finally:
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    result = options.dir / "data.json"
    result.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    picture.draw(rows, options.dir / "data.png")
    print("\n'of limit' and 'cpu/limit': against the true limit, whose files are in the page cache in large folios;")
    print("'folios': how much of the contender's files is. 'plain': the limit's program on the pool's files.")
    if any(row.system == "limit" and row.large_folios is not None and row.large_folios < _LARGE for row in rows):
        print("WARNING: this file system or kernel gives no large folios: the limit is not the true one")
    print(f"\nwritten: {result}, {result.with_suffix('.png')}; {_seconds(began)} s")
    short = [(r, asked) for r in rows if (asked := asked_of(r)) is not None and r.ratio_to_limit < asked]
    for row, asked in short:
        what = f"{row.path} {row.size // 1024} KiB, {row.batch} at once, {row.concurrency} threads"
        print(f"below target: {what}: {row.ratio_to_limit:.2f} < {asked:.2f}")
    return 1 if short and options.gate else 0


def _seconds(began: float) -> int:
    return round(time.monotonic() - began)
