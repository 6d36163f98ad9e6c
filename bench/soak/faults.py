"""What breaks, for how long, and what mends it: a schedule that a seed decides."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from bench.soak import stops
from kvpool.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.soak.pool import Child, Pool

__all__ = ["FAULTS", "Fault", "schedule"]


class Fault(NamedTuple):
    """At `at_s` after the start, for `hold_s`."""

    at_s: float
    name: str
    target: str
    hold_s: float
    seed: int


def schedule(seed: int, seconds: float, nodes: tuple[str, ...], clients: tuple[str, ...]) -> list[Fault]:
    """The same seed gives the same list. Nothing new begins in the last tenth; one fault at a time."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    at = 5.0
    names = sorted(FAULTS)
    while True:
        at += rng.uniform(1.0, 5.0)
        hold = rng.uniform(0.3, 3.0)
        if at + hold > seconds * 0.9:
            return faults
        name = rng.choice(names)
        # the first node and the first client are never killed: what grows shows in them
        target = rng.choice(nodes[1:] if "killed" in name or "full" in name else nodes)
        if "client" in name:
            target = rng.choice(clients[1:])
        faults.append(Fault(round(at, 2), name, target, round(hold, 2), rng.randrange(1 << 30)))
        at += hold


@contextlib.contextmanager
def sidecar_killed(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    node = pool.nodes[fault.target]
    node.end(signal.SIGKILL)
    yield
    node.start()
    node.wait_ready()


@contextlib.contextmanager
def sidecar_stopped(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    pool.nodes[fault.target].send(signal.SIGSTOP)
    yield
    pool.nodes[fault.target].send(signal.SIGCONT)


@contextlib.contextmanager
def sidecar_restarted(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    node = pool.nodes[fault.target] if fault.target != "a" else pool.nodes["b"]
    code = node.end()
    if code != 0:
        raise RuntimeError(f"{node.name} ended with {code} when it was asked to end")
    yield
    node.start()
    node.wait_ready()


@contextlib.contextmanager
def redis_killed(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    pool.redis.end(signal.SIGKILL)
    yield
    pool.redis.start()


@contextlib.contextmanager
def redis_stopped(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    pool.redis.send(signal.SIGSTOP)
    yield
    pool.redis.send(signal.SIGCONT)


@contextlib.contextmanager
def redis_flushed(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    pool.flush_index()
    yield


@contextlib.contextmanager
def files_flipped(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    rng = random.Random(fault.seed)
    for file in _some(pool, rng):
        with contextlib.suppress(OSError):
            file.chmod(0o600)
            place = rng.randrange(file.stat().st_size)
            with file.open("r+b") as f:
                f.seek(place)
                byte = f.read(1)
                f.seek(place)
                f.write(bytes([byte[0] ^ (1 << rng.randrange(8))]))
    yield


@contextlib.contextmanager
def files_truncated(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    rng = random.Random(fault.seed)
    for file in _some(pool, rng):
        with contextlib.suppress(OSError):
            file.chmod(0o600)
            os.truncate(file, rng.randrange(file.stat().st_size))
    yield


@contextlib.contextmanager
def directories_removed(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    rng = random.Random(fault.seed)
    for tier in (pool.nodes[fault.target].nvme, pool.shared):
        with contextlib.suppress(OSError):
            for directory in rng.sample(sorted((tier / "blocks").iterdir()), 3):
                shutil.rmtree(directory, ignore_errors=True)
    yield


@contextlib.contextmanager
def drive_full(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    """ENOSPC: where the node's drive is a file system of its own, a foreign file takes all that is left."""
    node = pool.nodes[fault.target]
    space = os.statvfs(node.nvme)
    filler = node.home / "nvme" / "lost+found"  # the one foreign name that a tier does not mind
    if os.stat(node.nvme).st_dev == os.stat(node.home).st_dev:
        yield  # no file system of its own: nothing to fill
        return
    with contextlib.suppress(OSError), filler.open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, space.f_bavail * space.f_frsize)
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def client_killed(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    clients[fault.target].end(signal.SIGKILL)
    yield
    clients[fault.target].start()


@contextlib.contextmanager
def client_stopped(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    since = time.monotonic()
    stops.record(pool.directory, fault.target, since)
    clients[fault.target].send(signal.SIGSTOP)
    yield
    clients[fault.target].send(signal.SIGCONT)
    stops.record(pool.directory, fault.target, since, time.monotonic())


@contextlib.contextmanager
def reader_hung(pool: Pool, clients: dict[str, Child], fault: Fault) -> Iterator[None]:
    """Connections that ask for everything and read nothing, and one that talks nonsense."""
    path = next(iter(pool.nodes[fault.target].sockets.values()))
    rng = random.Random(fault.seed)
    hello = wire.pack(wire.Op.HELLO, wire.ClientHello(bytes(32), "hung", "").pack(), request=1)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            sock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with contextlib.suppress(OSError):
                sock.connect(path)
                sock.send(hello)
                sock.setblocking(False)
                for request in range(2, 300):
                    body = (1000).to_bytes(4, "little") + rng.randbytes(64)
                    sock.send(wire.pack(wire.Op.OPEN, body, count=2, request=request))
        noise = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with contextlib.suppress(OSError):
            noise.connect(path)
            noise.send(rng.randbytes(rng.randrange(1, 60_000)))
        yield


FAULTS: dict[str, Callable[[Pool, dict[str, Child], Fault], contextlib.AbstractContextManager[None]]] = {
    f.__name__: f
    for f in (
        sidecar_killed, sidecar_stopped, sidecar_restarted, redis_killed, redis_stopped, redis_flushed, files_flipped,
        files_truncated, directories_removed, drive_full, client_killed, client_stopped, reader_hung,
    )
}  # fmt: skip


def _some(pool: Pool, rng: random.Random) -> list[Path]:
    """Up to eight block files of any tier."""
    files = [*pool.shared.glob("blocks/*/*/*")]
    for node in pool.nodes.values():
        files += node.nvme.glob("blocks/*/*/*")
    return rng.sample(sorted(files), min(8, len(files)))
