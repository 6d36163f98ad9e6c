"""An attacker who writes to the index, or who stands between two nodes: a real relay, and every byte of a request."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from sc_nodes import INDEX_PORT, MIB, PEER_PORT, fresh_address, wait_for
from sc_raw import block_id, payload
from sc_redis import plain
from sc_tls import fetched, file_of

from kvpool.errors import KVPoolError, ProtocolError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import tcp
from kvpool_testing.blocks import key, put

if TYPE_CHECKING:
    from collections.abc import Iterator

_GREETING = len(peer_wire.PEER_MAGIC) + peer_wire.PEER_NONCE_BYTES
_TLS = 0x16


class Relay:
    """Passes TLS on unchanged, and data in the clear with every payload replaced. A writer to the index can run it."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self.listener = tcp.listen(host, 0)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.target = target
        self.plain_bytes = self.tls_bytes = 0
        self.before_tls = b""  # what the requesting side sends in the clear
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(sock,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError, KVPoolError):
            far = socket.create_connection(self.target, timeout=10)
            self.sockets += [near, far]
            near.sendall(tcp.receive(far, _GREETING, time.monotonic() + 10))
            first = near.recv(1)
            if first[0] == _TLS:
                far.sendall(first)
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
                self._pass(far, near)
            else:
                self.before_tls += first
                far.sendall(first)
                threading.Thread(target=self._pass, args=(near, far, "clear"), daemon=True).start()
                self._forge(far, near)

    def _pass(self, source: socket.socket, sink: socket.socket, kind: str = "tls") -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if kind == "tls":
                    self.tls_bytes += len(data)
                else:
                    self.before_tls += data
                sink.sendall(data)

    def _forge(self, far: socket.socket, near: socket.socket) -> None:
        near.sendall(tcp.receive(far, tcp.PROOF_BYTES, time.monotonic() + 10))
        while True:
            response = tcp.receive(far, peer_wire.PEER_RESPONSE.size, time.monotonic() + 60)
            size = peer_wire.PEER_RESPONSE.unpack(response)[4]
            self.plain_bytes += len(tcp.receive(far, size, time.monotonic() + 10))
            near.sendall(response + b"FORGED! " * (size // 8 + 1))

    def close(self) -> None:
        for sock in [self.listener, *self.sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def relay() -> Iterator[object]:
    made: list[Relay] = []

    def make(host: str, target: tuple[str, int]) -> Relay:
        made.append(Relay(host, target))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("where", ["another host", "another port of the node"])
@pytest.mark.parametrize("encryption", ["ControlOnly", "Always"])
def test_a_relay_named_by_the_index_reads_and_forges_nothing(far, near, relay, where, encryption, caplog):
    there, here = far(encryption), near(encryption)
    between = relay(fresh_address() if where == "another host" else there.info.host, there.info[1:3])
    tampered = there.info._replace(host=between.address[0], port=between.address[1])
    outcomes: list[object] = []
    for _ in range(8):
        try:
            outcomes.append(fetched(here, tampered, timeout_s=5))
        except RefusedError as e:
            outcomes.append(type(e))
    assert between.plain_bytes == 0
    assert between.before_tls == b""  # not even a ticket's name
    assert between.tls_bytes > 0
    if encryption == "ControlOnly":
        assert outcomes == [RefusedError] * 8
        assert [r.levelname for r in caplog.records if "check who writes to the index" in r.message] == ["WARNING"]
    else:  # a relay of TLS from end to end sees ciphertext only
        assert outcomes == [file_of(1, 300_000)] * 8
    assert [fetched(here, there.info) for _ in range(8)] == [file_of(1, 300_000)] * 8  # without the attack


def test_an_index_that_names_another_service_makes_the_node_send_nothing(near):
    """What speaks first is no sidecar, or one without a certificate: it gets no byte, or a TLS hello."""
    for greeting, expected in ((b"", b""), (b"SSH-2.0-x" * 8, b""), (peer_wire.PEER_MAGIC + bytes(32), b"\x16")):
        listener = tcp.listen(fresh_address(), 0)
        received = bytearray()

        def serve(listener=listener, greeting=greeting, received=received):
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(greeting)
                sock.settimeout(5)
                while data := sock.recv(4096):
                    received.extend(data)
                    if len(received) >= 5:
                        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(KVPoolError):
            near().dial(NodeInfo("b", *listener.getsockname()[:2], 1), 0.5)
        thread.join(10)
        listener.close()
        assert bytes(received[:1]) == expected
        if expected:
            records = bytes(received)
            kinds = []
            while records:  # records of TLS: the hello, and an alert when the answer is none
                kinds.append(records[0])
                records = records[5 + int.from_bytes(records[3:5], "big") :]
            assert kinds[0] == _TLS
            assert set(kinds[1:]) <= {0x15}


def test_no_byte_of_a_request_can_be_changed(far, near, store):
    """An attacker on the path changes an operation, a flag, an unused byte, the number, the key or the MAC."""
    there, here = far(), near()
    size = peer_wire.PEER_REQUEST.size
    for at in range(size):
        link = here.dial(there.info, 10)
        packet = bytearray(link.pack_requests(wire.Op.OPEN, [key(1)], wire.Flag.NONE))
        packet[at] ^= 0x20 if at == 4 else 1 + at % 255
        link._socket.sendall(packet)
        with pytest.raises((ProtocolError, ConnectionResetError)):
            link.response_size(time.monotonic() + 10)
        link.close()
    wait_for(lambda: there.stats.whole("refused").get("peer-request") == size, "each is counted")
    assert fetched(here, there.info) == file_of(1, 300_000)


@pytest.mark.parametrize("op", [wire.Op.HOTTEST, wire.Op.HEADROOM, wire.Op.RECEIVE])
def test_a_read_cannot_be_turned_into_another_operation(far, near, op):
    there, here = far(), near()
    there.server.register(op, lambda _request, _flags: b"done")
    link = here.dial(there.info, 10)
    packet = bytearray(link.pack_requests(wire.Op.OPEN, [key(1)], wire.Flag.NONE))
    packet[4], packet[5] = op, wire.Flag.EVICT
    link._socket.sendall(packet)
    with pytest.raises((ProtocolError, ConnectionResetError)):
        link.response_size(time.monotonic() + 10)
    link.close()


def test_an_address_that_changes_with_its_node_is_followed(far, near, store):
    """The honest case: the node moves, and the index follows."""
    here = near()
    for n in range(2, 5):
        put(store, n)
        there = far()
        assert fetched(here, there.info, n) is not None


def test_real_sidecars_refuse_a_relay_and_count_it(cluster, relay):
    """The whole path: an attacker rewrites the index all the time, and a client opens the other node's blocks."""
    c = cluster()
    a, b = c.node("a"), c.node("b")
    blocks = {block_id(n): payload(n, MIB // 4) for n in range(8)}
    with a.connect() as raw:
        raw.put(blocks)
    a.wait_announced()
    between = relay(fresh_address(), (a.address, PEER_PORT))
    host, _, _ = c.index_url.removeprefix("redis://").partition(":")
    index = plain(host, INDEX_PORT, username="kvpool", password="index password")
    stop = threading.Event()

    def tamper() -> None:
        while not stop.is_set():
            for name in index.scan_iter(b"n:*"):
                info = NodeInfo.loads(index.get(name) or b"")
                if info is not None and info.node == "a":
                    forged = info._replace(host=between.address[0], port=between.address[1])
                    index.set(name, forged.dumps(), px=60_000)
            stop.wait(0.01)

    writer = threading.Thread(target=tamper)
    writer.start()
    try:

        def refused() -> bool:
            with b.connect() as raw:
                assert set(raw.get(list(blocks))) <= {None, *blocks.values()}  # never a forged one: `get` verifies
            return _peer_errors(b.get("/metrics").decode()) > 0

        wait_for(refused, "b meets the relay, refuses it and counts that", 30)
    finally:
        stop.set()
        writer.join(10)
    assert (between.plain_bytes, between.before_tls) == (0, b"")
    index.close()


def _peer_errors(metrics: str) -> float:
    found = re.search(r'kvpool_sidecar_peer_errors_total\{reason="refused"\} (\S+)', metrics)
    return float(found[1]) if found else 0.0
