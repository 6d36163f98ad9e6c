"""Streams that the client dials: what arrives, and sidecars that do not serve them. Loads end at their deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from cl_fake_sidecar import SECRET, TENANT, FakeSidecar, block_id_of, block_key

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import block, peer_wire, wire
from kvpool.stats import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

FP = b"f" * 32
SIZE = 10_000
TOKEN = b"a token, 16 long"


class Streams:
    """Serves blocks named `peer` over a dialed stream, and others as files. `behavior` is how it takes a dial."""

    def __init__(self, fake: FakeSidecar) -> None:
        self.fake = fake
        self.behavior = "serves"
        self.blocks: list[bytes] = []  # of the answers
        self.tokens: list[bytes] = []
        self.held: list[socket.socket] = []
        self.number = 1
        fake.faults[wire.Op.OPEN] = self.open
        self.path = fake.path + peer_wire.STREAM_SUFFIX
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self, connection: socket.socket, head: wire.Head, body: bytes) -> bool:
        out, files, status = b"", [], wire.OpenStatus.STREAM_DIAL
        self.blocks = []
        for block_id in wire.split_block_ids(memoryview(body)[4:], head.items, wire.MAX_BATCH):
            key = block_key(SECRET, TENANT, block_id)
            path = self.fake.file_of(block_id)
            if block_id in self.fake.peer_blocks:
                self.blocks.append(path.read_bytes())
                out += wire.OPEN_REPLY.pack(status, wire.Tier.PEER, self.number, 0, SIZE, key)
                status = wire.OpenStatus.STREAM
            else:
                files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                out += wire.OPEN_REPLY.pack(wire.OpenStatus.FILE, wire.Tier.LOCAL, 0, 0, SIZE, key)
        tokens = TOKEN if self.blocks else b""
        self.fake.send(connection, head, out + tokens, head.items, files)
        self.number += 1
        return True

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.tokens.append(sock.recv(100))
            self.held.append(sock)
            with contextlib.suppress(OSError):
                if self.behavior == "serves":
                    for data in self.blocks:
                        sock.sendall(peer_wire.PEER_RESPONSE.pack(wire.MAGIC, 1, 0, 0, len(data)) + data)
                elif self.behavior == "closes":
                    sock.close()
                elif self.behavior == "cuts":
                    data = self.blocks[0]
                    sock.sendall(peer_wire.PEER_RESPONSE.pack(wire.MAGIC, 1, 0, 0, len(data)) + data[:5000])
                    sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        for sock in [self.listener, *self.held]:
            sock.close()


@pytest.fixture
def streams(fake: FakeSidecar) -> Iterator[Streams]:
    one = Streams(fake)
    yield one
    one.close()


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    one = Client(ClientConfig(socket=fake.path, connect_retry_ms=20), fingerprint=FP)
    assert one.wait_connected(10)
    yield one
    one.close()


def plant(fake: FakeSidecar) -> list[bytes]:
    names = [block_id_of(f"block {n}") for n in range(4)]
    for n, name in enumerate(names):
        fake.plant(name, FP, bytes([n]) * SIZE)
    fake.peer_blocks = set(names[:3])
    return names


def buffers() -> list[bytearray]:
    return [bytearray(SIZE) for _ in range(4)]


def test_blocks_come_over_a_stream_that_the_client_dials(fake: FakeSidecar, streams: Streams, client: Client) -> None:
    names, out = plant(fake), buffers()
    results = client.get_into(names, out, time.monotonic() + 10)
    assert [r.ok for r in results] == [True] * 4
    assert out == [bytes([n]) * SIZE for n in range(4)]
    assert streams.tokens == [TOKEN]
    assert all(hello.dials_streams for hello in fake.hellos)
    assert len(fake.file_of(names[0]).read_bytes()) == SIZE + block.HEADER_BYTES


@pytest.mark.parametrize("behavior", ["silent", "closes", "cuts", "refused", "no socket"])
def test_a_stream_that_does_not_come_costs_its_blocks_until_the_deadline(
    fake: FakeSidecar, streams: Streams, client: Client, behavior: str
) -> None:
    names, out = plant(fake), buffers()
    streams.behavior = behavior
    if behavior == "no socket":
        os.unlink(streams.path)
    elif behavior == "refused":
        streams.close()
    began = time.monotonic()
    results = client.get_into(names, out, began + 0.5)
    assert time.monotonic() - began < 5
    assert [r.ok for r in results[:3]] == [False] * 3
    assert {r.reason for r in results[:3]} <= {Reason.CONNECTION, Reason.DEADLINE}
    if behavior in ("refused", "no socket"):
        assert results[3].ok  # a file of the same load is read
    if behavior in ("silent", "closes"):
        streams.behavior = "serves"
        deadline = time.monotonic() + 20
        while not all(r.ok for r in client.get_into(names, out, time.monotonic() + 5)):
            assert time.monotonic() < deadline  # on a new connection, after a pause of the circuit breaker
            time.sleep(0.05)
        assert out == [bytes([n]) * SIZE for n in range(4)]


def test_streams_that_the_sidecar_has_ended_are_closed_when_others_are_dialed(
    fake: FakeSidecar, streams: Streams, client: Client
) -> None:
    names, out = plant(fake), buffers()
    for _ in range(20):
        assert all(r.ok for r in client.get_into(names, out, time.monotonic() + 10))
        streams.held.pop().close()
    kept = [len(slot.connection.streams) for slot in client._session.connections._slots.slots if slot.connection]
    assert sum(kept) <= 4  # at most the last one of each connection
