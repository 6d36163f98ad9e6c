"""A pool of three sidecars, a real Redis and a shared directory, as processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from bench.nodes import _free_port as free_port
from bench.nodes import end_with_parent
from kvpool import config
from kvpool_testing.residue import unsettled

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
TENANTS = ("team-a", "team-b")
NODES = ("a", "b", "c")
_SIGNALS = {"stop": signal.SIGSTOP, "go on": signal.SIGCONT}


class Child:
    """A process that can be killed, stopped and started again."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.command = command
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent
            )
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20) -> int | None:
        """Its exit code, None if it had to be killed."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


class Sidecar(Child):
    """One node."""

    def __init__(self, pool: Pool, name: str, capacity: int, shared_capacity: int, deadlines: config.Deadlines) -> None:
        self.name = name
        self.home = pool.directory / name
        self.nvme = self.home / "nvme"
        self.nvme.mkdir(parents=True, mode=0o700)
        self.http = free_port()
        self.sockets = {tenant: str(self.home / f"{tenant}.sock") for tenant in TENANTS}
        made = config.PoolConfig(
            pool="soak",
            namespace="soak",
            uid="6b1d1f0e-soak",
            local=(config.LocalTier("nvme", str(self.nvme), capacity, reserve_free_percent=0),),
            shared=config.SharedTier("shared", str(pool.shared), capacity_bytes=shared_capacity),
            index=config.IndexConfig(pool.url, username="kvpool", lookup_timeout_ms=100, lease_s=5),
            peer=config.PeerConfig(port=free_port(), connect_timeout_ms=1000),
            deadlines=deadlines,
            http_port=self.http,
        )
        (self.home / "pool.json").write_text(config.dumps(made))
        sockets = [f"--socket={path}={tenant}" for tenant, path in self.sockets.items()]
        command = [sys.executable, "-m", "kvpool_sidecar", "serve", "--node", name, "--address", "127.0.0.1", *sockets]
        env = {"KVPOOL_CONFIG": str(self.home / "pool.json"), "KVPOOL_SECRET_DIR": str(pool.secret)}
        super().__init__(command, pool.directory / f"{name}.log", env)

    def status(self) -> dict[str, Any]:
        """OSError while it does not answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def wait_ready(self, timeout_s: float = 120) -> None:  # a busy machine may need a minute
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running:
            with contextlib.suppress(OSError):
                if self.status()["ready"]:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} is not ready: {self.log.read_text()[-2000:]}")


class Pool:
    """Until `close`. `capacity` of each node's drive and of the shared tier, bytes."""

    def __init__(self, directory: Path, capacity: int, deadlines: config.Deadlines) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.shared.mkdir(mode=0o700)
        self.secret = directory / "secret"
        self.secret.mkdir()
        (self.secret / "pool-secret").write_text(secrets.token_hex(32))
        (self.secret / "index-password").write_text(secrets.token_hex(16))
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        env = {"KVPOOL_SECRET_DIR": str(self.secret)}
        command = [
            sys.executable,
            "-m",
            "kvpool_sidecar",
            "index-server",
            "--port",
            str(port),
            "--dir",
            str(directory / "index"),
        ]
        self.redis = Child(command, directory / "redis.log", env)
        self.nodes = {name: Sidecar(self, name, capacity, 2 * capacity, deadlines) for name in NODES}

    def start(self) -> None:
        self.redis.start()
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_ready()

    def flush_index(self) -> None:
        """As an operator of that Redis would."""
        command = [
            sys.executable,
            "-m",
            "kvpool_sidecar",
            "index-server",
            "--flush",
            "--dir",
            str(self.directory / "index"),
        ]
        subprocess.run(command, check=False, capture_output=True, timeout=20)

    def unsettled(self) -> list[str]:
        """Why it is not quiet and whole."""
        reasons = []
        for node in self.nodes.values():
            try:
                reasons += [f"{node.name}: {reason}" for reason in unsettled(node.status())]
            except OSError as e:
                reasons.append(f"{node.name}: {e}")
        return reasons

    def close(self) -> None:
        for child in [*self.nodes.values(), self.redis]:
            child.end(signal.SIGKILL)
