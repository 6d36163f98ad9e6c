"""Streams of peers' blocks: what reaches a client, and what clients and peers that misbehave can hold up."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest
from sc_nodes import MIB, wait_for
from sc_raw import block_id, exactly, payload, verified

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import splice
from kvpool_sidecar.peers.connection import PeerConnection
from kvpool_sidecar.serving import client_stream, stream_exchange
from kvpool_sidecar.serving.pod import Pod
from kvpool_sidecar.serving.stream_exchange import StreamExchange, TooManyStreamsError
from kvpool_sidecar.tenancy.identity import Identity, Tenant

if TYPE_CHECKING:
    from kvpool_sidecar.serving.client_stream import ClientStream

KEY = bytes(32)
LENGTH = 3 * MIB


def answer(body: bytes, *, status: int = peer_wire.PeerStatus.OK, size: int | None = None) -> bytes:
    announced = len(body) if size is None else size
    return peer_wire.PEER_RESPONSE.pack(wire.MAGIC, status, 0, 0, announced) + body


def block_file(n: int, length: int = LENGTH) -> bytes:
    return bytes([n]) * (HEADER_BYTES + length)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


class Exchange:
    """An exchange with one dialed stream at a time: `far` is the peer's end, `client` the client's."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.exchange = StreamExchange(self.stats)
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.pod = pod()

    def open(self, of: Pod | None = None) -> tuple[bytes, ClientStream, socket.socket]:
        near, far = tcp_pair()
        self.sockets += [near, far]
        token, stream = self.exchange.open(of or self.pod, lambda: PeerConnection(near, bytes(32)))
        return token, stream, far

    def dial(self, token: bytes, of: Pod | None = None) -> socket.socket:
        client, accepted = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(10)
        self.sockets.append(client)
        thread = threading.Thread(target=self.exchange.serve, args=(accepted, of or self.pod))
        self.threads.append(thread)
        thread.start()
        with contextlib.suppress(OSError):
            client.sendall(token)
        return client

    def connected(self) -> tuple[ClientStream, socket.socket, socket.socket]:
        token, stream, far = self.open()
        client = self.dial(token)
        wait_for(lambda: stream.is_dialed, "dialed")
        return stream, far, client

    def close(self) -> None:
        self.exchange.stop()
        for sock in self.sockets:
            sock.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        assert self.exchange.streams == 0


def pod(name: str = "p", tenant: str = "team") -> Pod:
    return Pod(Identity(name, tenant, "p", "s"), Tenant(b"secret", tenant), 1 << 30)


@pytest.fixture
def exchange(monkeypatch):
    monkeypatch.setattr(client_stream, "_TIMEOUT_S", 0.5)
    before = len(os.listdir("/proc/self/fd"))
    one = Exchange()
    yield one
    one.close()
    # threads of earlier tests may hold a descriptor for a moment
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")


# -- what arrives


@pytest.mark.parametrize("pipes", ["splice", "copy"])
def test_exactly_the_requested_blocks_arrive_in_order(exchange, pipes):
    if pipes == "copy":
        exchange.exchange._pipes.disable()
    stream, far, client = exchange.connected()
    for turn in range(3):
        stream.request([(KEY, LENGTH), (KEY, 100), (KEY, LENGTH)])
        requests = exactly(far, 3 * peer_wire.PEER_REQUEST.size)
        assert len(requests) == 192
        sent = [block_file(turn), block_file(turn + 1, 100), block_file(turn + 2)]
        writer = threading.Thread(target=far.sendall, args=(b"".join(map(answer, sent)),))
        writer.start()
        for data in sent:
            assert exactly(client, 16) == answer(data)[:16]
            assert exactly(client, len(data)) == data
        writer.join(10)
    assert stream.alive
    # bytes that were not requested are not forwarded
    far.sendall(answer(block_file(9)))
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_a_kernel_without_splice_between_these_sockets_gets_copies(exchange, monkeypatch):
    real = os.splice

    def unsupported(source, target, count, **kw):
        if stat.S_ISFIFO(os.fstat(source).st_mode):
            raise OSError(22, "Invalid argument")
        return real(source, target, count, **kw)

    monkeypatch.setattr(splice.os, "splice", unsupported)
    stream, far, client = exchange.connected()
    stream.request([(KEY, LENGTH)])
    writer = threading.Thread(target=far.sendall, args=(answer(block_file(7)),))
    writer.start()
    assert exactly(client, 16 + HEADER_BYTES + LENGTH)[16:] == block_file(7)
    writer.join(10)
    assert exchange.exchange._pipes.take() is None


