"""`python -m bench drain`: a node with hot data is drained; what its sessions find afterwards on other nodes.

Three real sidecars and a real Redis on loopback. 64 sessions of 8 blocks of 2 MiB (1 GiB) are stored and used on node
d; then d is told to leave, by the order that the operator gives, and is killed when everything hot is elsewhere. The
hit rate is that of loads that ask for all blocks of all sessions, before on d and afterwards on a and b in turn.
Contenders: copies to peers, copies to the shared directory, and no drain at all (the node is killed). Meanwhile the
sessions go on on d: what a load takes then is compared with what it took before. Prints a table and writes
out/bench/drain.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.data import MIB, PATIENT, slots
from bench.nodes import end_with_parent
from kvpool import config
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol.keys import block_id, fingerprint
from kvpool_operator.desired.inputs import PoolSecret
from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_operator.sidecars.admin_client import SidecarAddress, open_admin_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FINGERPRINT = fingerprint({"bench": "drain"})
UID = "bench"
BLOCKS = 8  # of a session
TARGET = 0.95


class Cluster:
    """Nodes a, b and d, and their index. Everything ends with `close`."""

    def __init__(self, directory: Path, *, shared: bool, capacity: int) -> None:
        self._directory = directory
        self._shared = directory / "shared" if shared else None
        self._capacity = capacity
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http: dict[str, int] = {}
        self.admin_port = _free_port()
        identity = PoolIdentity("bench", "bench", UID)
        authority = peer_files({}, AuthorityRoot.generate(), identity, datetime.now(UTC))
        self.secret = PoolSecret(
            pool_id=UID,
            pool_secret=secrets.token_hex(32),
            managed_index_password=secrets.token_hex(16),
            peer_files={**authority.published, **authority.keys},  # each node signs for itself: there is no operator
        )
        folder = directory / "secret"
        folder.mkdir()
        files = {"pool-secret": self.secret.pool_secret, "index-password": self.secret.managed_index_password}
        for name, text in {**files, **self.secret.peer_files}.items():
            (folder / name).write_text(text)
        if self._shared is not None:
            self._shared.mkdir(mode=0o700)
        port = _free_port()
        self._index = f"redis://127.0.0.1:{port}/0"
        self._spawn("index", ["index-server", "--port", str(port), "--dir", str(directory / "index")])
        for node in "abd":
            self._start(node)

    def socket(self, node: str) -> str:
        return str(self._directory / node / "kv.sock")

    def status(self, node: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http[node]}/status", timeout=5) as answer:
            status: dict[str, Any] = json.loads(answer.read())
            return status

    async def evacuate(self, bandwidth: int) -> None:
        async with open_admin_client(self.admin_port) as commands:
            params = {"bandwidth": bandwidth}
            await commands.start(self.secret, SidecarAddress("d", "127.0.0.1"), "bench", "evacuate", params)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def _start(self, node: str) -> None:
        home = self._directory / node
        home.mkdir()
        self._http[node] = _free_port()
        pool = config.PoolConfig(
            pool="bench", namespace="bench", uid=UID,
            local=(config.LocalTier("nvme", str(home / "nvme"), self._capacity, reserve_free_percent=1),),
            shared=config.SharedTier("shared", str(self._shared)) if self._shared is not None else None,
            index=config.IndexConfig(self._index, username="kvpool", lookup_timeout_ms=500),
            cache=config.CacheConfig(warm_up_bytes_per_s=1, write_policy="WriteThroughSelective", write_min_hits=1000),
            peer=config.PeerConfig(port=_free_port()), http_port=self._http[node],
            admin_port=self.admin_port if node == "d" else 0,
        )  # fmt: skip
        (home / "pool.json").write_text(config.dumps(pool))
        arguments = ["--config", str(home / "pool.json"), "--node", node, "--address", "127.0.0.1"]
        self._spawn(node, ["serve", *arguments, "--socket", f"{self.socket(node)}=bench"])
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if self.status(node)["index"]["connected"]:
                    return
            if time.monotonic() > deadline or self._processes[node].poll() is not None:
                raise RuntimeError((self._directory / f"{node}.log").read_text()[-2000:])
            time.sleep(0.05)

    def _spawn(self, name: str, arguments: list[str]) -> None:
        secret = ["--secret-dir", str(self._directory / "secret")]
        command = [sys.executable, "-m", "kvpool_sidecar", arguments[0], *secret, *arguments[1:]]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)


class Sessions:
    """`count` conversations: blocks that belong together."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.block_ids = [[block_id(FINGERPRINT, f"{s}/{n}".encode()) for n in range(BLOCKS)] for s in range(count)]
        self.views = slots(size, BLOCKS)

    def store(self, client: Client) -> None:
        for number, block_ids in enumerate(self.block_ids):
            for n, view in enumerate(self.views):
                view[:] = _pattern(number, n) * (self.size // 4096)
            results = client.put_from(block_ids, self.views)
            if not all(r.stored for r in results):
                raise RuntimeError(f"not stored: {results}")

    def load(self, client: Client, number: int) -> tuple[int, float]:
        """How many of one session's blocks could be had before the first that could not, and milliseconds."""
        began = time.perf_counter()
        client.lookup(self.block_ids[number])
        results = client.get_into(self.block_ids[number], self.views)
        took = (time.perf_counter() - began) * 1e3
        for n, (result, view) in enumerate(zip(results, self.views, strict=True)):
            if not result.ok:
                return n, took
            if view[:4096] != _pattern(number, n) or view[-4096:] != _pattern(number, n):
                raise RuntimeError(f"session {number}: block {n} came back with other bytes")
        return BLOCKS, took

    def hit_rate(self, clients: Sequence[Client]) -> tuple[float, list[float]]:
        """Of all sessions, on the clients in turn; and milliseconds of each load."""
        found = [self.load(clients[n % len(clients)], n) for n in range(len(self.block_ids))]
        return sum(count for count, _ in found) / (BLOCKS * len(self.block_ids)), [took for _, took in found]


def measure(kind: str, count: int, size: int, bandwidth: int) -> dict[str, object]:
    """One life of node d."""
    total = count * BLOCKS * size
    with tempfile.TemporaryDirectory() as made:
        cluster = Cluster(Path(made), shared=kind == "shared", capacity=3 * total)
        try:
            with _clients(cluster) as clients:
                sessions = Sessions(count, size)
                sessions.store(clients["d"])
                sessions.hit_rate([clients["d"]])
                before, calm = sessions.hit_rate([clients["d"]])
                seconds, during = 0.0, [0.0]
                if kind != "abandoned":
                    seconds, during = drain(cluster, sessions, clients["d"], bandwidth)
                status = cluster.status("d")["drain"]
                cluster.kill("d")
                after, moved = sessions.hit_rate([clients["a"], clients["b"]])
        finally:
            cluster.close()
    return {
        "path": kind, "size": size, "bytes": total, "bandwidth": bandwidth, "hit_rate_before": before,
        "hit_rate_after": after, "after_over_before": after / before, "seconds": seconds,
        "mb_s": status["moved_bytes"] / seconds / 1e6 if seconds else 0.0, "moved_blocks": status["moved_blocks"],
        "load_ms_before": statistics.median(calm), "load_ms_during": statistics.median(during),
        "load_ms_after": statistics.median(moved),
    }  # fmt: skip


def drain(cluster: Cluster, sessions: Sessions, client: Client, bandwidth: int) -> tuple[float, list[float]]:
    """Seconds until everything is elsewhere, and milliseconds of loads meanwhile."""
    began = time.monotonic()
    asyncio.run(cluster.evacuate(bandwidth))
    times: list[float] = []
    while not cluster.status("d")["drain"]["clean"]:
        if time.monotonic() - began > 600:
            raise RuntimeError(str(cluster.status("d")["drain"]))
        found, took = sessions.load(client, len(times) % len(sessions.block_ids))
        if found != BLOCKS:
            raise RuntimeError("the node that is drained does not serve any more")
        times.append(took)
        time.sleep(0.05)
    return time.monotonic() - began, times


@contextlib.contextmanager
def _clients(cluster: Cluster) -> Iterator[dict[str, Client]]:
    clients = {
        node: Client(ClientConfig(socket=cluster.socket(node), deadlines=PATIENT), fingerprint=FINGERPRINT)
        for node in "abd"
    }
    try:
        for node, client in clients.items():
            if not client.wait_connected(30):
                raise RuntimeError(f"node {node} does not answer")
        yield clients
    finally:
        for client in clients.values():
            client.close()


def _pattern(session: int, block: int) -> bytes:
    return (session * BLOCKS + block).to_bytes(8, "big") * 512


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'':10s} {'before':>7s} {'after':>7s} {'ratio':>7s} {'s':>7s} {'MB/s':>7s} {'load ms':>8s} {'during':>8s} "
        f"{'after':>8s}"
    ]
    lines += [
        f"{r['path']:10s} {r['hit_rate_before']:7.3f} {r['hit_rate_after']:7.3f} {r['after_over_before']:7.3f} "
        f"{r['seconds']:7.1f} {r['mb_s']:7.0f} {r['load_ms_before']:8.1f} {r['load_ms_during']:8.1f} "
        f"{r['load_ms_after']:8.1f}"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """0 if what is asked was reached wherever the node was drained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--size", type=int, default=2 * MIB)
    parser.add_argument("--bandwidth", type=int, default=256 * MIB)
    parser.add_argument("--out", type=Path, default=Path("out/bench/drain.json"))
    args = parser.parse_args(argv)
    rows = [measure(kind, args.sessions, args.size, args.bandwidth) for kind in ("peers", "shared", "abandoned")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    drained = [float(str(r["after_over_before"])) for r in rows if r["path"] != "abandoned"]
    print(f"target: {TARGET} of the hit rate before; reached: {min(drained):.3f}")
    return 0 if min(drained) >= TARGET else 1
