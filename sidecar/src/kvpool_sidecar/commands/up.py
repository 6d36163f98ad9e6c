"""`kvpool up`: a pool without Kubernetes. One machine, or several that `--join` the first.

Starts the index server (on the first machine) and a sidecar as children, prints the engines' command lines, and shows
the hits until Ctrl-C or SIGTERM. Children end with this process, however it ends. Blocks and the pool's secret stay for
the next start; `--delete` removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpool.config import dumps
from kvpool.errors import ConfigError, KVPoolError
from kvpool_sidecar.commands import up_text
from kvpool_sidecar.commands.install_client import install_client
from kvpool_sidecar.commands.up_files import SECRET_FILE, TENANT, Paths, Ports, pool_config, size_of, use_secret

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ChildFailedError", "UpOptions", "up"]

_START_S: Final = 60.0
_STOP_S: Final = 15.0
_REFRESH_S: Final = 2.0
_MAX_STATUS: Final = 4 << 20
_PR_SET_PDEATHSIG: Final = 1
_LOG_TAIL: Final = 2000


class ChildFailedError(KVPoolError):
    """The index server or the sidecar ended, or did not become ready."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Arguments of `kvpool up`; `join` is HOST:PORT of the first machine's index, or empty."""

    path: str
    capacity: str
    node: str
    address: str = "127.0.0.1"
    first_port: int = 7420
    join: str = ""
    secret_file: str = ""
    host_memory: str = "8Gi"
    delete: bool = False

    def index(self) -> tuple[str, int]:
        """Host and port of the index. ConfigError if `join` is not HOST:PORT."""
        if not self.join:
            return self.address, Ports(self.first_port).index
        host, separator, port = self.join.rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--join {self.join!r} is not HOST:PORT of the first machine's index")
        return host, int(port)


def up(options: UpOptions, block_tokens: int = 256) -> None:
    """Run the pool until SIGINT or SIGTERM.

    ConfigError for wrong options, ChildFailedError if a part does not start or ends; its message has the end of the
    part's log.
    """
    paths, ports = Paths(Path(options.path).absolute()), Ports(options.first_port)
    _check(options, ports)
    capacity, host_memory, index = size_of(options.capacity), size_of(options.host_memory), options.index()
    ended = _signals()
    paths.create()
    with _cleaned_up(paths, delete=options.delete):
        use_secret(paths.secret, options.secret_file)
        paths.config.write_text(dumps(pool_config(paths, ports, capacity, index)), encoding="utf-8")
        install_client(str(paths.client), os.environ.get("KVPOOL_CLIENT_EXTRAS", "/opt/kvpool-client-extras"))
        with contextlib.ExitStack() as children:
            running = [children.enter_context(_child(*part)) for part in _parts(options, paths, ports)]
            _wait_ready(running, options, ports, ended)
            print(f"The pool is ready on {options.node}: {options.capacity} in {paths.tier}.\n")
            print(up_text.engine_commands(str(paths.socket), str(paths.client), host_memory, block_tokens), "\n")
            if not options.join and not ipaddress.ip_address(options.address).is_loopback:
                print(up_text.join_command(*index, str(paths.secret / SECRET_FILE)), "\n")
            print("Ctrl-C ends it" + ("." if options.delete else "; the blocks stay for the next start."), flush=True)
            _show(running, options, ports, ended)
    print("The pool has ended." + (f" {paths.root} is deleted." if options.delete else ""))


def _check(options: UpOptions, ports: Ports) -> None:
    try:
        address = ipaddress.ip_address(options.address)
    except ValueError:
        raise ConfigError(f"--address {options.address!r} is not a numeric address") from None
    if address.is_unspecified:
        raise ConfigError("--address: give one address of this machine; nothing listens on all of them")
    if options.join and not options.secret_file:
        raise ConfigError(f"--join needs --secret-file: copy {SECRET_FILE} of the first machine, which prints its path")
    if not 1024 <= options.first_port <= 65000:
        raise ConfigError(f"--port {options.first_port} is not between 1024 and 65000")
    for port in ((ports.index,) if not options.join else ()) + (ports.peer, ports.http):
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.address, port))
            except OSError as e:
                reason = e.strerror or type(e).__name__
                raise ConfigError(f"cannot listen on {options.address}:{port}: {reason}; choose another --port") from e


def _signals() -> threading.Event:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


@contextlib.contextmanager
def _cleaned_up(paths: Paths, *, delete: bool) -> Iterator[None]:
    """Remove at the end what is of no use without the processes."""
    try:
        yield
    finally:
        for leftover in paths.home.glob(f"{paths.socket.name}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(paths.index, ignore_errors=True)
        if delete:
            for place in (paths.tier, paths.home, paths.client):
                shutil.rmtree(place, ignore_errors=True)
            with contextlib.suppress(OSError):  # the directory may hold files of others
                paths.root.rmdir()


def _parts(options: UpOptions, paths: Paths, ports: Ports) -> Iterator[tuple[str, list[str], Path]]:
    secret = ["--secret-dir", str(paths.secret)]
    if not options.join:
        where = ["--bind", options.address, "--port", str(ports.index), "--dir", str(paths.index)]
        yield "index", ["index-server", *where, *secret], paths.log("index")
    serve = ["serve", "--node", options.node, "--config", str(paths.config), "--address", options.address, *secret]
    yield "sidecar", [*serve, "--socket", f"{paths.socket}={TENANT}"], paths.log("sidecar")


class _Child:
    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-m", "kvpool_sidecar", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                preexec_fn=_end_with_parent,  # no other thread runs
                process_group=0,  # Ctrl-C reaches this program alone, which ends them in order
            )

    def failure(self, what: str) -> ChildFailedError:
        text = self._log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
        return ChildFailedError(f"the {self.name} {what}; the end of {self._log}:\n{text}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _child(name: str, arguments: Sequence[str], log: Path) -> Iterator[_Child]:
    child = _Child(name, arguments, log)
    try:
        yield child
    finally:
        child.process.terminate()
        try:
            child.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _status(address: str, port: int) -> dict[str, Any]:
    host = f"[{address}]" if ":" in address else address
    with urllib.request.urlopen(f"http://{host}:{port}/status", timeout=2) as answer:
        found = json.loads(answer.read(_MAX_STATUS))
    return found if isinstance(found, dict) else {}


def _wait_ready(children: Sequence[_Child], options: UpOptions, ports: Ports, ended: threading.Event) -> None:
    deadline = time.monotonic() + _START_S
    while not ended.is_set():
        _check_alive(children)
        with contextlib.suppress(OSError, ValueError):
            status = _status(options.address, ports.http)
            if status.get("ready") and status.get("index", {}).get("connected"):
                return
        if time.monotonic() > deadline:
            raise children[-1].failure(f"is not ready after {_START_S:.0f} s")
        ended.wait(0.2)


def _check_alive(children: Sequence[_Child]) -> None:
    for child in children:
        code = child.process.poll()
        if code is not None:
            raise child.failure(f"ended with status {code}")


def _show(children: Sequence[_Child], options: UpOptions, ports: Ports, ended: threading.Event) -> None:
    """Print the figures when they change; on a terminal, in one line."""
    shown = ""
    live = sys.stdout.isatty()
    while not ended.wait(_REFRESH_S):
        _check_alive(children)
        try:
            line = up_text.figures(_status(options.address, ports.http))
        except (OSError, ValueError):
            line = "the sidecar does not answer"
        if line != shown:
            print(f"\r\x1b[2K{line}" if live else line, end="" if live else "\n", flush=True)
            shown = line
    print(flush=True)
