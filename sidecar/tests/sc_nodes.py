"""Real sidecars, a real index and a shared directory on this machine, each node at a loopback address of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from sc_raw import SECRET, GoneError, Raw

from kvpool import config

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count(1)
MIB = 1 << 20
PEER_PORT, HTTP_PORT, INDEX_PORT = 17421, 17422, 16379


def fresh_address() -> str:
    """A loopback address that no other test of this run uses."""
    n = next(_numbers)
    return f"127.{64 + os.getpid() % 128}.{n // 250}.{n % 250 + 1}"


def wait_for(condition, what: str, timeout: float = 15.0):
    """The condition's first true value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.02)


class Process:
    """A `kvpool-sidecar` process; `stop` ends it, whatever state it is in."""

    def __init__(self, log: Path, arguments: list[str], prefix: tuple[str, ...] = (), env=None) -> None:
        self.log = log
        self.arguments = [*prefix, sys.executable, "-m", "kvpool_sidecar", *arguments]
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self):
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.arguments, env=self.env, stdout=log, stderr=log)
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 10) -> int:
        """Its exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            return process.wait(timeout)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Node(Process):
    """One sidecar with a fixed socket for each tenant."""

    def __init__(
        self, cluster, name: str, *, tenants=("team-a", "team-b"), arguments=(), prefix=(), env=None, **pool
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.home = cluster.directory / name
        self.home.mkdir()
        self.address = fresh_address()
        self.nvme = self.home / "nvme"
        self.sockets = {tenant: self.home / f"{tenant}.sock" for tenant in tenants}
        self.pool = config.PoolConfig(
            **{
                "pool": "test",
                "namespace": "kvpool",
                "uid": "pool-uid",
                "local": (config.LocalTier("nvme", str(self.nvme), 512 * MIB, reserve_free_percent=0),),
                "shared": config.SharedTier("shared", str(cluster.shared)) if cluster.shared else None,
                "index": config.IndexConfig(cluster.index_url, username="kvpool", lookup_timeout_ms=1000, lease_s=2),
                "peer": config.PeerConfig(port=PEER_PORT, connect_timeout_ms=1000),
                "http_port": HTTP_PORT,
                **pool,
            }
        )
        self.write_config()
        sockets = [f"--socket={path}={tenant}" for tenant, path in self.sockets.items()]
        super().__init__(
            cluster.directory / f"{name}.log",
            [
                "serve",
                f"--config={self.home / 'pool.json'}",
                f"--secret-dir={cluster.secret}",
                f"--node={name}",
                f"--address={self.address}",
                *sockets,
                *arguments,
            ],
            prefix,
            env,
        )

    def write_config(self) -> None:
        (self.home / "pool.json").write_text(config.dumps(self.pool))

    def ready(self):
        def is_ready() -> bool:
            if not self.running:
                raise AssertionError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                return self.get("/readyz") == b"ready\n"
            return False

        wait_for(is_ready, f"{self.name} is ready", 60)
        return self

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.address}:{HTTP_PORT}{path}", timeout=5) as response:
            return response.read()

    def status(self) -> dict:
        return json.loads(self.get("/status"))

    def connect(self, tenant: str = "team-a", **kw) -> Raw:
        def attempt():
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError, GoneError):
                return Raw(self.sockets[tenant], **kw)
            return None

        return wait_for(attempt, f"{self.name} takes a connection")

    def wait_announced(self) -> None:
        def announced() -> bool:
            s = self.status()
            return s["scanned"] and s["index"]["connected"] and s["index"]["announced"] >= s["blocks"]

        wait_for(announced, f"{self.name} announced its blocks")

    def files(self, below: str = "blocks") -> list[Path]:
        return [f for f in (self.nvme / below).rglob("*") if f.is_file()]


class Cluster:
    """`with Cluster(directory, shared=True) as c: a = c.node("a")`."""

    def __init__(self, directory: Path, *, index: bool = True, shared: bool = False) -> None:
        self.directory = directory
        self.secret = directory / "secret"
        self.secret.mkdir()
        (self.secret / "pool-secret").write_bytes(SECRET)
        (self.secret / "index-password").write_text("index password\n")
        self.shared = directory / "shared" if shared else None
        if self.shared:
            self.shared.mkdir(mode=0o700)
        self.index = None
        self.index_url = ""
        self.nodes: list[Node] = []
        self.others: list[Process] = []
        if index:
            address = fresh_address()
            self.index_url = f"redis://{address}:{INDEX_PORT}/0"
            self.index = Process(
                directory / "index.log",
                [
                    "index-server",
                    f"--bind={address}",
                    f"--port={INDEX_PORT}",
                    f"--dir={directory / 'index'}",
                    f"--secret-dir={self.secret}",
                ],
            ).start()

    def node(self, name: str, **kw) -> Node:
        """A node that is ready; where there is an index, one that it knows."""
        node = Node(self, name, **kw)
        self.nodes.append(node)
        node.start()
        node.ready()
        if self.index:
            wait_for(lambda: node.status()["index"]["connected"], f"{name} has joined the index")
        return node

    def flush_index(self) -> None:
        flush = Process(self.directory / "flush.log", ["index-server", "--flush", f"--dir={self.directory / 'index'}"])
        assert flush.start().process.wait(10) == 0

    def run(self, process: Process) -> Process:
        self.others.append(process)
        return process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.nodes, *self.others, *([self.index] if self.index else [])]:
            process.kill()
