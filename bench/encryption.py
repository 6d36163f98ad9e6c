"""`python -m bench encryption`: what `spec.transport.encryption: Always` costs on reads from a peer.

Two pools of two nodes each, one with ControlOnly and one with Always, beside sendfile into recv_into + xxh3 over the
same network; they take turns. `ratio_to_limit` of ControlOnly and Always by each other is the cost in speed,
`cpu_s_per_gb` (both ends) the cost in processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from bench import plain
from bench.data import FINGERPRINT, MIB, PATIENT, Blocks, plain_receives, pool_reads, wait_for_index
from bench.measure import Contender, compare
from bench.nodes import Network, Nodes
from kvpool.client import Client
from kvpool.config import ClientConfig

if TYPE_CHECKING:
    from bench.measure import Row

_WAYS = ("ControlOnly", "Always")


def run(directory: Path, network: Network, rounds: int) -> list[Row]:
    rows: list[Row] = []
    with contextlib.ExitStack() as made:
        pools: dict[str, tuple[Nodes, dict[str, Client]]] = {}
        for way in _WAYS:
            home = directory / way
            home.mkdir()
            nodes = made.enter_context(contextlib.closing(Nodes(home, network, 16 << 30, encryption=way)))
            clients = {}
            for node in ("a", "b"):
                client = Client(ClientConfig(socket=nodes.socket_of(node), deadlines=PATIENT), fingerprint=FINGERPRINT)
                made.callback(client.close)
                if not client.wait_connected(20):
                    raise RuntimeError("no connection to a sidecar")
                clients[node] = client
            pools[way] = nodes, clients
        for size, batch, count, operations in ((32 * MIB, 1, 8, 4), (2 * MIB, 32, 64, 2)):
            blocks = {
                way: Blocks(size, count, clients["a"], directory / way / "a" / "nvme")
                for way, (_, clients) in pools.items()
            }
            for way, (_, clients) in pools.items():
                wait_for_index(clients["b"], blocks[way])
            sender = plain.Sender(network, blocks[_WAYS[0]].files)
            try:
                contenders = [Contender("limit", plain_receives(sender, blocks[_WAYS[0]], batch), [sender.process.pid])]
                contenders += [
                    Contender(way, pool_reads(clients["b"], blocks[way], batch), nodes.pids())
                    for way, (nodes, clients) in pools.items()
                ]
                rows += compare("peer-read", size, batch, 1, rounds, operations, contenders)
            finally:
                sender.close()
    return rows


def main(argv: list[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench encryption", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="measurement rounds; all systems run in each round")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    parser.add_argument(
        "--congestion-control",
        default="cubic",
        help="TCP congestion control of the peer network, if the kernel supports it",
    )
    parser.add_argument(
        "--loopback", action="store_true", help="use the loopback interface instead of network namespaces"
    )
    options = parser.parse_args(argv)
    threading.stack_size(256 * 1024)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    network = Network(options.congestion_control, loopback=options.loopback)
    try:
        rows = run(directory, network, options.rounds)
    finally:
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{network.kind}; congestion control {network.congestion_control}; {os.cpu_count()} processors")
    for r in rows:
        print(
            f"{r.size // MIB:3d} MiB x {r.batch:2d}  {r.system:11s}  {r.gb_s:6.2f} GB/s  p50 {r.p50_ms:8.2f} ms  "
            f"{r.cpu_s_per_gb:6.3f} CPU s/GB  {r.ratio_to_limit:5.2f} of the limit"
        )
    for size in sorted({r.size for r in rows}):
        plainly, always = (next(r for r in rows if r.size == size and r.system == way) for way in _WAYS)
        print(
            f"Always beside ControlOnly at {size // MIB} MiB: {always.gb_s / plainly.gb_s:.2f} of the GB/s, "
            f"{always.cpu_s_per_gb / plainly.cpu_s_per_gb:.1f} times the CPU s/GB"
        )
    result = options.dir / "encryption.json"
    result.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    print(f"written: {result}")
    return 0
