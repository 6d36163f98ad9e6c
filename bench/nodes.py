"""Two nodes of a pool as processes on this machine: a real Redis, two real sidecars, and, where possible, two networks.

As root with `ip` there, each sidecar lives in a network name space of its own, joined by a pair of virtual interfaces;
otherwise both are on the loopback interface. What was used is printed with every result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from kvpool import config

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.7"


def end_with_parent() -> None:
    """In a child, before exec: the kernel ends it when the process that started it dies, however that dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Network:
    """`a` and `b` are the addresses of the two nodes; `prefix(node)` starts a command where that node lives."""

    def __init__(self, congestion_control: str, *, loopback: bool = False) -> None:
        self.spaces: dict[str, str] = {}
        self.a = self.b = "127.0.0.1"
        self.kind = "loopback"
        available = _read("/proc/sys/net/ipv4/tcp_available_congestion_control").split()
        self.congestion_control = _read("/proc/sys/net/ipv4/tcp_congestion_control").strip()
        if not loopback and os.geteuid() == 0 and shutil.which("ip"):
            try:
                self._join(congestion_control if congestion_control in available else self.congestion_control)
            except subprocess.CalledProcessError as e:
                self.close()
                self.a = self.b = "127.0.0.1"
                print(f"bench: no network name spaces ({' '.join(e.cmd)} failed): peers are on loopback")

    def _join(self, congestion_control: str) -> None:
        names = {node: f"kvpool-bench-{os.getpid()}-{node}" for node in ("a", "b")}
        for node, name in names.items():
            _run("ip", "netns", "add", name)
            self.spaces[node] = name
        tag = os.getpid() % 100_000
        links = {"a": f"kvpa{tag}", "b": f"kvpb{tag}"}
        _run(
            "ip", "link", "add", links["a"], "netns", names["a"], "type", "veth",
            "peer", "name", links["b"], "netns", names["b"],
        )  # fmt: skip
        for node, address in (("a", f"{_SUBNET}.1"), ("b", f"{_SUBNET}.2")):
            ip = ("ip", "-n", names[node])
            _run(*ip, "addr", "add", f"{address}/24", "dev", links[node])
            _run(*ip, "link", "set", links[node], "up")
            _run(*ip, "link", "set", "lo", "up")
            _run(
                *ip, "route", "replace", f"{_SUBNET}.0/24", "dev", links[node], "src", address,
                "congctl", congestion_control,
            )  # fmt: skip
        self.a, self.b = f"{_SUBNET}.1", f"{_SUBNET}.2"
        self.kind = "two network name spaces, veth"
        self.congestion_control = congestion_control

    def prefix(self, node: str) -> list[str]:
        return ["ip", "netns", "exec", self.spaces[node]] if node in self.spaces else []

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Sockets that this thread makes meanwhile belong to the network of `node`."""
        if node not in self.spaces:
            yield
            return
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.spaces[node]}", os.O_RDONLY)
        try:
            if libc.setns(there, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            yield
        finally:
            libc.setns(home, _CLONE_NEWNET)
            os.close(home)
            os.close(there)

    def close(self) -> None:
        for name in self.spaces.values():
            subprocess.run(["ip", "netns", "del", name], check=False)
        self.spaces = {}


class Nodes:
    """Two nodes until `close`. `socket_of("a" | "b")` is where a client connects."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        capacity_bytes: int,
        *,
        encryption: str = "ControlOnly",
        shared: Path | None = None,
    ) -> None:
        self.directory = directory
        self._encryption = encryption
        self._shared = shared  # then nodes find each other's blocks there, and in no index
        self.network = network
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {"index": _free_port(), "a": _free_port(), "b": _free_port()}
        self._http = {"a": _free_port(), "b": _free_port()}
        self._capacity = capacity_bytes
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process that was started here."""
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def socket_of(self, node: str) -> str:
        return str(self.directory / node / "kv.sock")

    def status(self, node: str) -> dict[str, Any]:
        """/status of a node's sidecar. OSError if it does not answer."""
        url = f"http://{self.network.a if node == 'a' else self.network.b}:{self._http[node]}/status"
        with self.network.inside(node), urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read(1 << 20))
        return found

    def index_client(self) -> redis.Redis:
        """A connection to the index, from where node b lives."""
        password = (self.directory / "secret" / "index-password").read_text()
        client = redis.Redis(self.network.a, self._ports["index"], username="kvpool", password=password, protocol=2)
        with self.network.inside("b"):
            client.ping()
        return client

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes.values()]

    def _start(self) -> None:
        secret = self.directory / "secret"
        secret.mkdir()
        (secret / "pool-secret").write_text(secrets.token_hex(32))
        (secret / "index-password").write_text(secrets.token_hex(16))
        port = self._ports["index"]
        if self._shared is not None:
            self._shared.mkdir(mode=0o700, exist_ok=True)
        index = ["index-server", "--port", str(port), "--dir", str(self.directory / "index"), "--bind", self.network.a]
        if self._shared is None:
            self._spawn("index", "a", index, {"KVPOOL_SECRET_DIR": str(secret)})
        url = f"redis://{self.network.a}:{port}/0" if self._shared is None else ""
        for node, address in (("a", self.network.a), ("b", self.network.b)):
            home = self.directory / node
            (home / "nvme").mkdir(parents=True)
            pool = config.PoolConfig(
                pool="bench",
                namespace="bench",
                uid="5bd5fcb0-bench",
                local=(config.LocalTier("nvme", str(home / "nvme"), self._capacity, reserve_free_percent=1),),
                shared=config.SharedTier("shared", str(self._shared)) if self._shared is not None else None,
                index=config.IndexConfig(url, username="kvpool", lookup_timeout_ms=500),
                peer=config.PeerConfig(port=self._ports[node], connect_timeout_ms=1000, encryption=self._encryption),
                http_port=self._http[node],
            )
            (home / "pool.json").write_text(config.dumps(pool))
            env = {
                "KVPOOL_CONFIG": str(home / "pool.json"),
                "KVPOOL_SECRET_DIR": str(secret),
                "KVPOOL_NODE": node,
                "KVPOOL_ADDRESS": address,
            }
            self._spawn(node, node, ["serve", "--socket", f"{self.socket_of(node)}=bench"], env)
        for node, address in (("a", self.network.a), ("b", self.network.b)):
            self._wait_ready(node, address)

    def _spawn(self, name: str, node: str, arguments: list[str], env: dict[str, str]) -> None:
        command = [*self.network.prefix(node), sys.executable, "-m", "kvpool_sidecar", *arguments]
        with (self.directory / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def _wait_ready(self, node: str, address: str) -> None:
        deadline = time.monotonic() + 30
        url = f"http://{address}:{self._http[node]}/readyz"
        while True:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended: {(self.directory / f'{name}.log').read_text()[-2000:]}")
            with contextlib.suppress(OSError), self.network.inside(node), urllib.request.urlopen(url, timeout=1):
                return
            if time.monotonic() > deadline:
                log = (self.directory / f"{node}.log").read_text()
                raise RuntimeError(f"{node} is not ready at {url}: {log[-2000:]}")
            time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
