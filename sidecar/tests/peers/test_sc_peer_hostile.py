"""Fault 10: garbage, too much, too slow, and lies about lengths on the port of the peers. Nothing of it costs much."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time

import psutil
import pytest
from sc_nodes import MIB, PEER_PORT, fresh_address, wait_for
from sc_raw import block_id, payload

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import server as peer_server
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.connection import dial
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import key, put

SECRET = b"secret of the pool"


@pytest.fixture
def store():
    one = MemoryStore(1 << 30)
    yield one
    one.close()


@pytest.fixture
def server(store):
    one = PeerServer(fresh_address(), 0, store, Stats(), PeerServerOptions(secret=SECRET))
    one.start()
    yield one
    one.stop()


def connect(server) -> socket.socket:
    return socket.create_connection(server._listener.getsockname(), timeout=10)


def ended(sock: socket.socket) -> bool:
    """Does the server close this connection? Reads and drops what it says before that."""
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def served(server, store) -> bool:
    """Is an honest peer still served?"""
    with contextlib.suppress(KVPoolError):
        one = dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)
        one.request([key(1)])
        size = one.response_size(time.monotonic() + 5)
        one.close()
        return size > 0
    return False


def shapes(rng: random.Random):
    """What somebody might say: nothing, noise, other protocols, our own words in the wrong place."""
    yield b""
    yield rng.randbytes(rng.randrange(1, 4096))
    yield peer_wire.PEER_MAGIC + rng.randbytes(rng.randrange(100))
    yield wire.MAGIC * rng.randrange(1, 100)
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(rng.randrange(600))
    yield b"GET /" + bytes(rng.randrange(32, 127) for _ in range(2000))
    yield b"\x80\x04\x95" + rng.randbytes(200)  # begins like a pickle
    yield bytes(peer_wire.PEER_CLIENT.size)
    yield b"\xff" * 100_000


def test_noise_costs_a_sidecar_neither_memory_nor_threads_nor_descriptors(cluster):
    node = cluster(index=False).node("a")
    with node.connect() as raw:
        raw.put({block_id(1): payload(1)})
    process = psutil.Process(node.process.pid)
    rng = random.Random(20)

    def noise(rounds: int) -> None:
        for _ in range(rounds):
            for data in shapes(rng):
                with socket.create_connection((node.address, PEER_PORT), timeout=10) as sock:
                    with contextlib.suppress(OSError):
                        sock.sendall(data)
                    if rng.random() < 0.5:
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_WR)
                            sock.settimeout(0.02)
                            sock.recv(100)

    noise(5)
    rss, threads, descriptors = process.memory_info().rss, process.num_threads(), process.num_fds()
    noise(40)
    wait_for(lambda: process.num_threads() <= threads, "the threads have ended")
    wait_for(lambda: process.num_fds() <= descriptors, "the connections are closed")
    assert process.memory_info().rss - rss < 16 * MIB
    with node.connect() as raw:
        assert raw.get([block_id(1)]) == [payload(1)]
    assert b"Traceback" not in node.log.read_bytes()


def test_who_sends_without_end_before_the_proof_is_cut_off(server, store):
    put(store, 1)
    sock = connect(server)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 256 * MIB:
            sent += sock.send(bytes(MIB))
    assert sent < 64 * MIB  # what the kernel's buffers hold; no one here read it
    sock.close()
    wait_for(lambda: server.connections == 0, "the connection is over")
    assert served(server, store)


def test_a_byte_now_and_then_does_not_keep_an_unproven_connection(server, store, monkeypatch):
    """Slow loris: the time for the proof is for all of it, not for each byte."""
    monkeypatch.setattr(peer_server, "_HANDSHAKE_S", 0.4)
    put(store, 1)
    stop = threading.Event()
    socks = [connect(server) for _ in range(10)]

    def drip() -> None:
        while not stop.wait(0.03):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert all(ended(sock) for sock in socks)
    finally:
        stop.set()
        thread.join()
    for sock in socks:
        sock.close()
    assert served(server, store)


def test_half_a_request_does_not_keep_a_connection(server, store, monkeypatch):
    monkeypatch.setattr(peer_server, "_IDLE_S", 0.3)
    one = dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)
    one._socket.sendall(wire.MAGIC + bytes(20))
    assert ended(one._socket)
    one.close()
    wait_for(lambda: server.connections == 0, "the connection is over")


def test_connections_are_bounded_also_when_all_have_proven_the_secret(server, store, monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 3)
    put(store, 1)
    links = [dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5) for _ in range(3)]
    with pytest.raises(KVPoolError):
        dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)
    assert server._stats.whole("refused") == {"peer-connections": 1}
    links.pop().close()
    wait_for(lambda: server.connections == 2, "one has gone")
    assert served(server, store)
    for link in links:
        link.close()


def test_who_has_proven_the_secret_and_then_talks_nonsense_is_cut_off(server, store):
    put(store, 1)
    for _ in range(30):
        one = dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)
        one._socket.sendall(os.urandom(peer_wire.PEER_REQUEST.size))
        assert ended(one._socket)
        one.close()
    assert server._stats.whole("refused") == {"peer-request": 30}
    assert served(server, store)


class LyingPeer:
    """Holds the secret and answers whatever `answers` says."""

    def __init__(self, host: str, port: int, answers: list[bytes]) -> None:
        self.listener = tcp.listen(host, port)
        self.answers = answers
        self.held: list[socket.socket] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        for answer in self.answers:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.held.append(sock)
            with contextlib.suppress(OSError, KVPoolError):
                tcp.prove_as_server(sock, SECRET, tcp.receive_peer_request(sock, time.monotonic() + 5, 5))
                tcp.receive(sock, peer_wire.PEER_REQUEST.size, time.monotonic() + 5)
                sock.sendall(answer)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)
        for sock in self.held:
            sock.close()


def test_a_peer_that_lies_about_lengths_is_not_believed():
    """Nothing is allocated for what a peer merely says."""
    response = peer_wire.PEER_RESPONSE.pack
    lies = [
        response(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, (1 << 64) - 1),
        response(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, 1 << 40),
        response(b"HTTP", peer_wire.PeerStatus.OK, 0, 0, 100),
        response(wire.MAGIC, 77, 0, 0, 100),
    ]
    peer = LyingPeer(fresh_address(), 0, lies)
    address = peer.listener.getsockname()
    before = psutil.Process().memory_info().rss
    outcomes = []
    for _ in lies:
        one = dial(*address, secret=SECRET, timeout_s=5)
        one.request([key(1)])
        try:
            outcomes.append(one.response_body(4096, time.monotonic() + 5))
        except ProtocolError:
            outcomes.append("refused")
        one.close()
    assert outcomes == ["refused", "refused", None, None]
    assert psutil.Process().memory_info().rss - before < 16 * MIB
    peer.close()
