"""Clients that send commands and never read the replies: the index stays small and answers the others."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest
from sc_nodes import INDEX_PORT, Process, fresh_address, wait_for
from sc_redis import plain

from kvpool_sidecar.index import redis_server as embedded

MEMORY = 64 << 20
CONNECTIONS_MEMORY = MEMORY // 4 + (96 << 20)
"""What the pod's limit (5/4 of the memory and 160 MiB) leaves for connections: 64 MiB are the supervisor's."""
ATTACK_S = 6.0


class Index(Process):
    def __init__(self, directory: Path) -> None:
        self.address = fresh_address()
        secret = directory / "secret"
        secret.mkdir()
        (secret / "index-password").write_text("pw")
        super().__init__(
            directory / "log",
            [
                "index-server", f"--bind={self.address}", f"--port={INDEX_PORT}", f"--dir={directory / 'data'}",
                f"--secret-dir={secret}", f"--max-memory={MEMORY}",
            ],
        )  # fmt: skip

    def client(self):
        return plain(self.address, INDEX_PORT, username="kvpool", password="pw")

    def answers(self) -> bool:
        with contextlib.closing(self.client()) as client, contextlib.suppress(OSError, Exception):
            return bool(client.ping())
        return False

    def peak(self) -> int:
        """The most memory that the server ever had, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.fixture
def index(tmp_path):
    made = Index(tmp_path)
    try:
        made.start()
        wait_for(made.answers, "it serves")
        yield made
    finally:
        made.kill()


def connect(index: Index, first: bytes) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(5)
    sock.connect((index.address, INDEX_PORT))
    sock.sendall(first)
    return sock


def send_and_never_read(index: Index, first: bytes, commands: bytes) -> int:
    """Send until the server ends the connection, and connect again; return how many connections it took."""
    connections, end = 0, time.monotonic() + ATTACK_S
    held: list[socket.socket] = []
    while time.monotonic() < end and connections < 2000 and index.running and index.peak() < 4 * MEMORY:
        try:
            sock = connect(index, first)
        except OSError:
            continue
        connections += 1
        held.append(sock)
        sock.settimeout(0.5)
        with contextlib.suppress(OSError):
            while time.monotonic() < end and index.peak() < 4 * MEMORY:
                sock.sendall(commands)
    for sock in held:
        sock.close()
    return connections


def test_one_without_a_password_costs_no_memory(index):
    before = index.peak()
    send_and_never_read(index, b"", b"INFO\r\n" * 4096)
    assert index.answers()
    assert index.peak() - before < CONNECTIONS_MEMORY


def test_one_with_the_password_is_disconnected_before_it_costs_memory(index):
    with contextlib.closing(index.client()) as client:
        for n in range(8):
            client.set(b"b%015d" % n, b"x" * 60_000)
    before = index.peak()
    keys = b" ".join(b"b%015d" % n for n in range(8))
    connections = send_and_never_read(index, b"AUTH kvpool pw\r\n", (b"MGET " + keys + b"\r\n") * 64)
    assert index.answers()
    assert connections > 1, "the server ended the connection"
    assert index.peak() - before < CONNECTIONS_MEMORY


def test_one_with_the_password_cannot_send_a_value_without_bounds(index):
    before = index.peak()
    with connect(index, b"AUTH kvpool pw\r\n*3\r\n$3\r\nSET\r\n$2\r\nb1\r\n$536870912\r\n") as sock:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 4 * MEMORY:
                sent += sock.send(b"x" * 65536)
    assert sent < MEMORY
    assert index.answers()
    assert index.peak() - before < CONNECTIONS_MEMORY


def test_the_log_names_the_server_that_runs(index):
    version = embedded.server_version(embedded.server_binary())
    assert version.product == "Valkey"
    assert f"the index server is {version}" in index.log.read_text()


@pytest.mark.parametrize(
    ("product", "version", "bounds_all"),
    [("Redis", (6, 2, 14), False), ("Redis", (7, 0), True), ("Valkey", (8,), True)],
)
def test_a_server_gets_only_limits_that_it_knows(product, version, bounds_all):
    limits = embedded.client_limits(embedded.ServerVersion(product, version), MEMORY)
    assert ("maxmemory-clients" in limits) == bounds_all
    assert limits.keys() >= {"client-output-buffer-limit", "maxclients", "timeout", "proto-max-bulk-len"}


@pytest.mark.parametrize("max_memory", [64 << 20, 256 << 20, 1 << 30, 4 << 30, 16 << 30])
def test_all_connections_together_fit_into_the_pods_limit(max_memory):
    limits = embedded.client_limits(embedded.ServerVersion("Valkey", (9, 1)), max_memory)
    assert int(limits["maxmemory-clients"][0]) <= max_memory // 4 + (96 << 20)
    assert int(limits["maxclients"][0]) >= 2000