@pytest.mark.parametrize("status", [peer_wire.PeerStatus.MISS, peer_wire.PeerStatus.BUSY])
def test_an_answer_without_a_block_is_followed_by_the_next(exchange, status):
    stream, far, client = exchange.connected()
    stream.request([(KEY, LENGTH), (KEY, 10)])
    far.sendall(answer(b"", status=status) + answer(block_file(3, 10)))
    assert exactly(client, 16) == answer(b"", status=status)
    assert exactly(client, 16 + HEADER_BYTES + 10)[16:] == block_file(3, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        answer(block_file(1, LENGTH + 1)),
        answer(block_file(1, LENGTH - 1)),
        answer(b"", size=1 << 62),
        answer(b""),
        answer(b"", status=9, size=HEADER_BYTES + LENGTH),
        b"XXXX" + answer(block_file(1))[4:],
    ],
    ids=["longer", "shorter", "huge", "empty", "unknown status", "no response"],
)
def test_an_answer_of_another_length_ends_the_stream_without_a_byte_of_it(exchange, wrong):
    stream, far, client = exchange.connected()
    stream.request([(KEY, LENGTH)])
    with contextlib.suppress(OSError):
        far.sendall(wrong)
    received = b""
    while data := client.recv(65536):
        received += data
    assert received in (b"", wrong[:16])  # at most the announcement, which the client refuses
    wait_for(lambda: not stream.alive, "ended")
    with pytest.raises(PoolUnavailableError):
        stream.request([(KEY, LENGTH)])


# -- who misbehaves


