"""The peers as contenders: their servers and workers as processes, in the networks of the nodes they stand for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import Contender
from bench.nodes import end_with_parent
from bench.peers import environment
from kvpool_sidecar.index.redis_server import server_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.nodes import Network

__all__ = ["NAMES", "Peers"]

FILES = ("lmcache-fs", "vllm-fs")
SERVED = ("redis", "lmcache-redis", "lmcache-resp", "mooncake-tcp")
NAMES = (*FILES, *SERVED)
WRITES = ("lmcache-fs", "vllm-fs", "redis")
_WORKER = Path(__file__).parent / "worker.py"
_REDIS, _MASTER = 16479, 16480
_SEGMENT = 3 << 30
_START_S = 120.0


class Worker:
    """One system in its own process. `ask` gives the seconds that it measured itself."""

    def __init__(self, name: str, settings: dict[str, Any], prefix: Sequence[str], log: Path) -> None:
        self.name = name
        python, path = environment.make()
        command = [*prefix, python, str(_WORKER), name, json.dumps(settings)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONWARNINGS": "ignore"}
        self._log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=env, preexec_fn=end_with_parent
            )

    def started(self) -> None:
        self._answer()

    def ask(self, do: str, **arguments: int) -> float:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended ({self.process.wait(10)}): {self._log.read_text()[-1500:]}")
        return float(json.loads(line)["s"])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Peers:
    """`names` of NAMES, until `close`. Servers run on node a; whoever reads as a peer runs on node b."""

    def __init__(self, names: Sequence[str], network: Network, directory: Path) -> None:
        self._names = names
        self._network = network
        self._directory = directory
        directory.mkdir()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._workers: dict[tuple[str, str], Worker] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def readers(self, path: str, size: int, batch: int, count: int) -> list[Contender]:
        """Contenders that read `batch` of `count` blocks at once; their blocks are stored now."""
        node = "b" if path == "peer-read" else "a"
        self._forget()
        names = [n for n in self._names if path == "local-read" or n in (FILES if path == "shared-read" else SERVED)]
        made = []
        for name in names:
            keeper = self._workers[name, "a"]
            keeper.ask("open", size=size, batch=batch)
            keeper.ask("store", size=size, count=count)
            reader = self._workers[name, node]
            if reader is not keeper:
                reader.ask("open", size=size, batch=batch)
            made.append(Contender(name, _reads(reader, batch, count), self._pids(name, reader)))
        return made

    def writers(self, size: int) -> list[Contender]:
        made = []
        for name in [n for n in self._names if n in WRITES]:
            worker = self._workers[name, "a"]
            worker.ask("open", size=size, batch=1)
            made.append(Contender(name, _writes(worker), self._pids(name, worker)))
        return made

    def _forget(self) -> None:
        """Redis keeps what earlier measurements stored in memory."""
        if "redis" in self._servers:
            with self._network.inside("a"), socket.create_connection((self._network.a, _REDIS), timeout=30) as one:
                one.sendall(b"FLUSHALL\r\n")
                if one.recv(64) != b"+OK\r\n":
                    raise RuntimeError("redis: FLUSHALL failed")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        for server in self._servers.values():
            server.terminate()
        for server in self._servers.values():
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def _pids(self, name: str, worker: Worker) -> list[int]:
        pids = [worker.process.pid]
        if name == "mooncake-tcp" and worker is not self._workers[name, "a"]:
            pids.append(self._workers[name, "a"].process.pid)
        elif "redis" in name or name == "lmcache-resp":
            pids.append(self._servers["redis"].pid)
        return pids

    def _start(self) -> None:
        _, path = environment.make()
        a = self._network.a
        if set(self._names) & {"redis", "lmcache-redis", "lmcache-resp"}:
            options = ["--port", str(_REDIS), "--bind", a, "--protected-mode", "no", "--save", "", "--appendonly", "no"]
            self._serve("redis", [server_binary(), *options], _REDIS)
        if "mooncake-tcp" in self._names:
            master = path[0] / "mooncake" / "mooncake_master"
            master.chmod(0o755)  # the installer drops the mode
            options = [f"--rpc_address={a}", f"--rpc_port={_MASTER}", "--metrics_port=16481"]
            self._serve("mooncake", [str(master), *options], _MASTER)
        for name in self._names:
            for node in ("a",) if name in FILES else ("a", "b"):
                log = self._directory / f"{name}-{node}.log"
                prefix = self._network.prefix(node)
                self._workers[name, node] = Worker(name, self._settings(name, node), prefix, log)
        for worker in self._workers.values():
            worker.started()

    def _settings(self, name: str, node: str) -> dict[str, Any]:
        if name in FILES:
            return {"directory": str(self._directory / name)}
        if name == "mooncake-tcp":
            address = self._network.a if node == "a" else self._network.b
            return {
                "host": self._network.a,
                "port": _MASTER,
                "address": address,
                "segment": _SEGMENT if node == "a" else 0,
            }
        return {"host": self._network.a, "port": _REDIS}

    def _serve(self, name: str, command: list[str], port: int) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            self._servers[name] = subprocess.Popen(
                [*self._network.prefix("a"), *command],
                stdout=log, stderr=log, cwd=self._directory, preexec_fn=end_with_parent,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), self._network.inside("a"):
                socket.create_connection((self._network.a, port), timeout=1).close()
                return
            if self._servers[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name}: {(self._directory / f'{name}.log').read_text()[-1500:]}")
            time.sleep(0.05)


def _reads(worker: Worker, batch: int, count: int) -> Callable[[int], Callable[[int], float]]:
    return lambda _: lambda n: worker.ask("read", first=n * batch % count, batch=batch)


def _writes(worker: Worker) -> Callable[[int], Callable[[int], float]]:
    numbers = iter(range(10**9))
    return lambda _: lambda _n: worker.ask("write", n=1_000_000 + next(numbers))
