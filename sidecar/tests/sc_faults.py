"""Faults by name: what breaks, and how it recovers. For tests with traffic."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from typing import TYPE_CHECKING

from sc_raw import FINGERPRINT

from kvpool.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD_S = 0.6


@contextlib.contextmanager
def sidecar_killed(cluster) -> Iterator[None]:
    b = cluster.nodes[1]
    b.kill()
    yield
    b.start()
    b.ready()


@contextlib.contextmanager
def sidecar_stopped(cluster) -> Iterator[None]:
    b = cluster.nodes[1]
    b.send(signal.SIGSTOP)
    yield
    b.send(signal.SIGCONT)


@contextlib.contextmanager
def redis_killed(cluster) -> Iterator[None]:
    cluster.index.kill()
    yield
    cluster.index.start()


@contextlib.contextmanager
def redis_stopped(cluster) -> Iterator[None]:
    cluster.index.send(signal.SIGSTOP)
    yield
    cluster.index.send(signal.SIGCONT)


@contextlib.contextmanager
def redis_flushed(cluster) -> Iterator[None]:
    cluster.flush_index()
    yield


@contextlib.contextmanager
def files_flipped(cluster) -> Iterator[None]:
    for number, file in enumerate(some_files(cluster)):
        with contextlib.suppress(FileNotFoundError):
            file.chmod(0o600)
            with file.open("r+b") as f:
                f.seek(number * 997 % file.stat().st_size)
                byte = f.read(1)
                f.seek(-1, os.SEEK_CUR)
                f.write(bytes([byte[0] ^ 0x40]))
    yield


@contextlib.contextmanager
def files_truncated(cluster) -> Iterator[None]:
    for number, file in enumerate(some_files(cluster)):
        with contextlib.suppress(FileNotFoundError):
            file.chmod(0o600)
            os.truncate(file, number * 9973 % file.stat().st_size)
    yield


@contextlib.contextmanager
def directories_removed(cluster) -> Iterator[None]:
    for tier in (*(node.nvme for node in cluster.nodes), cluster.shared):
        for directory in sorted((tier / "blocks").iterdir())[::3]:
            shutil.rmtree(directory, ignore_errors=True)
    yield


@contextlib.contextmanager
def client_hung(cluster) -> Iterator[None]:
    """Clients that ask and never read, each on a connection of its own."""
    with contextlib.ExitStack() as held:
        for node in cluster.nodes:
            for _ in range(2):
                sock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.connect(str(node.sockets["team-a"]))
                sock.send(wire.pack(wire.Op.HELLO, wire.ClientHello(FINGERPRINT, "hung", "").pack(), request=1))
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    for request in range(2, 200):
                        body = (1000).to_bytes(4, "little") + os.urandom(32)
                        sock.send(wire.pack(wire.Op.OPEN, body, count=1, request=request))
        yield


FAULTS = [
    sidecar_killed, sidecar_stopped, redis_killed, redis_stopped, redis_flushed, files_flipped, files_truncated,
    directories_removed, client_hung,
]  # fmt: skip


def some_files(cluster) -> list[Path]:
    """A third of all block files, on every tier."""
    files = [*cluster.shared.rglob("blocks/*/*/*")]
    for node in cluster.nodes:
        files += node.files()
    return sorted(files)[::3]


def hold() -> None:
    """A fault's own time: not a wait for something to happen, but how long it lasts."""
    time.sleep(HOLD_S)
