"""Real sidecars on this machine, each with a directory, a socket and ports of its own; a real Redis; a shared tier."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool import config

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports: one that is free again may be given a second time."""
    with contextlib.ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
        return found


def until(condition: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def end_with_parent() -> None:
    """In a child, before exec: the kernel ends it when the process that started it dies, however that dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Process:
    """A child that is ended by `stop`, whatever state it is in."""

    def __init__(self, log: Path, arguments: list[str], env: dict[str, str]) -> None:
        self.log = log
        self._arguments = arguments
        self._env = {**os.environ, **env}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvpool_sidecar", *self._arguments]
            self.process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log, preexec_fn=end_with_parent)

    def signal(self, number: int) -> None:
        """A process that is stopped has stopped when this returns: each of its threads stops by itself."""
        assert self.process is not None
        self.process.send_signal(number)
        while number == signal.SIGSTOP and not self._has_stopped():
            time.sleep(0.001)

    def _has_stopped(self) -> bool:
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def stop(self, *, kill: bool = False) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


class Node(Process):
    """One sidecar. `sockets` maps tenants to paths."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        tenants: tuple[str, ...],
        deadlines: config.Deadlines,
        capacity: int = 8 << 30,
    ) -> None:
        self.name = name
        self.home = cluster.directory / name
        self.http = free_port()
        (self.home / "nvme").mkdir(parents=True)
        self.sockets = {tenant: str(self.home / f"{tenant}.sock") for tenant in tenants}
        self.pool = config.PoolConfig(
            pool="tests",
            namespace="tests",
            uid="0d4e8f3c-tests",
            local=(config.LocalTier("nvme", str(self.home / "nvme"), capacity, reserve_free_percent=1),),
            shared=config.SharedTier("shared", str(cluster.shared)) if cluster.shared else None,
            index=config.IndexConfig(cluster.index_url, username="kvpool", lookup_timeout_ms=200, lease_s=5),
            peer=config.PeerConfig(port=free_port(), connect_timeout_ms=1000),
            deadlines=deadlines,
            http_port=self.http,
            salt_tags=cluster.salt_tags,
            admin_port=free_port() if cluster.takes_orders else 0,
            events=config.EventsConfig(
                **dict(zip(("port", "replay_port"), free_ports(2), strict=True), enabled=bool(cluster.events))
                | (cluster.events if isinstance(cluster.events, dict) else {})
            ),
        )
        (self.home / "pool.json").write_text(config.dumps(self.pool))
        arguments = ["serve"]
        for tenant, path in self.sockets.items():
            arguments += ["--socket", f"{path}={tenant}"]
        env = {
            "KVPOOL_CONFIG": str(self.home / "pool.json"),
            "KVPOOL_SECRET_DIR": str(cluster.secret),
            "KVPOOL_NODE": name,
            "KVPOOL_ADDRESS": "127.0.0.1",
        }
        super().__init__(cluster.directory / f"{name}.log", arguments, env)

    @property
    def socket(self) -> str:
        return next(iter(self.sockets.values()))

    def wait_ready(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/readyz", timeout=1):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.name} is not ready: {self.log.read_text()[-3000:]}")

    def status(self) -> dict[str, Any]:
        """What it lists itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=5) as answer:
            return json.loads(answer.read())

    def announced(self) -> int:
        """Blocks that the index has been told of."""
        return self.status()["index"]["announced"]

    def block_files(self) -> list[Path]:
        """The files of all blocks that this node serves."""
        return [f for f in (self.home / "nvme" / "blocks").rglob("*") if f.is_file() and len(f.name) == 64]


class Cluster:
    """`names` nodes, a Redis, and a shared directory if asked for. Close it to end every process.

    `events`: True, or fields of kvpool.config.EventsConfig.
    """

    def __init__(
        self,
        directory: Path,
        names: tuple[str, ...] = ("a",),
        *,
        tenants: tuple[str, ...] = ("team",),
        shared: bool = False,
        index: bool = True,
        deadlines: config.Deadlines | None = None,
        events: bool | dict[str, Any] = False,
        salt_tags: bool = False,
        takes_orders: bool = False,
    ) -> None:
        self.directory = directory
        self.shared = directory / "shared" if shared else None
        if self.shared is not None:
            self.shared.mkdir(exist_ok=True)
        self.secret = directory / "secret"
        self.secret.mkdir()
        (self.secret / "pool-secret").write_text(secrets.token_hex(32))
        (self.secret / "index-password").write_text(secrets.token_hex(16))
        port = free_port()
        self.index_url = f"redis://127.0.0.1:{port}/0" if index else ""
        redis = ["index-server", "--port", str(port), "--dir", str(directory / "index")]
        self.index = Process(directory / "index.log", redis, {"KVPOOL_SECRET_DIR": str(self.secret)})
        self._deadlines = deadlines or config.Deadlines(lookup_ms=500, load_min_ms=3000)
        self.events = events
        self.salt_tags = salt_tags
        self.takes_orders = takes_orders
        self._tenants = tenants
        self.nodes = {name: Node(self, name, tenants, self._deadlines) for name in names}
        try:
            if index:
                self.index.start()
            for node in self.nodes.values():
                node.start()
            for node in self.nodes.values():
                node.wait_ready()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def add(self, name: str, capacity: int = 8 << 30) -> Node:
        """One more node, ready; `capacity` of its drive in bytes."""
        node = self.nodes[name] = Node(self, name, self._tenants, self._deadlines, capacity)
        node.start()
        node.wait_ready()
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()
        self.index.stop()