@pytest.mark.parametrize("how", ["never reads", "closes early", "reads 64 bytes", "shuts down", "peer stalls"])
def test_a_stalled_client_or_peer_ends_its_stream_and_leaves_nothing(exchange, how, monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.peers.connection._SLOWEST", 1e9)
    pipes = len(exchange.exchange._pipes._idle)
    stream, far, client = exchange.connected()
    stream.request([(KEY, 64 * MIB)] * 4)
    data = answer(block_file(1, 64 * MIB))[: MIB if how == "peer stalls" else None]

    def send() -> None:
        with contextlib.suppress(OSError):
            far.sendall(data)

    writer = threading.Thread(target=send)
    writer.start()
    started = time.monotonic()
    if how == "closes early":
        exactly(client, 100)
        client.close()
    elif how == "shuts down":
        exactly(client, 100)
        client.shutdown(socket.SHUT_RD)
    elif how == "reads 64 bytes":
        with contextlib.suppress(OSError):
            while exchange.threads[0].is_alive() and client.recv(64):
                time.sleep(0.001)
    wait_for(lambda: not exchange.threads[0].is_alive(), "the stream has ended")
    assert time.monotonic() - started < 10  # patience is 0.5 s here; the rest is a busy machine
    assert exchange.exchange.streams == 0
    assert len(exchange.exchange._pipes._idle) <= pipes + 1
    far.close()
    writer.join(10)
    if how == "peer stalls":  # and nothing is read as the rest of this block
        got = 0
        while chunk := client.recv(MIB):
            got += len(chunk)
        assert got <= MIB


def test_streams_that_no_client_dials_are_closed(exchange, monkeypatch):
    monkeypatch.setattr(stream_exchange, "_DIAL_S", 0.0)
    offered = [exchange.open() for _ in range(8)]
    exchange.exchange.expire()
    assert exchange.exchange.streams == 0
    assert all(far.recv(1) == b"" for _, _, far in offered)
    assert not any(stream.alive for _, stream, _ in offered)
    late = exchange.dial(offered[0][0])
    assert late.recv(1) == b""
    assert exchange.stats.whole("refused") == {"stream-not-dialed": 8, "stream-token": 1}


@pytest.mark.parametrize("what", ["other token", "other pod", "twice", "short", "silent"])
def test_a_token_opens_its_stream_once_and_for_its_pod_only(exchange, monkeypatch, what):
    monkeypatch.setattr(stream_exchange, "_TOKEN_S", 0.2)
    token, stream, _far = exchange.open()
    if what == "twice":
        exchange.dial(token)
        wait_for(lambda: stream.is_dialed, "dialed")
    sent = {"other token": os.urandom(16), "short": token[:15], "silent": b""}.get(what, token)
    refused = exchange.dial(sent, pod("other", "team") if what == "other pod" else None)
    if what == "short":
        refused.shutdown(socket.SHUT_WR)
    assert refused.recv(1) == b""
    assert exchange.stats.whole("refused") == {"stream-token": 1}
    assert stream.is_dialed == (what == "twice")


def test_idle_streams_are_closed_once_an_end_is_gone(exchange):
    streams = [exchange.connected() for _ in range(32)]
    exchange.exchange.expire()
    assert exchange.exchange.streams == 32
    for n, (_, far, client) in enumerate(streams):
        (far if n % 2 else client).close()
    wait_for(lambda: exchange.exchange.expire() or exchange.exchange.streams == 0, "all are closed")
    wait_for(lambda: not any(thread.is_alive() for thread in exchange.threads), "all threads have ended")


def test_a_tenant_leaves_places_for_the_others(exchange, monkeypatch):
    monkeypatch.setattr(stream_exchange, "MAX_STREAMS", 8)
    for _ in range(6):
        exchange.open()
    with pytest.raises(TooManyStreamsError):
        exchange.open()
    other = pod("q", "other team")
    exchange.open(other)
    _, last, _ = exchange.open(other)
    with pytest.raises(TooManyStreamsError):
        exchange.open(other)
    last.close()
    exchange.open(other)


def test_requests_name_the_lane_of_their_tenant(exchange):
    lanes = set()
    for of in (exchange.pod, pod("q", "other team")):
        _, stream, far = exchange.open(of)
        stream.request([(KEY, LENGTH)])
        request = peer_wire.PEER_REQUEST.unpack(exactly(far, peer_wire.PEER_REQUEST.size))
        assert request[3] == int.from_bytes(of.tenant.tag[:2], "little")
        lanes.add(request[3])
    assert len(lanes) == 2


def test_a_place_of_a_peer_that_cannot_be_reached_is_free_again(exchange):
    def fail() -> PeerConnection:
        raise ProtocolError("no sidecar")

    for _ in range(stream_exchange.MAX_STREAMS + 1):
        with pytest.raises(ProtocolError):
            exchange.exchange.open(exchange.pod, fail)
    assert exchange.exchange.streams == 0


# -- real sidecars


@pytest.fixture
def nodes(cluster):
    def make(count: int = 6, size: int = 3 * MIB, **kw):
        c = cluster()
        a, b = c.node("a", **kw), c.node("b", **kw)
        blocks = {block_id(n): payload(n, size) for n in range(count)}
        with a.connect() as raw:
            raw.put(blocks)
        a.wait_announced()
        return a, b, blocks

    return make


@pytest.mark.parametrize("encryption", ["ControlOnly", "Always"])
def test_no_descriptor_that_a_client_gets_is_a_socket(nodes, encryption, monkeypatch):
    """A socket of the sidecar's network would be the pod's way out of its own (CVE class: connect to AF_UNSPEC)."""
    from kvpool.config import PeerConfig

    received: list[int] = []
    real = socket.recv_fds

    def record(*args):
        answer = real(*args)
        received.extend(answer[1])
        assert not [fd for fd in answer[1] if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        return answer

    monkeypatch.setattr(socket, "recv_fds", record)
    a, b, blocks = nodes(peer=PeerConfig(port=7421, connect_timeout_ms=1000, encryption=encryption))
    with a.connect() as raw:
        assert None not in raw.get(list(blocks))
    assert len(received) >= len(blocks)  # files
    received.clear()
    with b.connect() as raw:
        entries = raw.open(list(blocks), ms=20_000)
        assert {entry.tier for entry in entries} == {wire.Tier.PEER}
        for (name, data), entry in zip(blocks.items(), entries, strict=True):
            assert verified(raw.read(entry), name, entry.key) == data
    assert received == []


def test_a_client_of_an_older_release_misses_peers_blocks_and_reads_its_own(nodes):
    _, b, blocks = nodes()
    own = {block_id(100): payload(100)}
    with b.connect(dials=False) as raw:
        raw.put(own)
        entries = raw.open([*blocks, *own])
        assert [entry.status for entry in entries] == [wire.OpenStatus.MISS] * len(blocks) + [wire.OpenStatus.FILE]
        assert raw.read(entries[-1])
        assert not raw.streams
    with b.connect() as raw:
        assert None not in raw.get(list(blocks))
    assert b.status()["refused"] == {}


def test_silent_connections_to_a_stream_socket_are_bounded_and_harm_their_pod_only(nodes):
    _, b, blocks = nodes(tenants=("team-a", "team-b"))
    path = f"{b.sockets['team-b']}{peer_wire.STREAM_SUFFIX}"
    silent: list[socket.socket] = []
    try:
        for _ in range(400):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            silent.append(one)
            one.connect(path)
            one.settimeout(10)
        with b.connect("team-a") as raw:
            assert None not in raw.get(list(blocks))
        wait_for(lambda: b.status()["refused"].get("client-connections"), "the rest is refused")
        assert all(one.recv(1) == b"" for one in silent)  # each is closed, also those that were admitted
    finally:
        for one in silent:
            one.close()
