"""Sidecar to sidecar: nothing without the secret, nothing twice, nothing but what was asked for."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from sc_nodes import fresh_address, wait_for

from kvpool.errors import DeadlineExceededError, KVPoolError, PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import block, peer_wire, wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import server as peer_server
from kvpool_sidecar.peers import tcp, unproven
from kvpool_sidecar.peers.connection import PeerConnection, dial
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.storage.base import Block
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import header, key, payload, put

SECRET = b"secret of the pool"


@pytest.fixture
def store():
    store = MemoryStore(1 << 30)
    yield store
    store.close()


@pytest.fixture
def absent():
    return []


@pytest.fixture
def server(store, absent):
    one = PeerServer(fresh_address(), 0, store, Stats(), PeerServerOptions(secret=SECRET), on_absent=absent.append)
    one.host = one._listener.getsockname()[0]
    one.start()
    yield one
    one.stop()


@pytest.fixture
def link(server):
    made = []

    def make(**kw) -> PeerConnection:
        made.append(dial(server.host, server.port, **{"secret": SECRET, "timeout_s": 5, **kw}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def read(link: PeerConnection) -> bytes | None:
    size = link.response_size(time.monotonic() + 5)
    return tcp.receive(link._socket, size, time.monotonic() + 5) if size else None


def file_of(n: int, size: int = 20_000) -> bytes:
    return block.encode_header(header(n, payload(n, size))) + payload(n, size)


def test_blocks_come_in_the_order_they_were_asked_for(link, store):
    for n in range(4):
        put(store, n, 100_000 + n)
    one = link()
    one.request([key(2), key(0), key(9), key(3)])
    one.request([key(1)])
    assert [read(one) for _ in range(5)] == [
        file_of(2, 100_002),
        file_of(0, 100_000),
        None,
        file_of(3, 100_003),
        file_of(1, 100_001),
    ]


def test_a_large_block_comes_whole_while_others_are_served(link, store):
    put(store, 1, 24 << 20)
    put(store, 2)
    slow, quick = link(), link()
    slow.request([key(1)])
    quick.request([key(2)])
    assert read(quick) == file_of(2)
    assert read(slow) == file_of(1, 24 << 20)


def test_a_block_that_is_not_here_is_withdrawn_from_the_index(link, absent):
    one = link()
    one.request([key(5)])
    assert read(one) is None
    assert absent == [key(5)]


def test_a_block_to_be_verified_is_read_first_and_a_bad_one_quarantined(link, store):
    put(store, 1)
    put(store, 2)
    fd = os.memfd_create("rotten")
    os.write(fd, file_of(1)[:-1] + b"?")
    os.close(store._files[key(1)])
    store._files[key(1)] = fd
    one = link()
    one.request([key(1), key(2)], verify=True)
    assert [read(one), read(one)] == [None, file_of(2)]
    assert store.quarantined == [key(1)]


def test_who_does_not_hold_the_secret_gets_nothing(server):
    with pytest.raises(KVPoolError):
        dial(server.host, server.port, secret=b"another secret", timeout_s=5)
    wait_for(lambda: server._stats.whole("refused").get("peer-proof"), "counted")


def test_a_server_that_does_not_hold_the_secret_is_not_believed(server):
    """A man in the middle that lets the asking side prove itself and then answers with a made-up proof."""
    host = fresh_address()
    listener = tcp.listen(host, 0)

    def dial_it():
        return dial(host, listener.getsockname()[1], secret=SECRET, timeout_s=5)

    def play():
        sock, _ = listener.accept()
        sock.sendall(peer_wire.PEER_MAGIC + os.urandom(32))
        tcp.receive(sock, peer_wire.PEER_CLIENT.size, time.monotonic() + 5)
        sock.sendall(os.urandom(32))
        sock.close()

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(RefusedError):
        dial_it()
    thread.join()
    listener.close()


def test_the_proof_of_one_connection_is_worth_nothing_on_another(server):
    """Replay of a recorded handshake."""
    sock = socket.create_connection((server.host, server.port), timeout=5)
    hello = tcp.receive(sock, 40, time.monotonic() + 5)
    nonce_c = os.urandom(32)
    proof = peer_wire.peer_client_proof(SECRET, hello[8:], nonce_c)
    answer = peer_wire.PEER_CLIENT.pack(peer_wire.PeerKind.DATA, tcp.NO_TICKET, nonce_c, proof)
    sock.sendall(answer)
    tcp.receive(sock, 32, time.monotonic() + 5)
    again = socket.create_connection((server.host, server.port), timeout=5)
    tcp.receive(again, 40, time.monotonic() + 5)
    again.sendall(answer)
    with pytest.raises((ProtocolError, ConnectionResetError)):
        tcp.receive(again, 32, time.monotonic() + 5)
    sock.close()
    again.close()


def request(link, n, *, sequence=None, mac=None, magic=wire.MAGIC, op=wire.Op.OPEN):
    sequence = link._sequence if sequence is None else sequence
    unsigned = peer_wire.PEER_REQUEST.pack(magic, op, 0, 0, sequence, key(n), bytes(16))
    mac = peer_wire.peer_request_mac(link._session_key, unsigned) if mac is None else mac
    return unsigned[:-16] + mac


@pytest.mark.parametrize("what", ["mac", "sequence", "magic", "op", "replay", "other session", "garbage"])
def test_a_request_that_is_not_genuine_ends_the_connection(link, store, what):
    put(store, 1)
    put(store, 2)
    one = link()
    good = request(one, 1)
    one._socket.sendall(good)
    assert read(one) == file_of(1)
    one._sequence = 1
    bad = {
        "mac": request(one, 2, mac=bytes(16)),
        "sequence": request(one, 2, sequence=2),
        "magic": request(one, 2, magic=b"XXXX"),
        "op": request(one, 2, op=wire.Op.BEGIN),
        "replay": good,
        "other session": request(link(), 2),
        "garbage": os.urandom(64),
    }[what]
    one._socket.sendall(bad)
    with pytest.raises((ProtocolError, ConnectionResetError)):
        read(one)


def test_who_holds_the_socket_but_not_the_session_key_cannot_ask(link, store):
    """What a client of the asking sidecar could try."""
    put(store, 1)
    one = link()
    held = socket.socket(fileno=os.dup(one._socket.fileno()))
    held.sendall(peer_wire.PEER_REQUEST.pack(wire.MAGIC, wire.Op.OPEN, 0, 0, 0, key(1), os.urandom(16)))
    held.settimeout(5)
    assert held.recv(1) == b""
    held.close()
    wait_for(lambda: not one.alive, "the connection is over")


def test_a_peer_that_does_not_answer_costs_the_timeout(server):
    silent = tcp.listen(fresh_address(), 0)
    started = time.monotonic()
    with pytest.raises((DeadlineExceededError, PoolUnavailableError)):
        dial(*silent.getsockname(), secret=SECRET, timeout_s=0.2)
    assert time.monotonic() - started < 1
    silent.close()
    with pytest.raises(PoolUnavailableError):
        dial(fresh_address(), 9, secret=SECRET, timeout_s=1)


def test_something_else_that_listens_there_is_noticed():
    other = tcp.listen(fresh_address(), 0)

    def greet():
        sock, _ = other.accept()
        with sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.9 something else, and long enough")

    thread = threading.Thread(target=greet)
    thread.start()
    with pytest.raises(ProtocolError):
        dial(*other.getsockname(), secret=SECRET, timeout_s=5)
    thread.join()
    other.close()


def test_unproven_connections_are_bounded_and_end_by_themselves(server, link, store, monkeypatch):
    monkeypatch.setattr(unproven, "_OTHERS_PER_ADDRESS", 4)
    monkeypatch.setattr(unproven, "_MIN_AGE_S", 60.0)
    monkeypatch.setattr(peer_server, "_FIRST_BYTES_S", 0.5)
    put(store, 1)
    held = [socket.create_connection((server.host, server.port), timeout=5) for _ in range(6)]
    wait_for(lambda: server._stats.whole("refused").get("peer-connections"), "the rest is turned away")

    def served():
        try:
            one = link()
        except KVPoolError:
            return False
        one.request([key(1)])
        return read(one) == file_of(1)

    wait_for(served, "served again when the silent ones are gone")
    for sock in held:
        sock.close()


def test_a_reader_that_does_not_read_is_given_up(server, link, store, monkeypatch):
    monkeypatch.setattr(peer_server, "_SEND_S", 0.3)
    put(store, 1, 24 << 20)
    one = link()
    one.request([key(1)] * 4)
    wait_for(lambda: server.connections == 0, "the connection was ended")
    assert not one.alive


class Shrinking(MemoryStore):
    """Says that blocks are longer than they are."""

    def open(self, key):
        found = super().open(key)
        return found and Block(found.fd, found.payload_len + 4096)


def test_a_block_that_shrinks_under_way_ends_the_connection():
    store = Shrinking(1 << 20)
    put(store, 1)
    server = PeerServer(fresh_address(), 0, store, Stats(), PeerServerOptions(secret=SECRET))
    server.start()
    one = dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)
    one.request([key(1)])
    with pytest.raises(ProtocolError):
        read(one)
    one.close()
    server.stop()
    store.close()


def test_congestion_control_is_set_or_the_nodes_own_is_used(store):
    sock = socket.socket()
    tcp.configure(sock, "reno")
    assert tcp.congestion_control(sock) == "reno"
    tcp.configure(sock, "no-such-thing")
    assert tcp.congestion_control(sock) == "reno"
    sock.close()


def test_an_address_that_is_taken_is_an_error_at_once(server, store):
    with pytest.raises(OSError, match="in use"):
        PeerServer(server.host, server.port, store, Stats(), PeerServerOptions(secret=SECRET))
