"""Hostile bytes on the client's socket, the health port and the handoff: memory, threads and descriptors stay bounded.

The sidecar runs with pickle patched to end the process: nothing that comes from outside reaches it. The peer
port has tests of its own (test_sc_peer_hostile.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time

import pytest
from sc_nodes import HTTP_PORT, MIB, Cluster, wait_for
from sc_raw import FINGERPRINT, GoneError, block_id, payload

from kvpool.protocol import wire
from kvpool_testing.residue import residue, unsettled

NO_PICKLE = """
import os
def _abort(*_, **__): os._exit(99)
pickle = __import__("pickle")
pickle.load = pickle.loads = pickle.Unpickler = _abort
"""
ROUNDS = int(os.environ.get("KVPOOL_PACKETS", "240"))  # 200,000 in `make faults`, half of them before HELLO
MORE_RSS = 48 * MIB
MORE = 48  # descriptors and threads: 32 connections of a pod, sixteen of HTTP


PICKLED = b"cbuiltins\nprint\n(S'it ran'\ntR."  # what would run if somebody unpickled it


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "patch").mkdir()
    (directory / "patch" / "sitecustomize.py").write_text(NO_PICKLE)
    handoff = directory / "handoff.sock"
    with Cluster(directory, index=False) as c:
        yield c.node("a", arguments=(f"--rendezvous-socket={handoff}",), env={"PYTHONPATH": str(directory / "patch")})


@pytest.fixture
def unharmed(node):
    """Before and after: it serves, and holds no more than before."""
    before = residue(node.process.pid)
    n = random.randrange(1 << 60)
    with node.connect() as raw:
        raw.put({block_id(n): payload(n)})
    yield node
    assert node.running
    with node.connect() as raw:
        assert raw.get([block_id(n)]) == [payload(n)]

    def settled() -> bool:
        now = residue(node.process.pid)
        bounded = now.descriptors <= before.descriptors + MORE and now.threads <= before.threads + MORE
        return bounded and now.rss_bytes <= before.rss_bytes + MORE_RSS and now.children == 0

    wait_for(lambda: unsettled(node.status()) == [], "nobody is connected any more")
    wait_for(settled, "it holds no more than before")


def hello() -> bytes:
    return wire.pack(wire.Op.HELLO, wire.ClientHello(FINGERPRINT, "hostile", "").pack(), request=1)


def hostile_packets(rng: random.Random):
    """Noise, headers that lie about counts, JSON that nests, pickles: alone and behind a header that fits."""
    ops = [op for op in wire.Op if op != wire.Op.ERROR]
    bodies = [
        b"", PICKLED, rng.randbytes(rng.randrange(1, 5000)), b'{"a":' * 2000, b"[" * 8000,
        b'{"corrupt":["' + b"f" * 5000 + b'"]}', struct.pack("<I", 0xFFFFFFFF) + bytes(32),
        wire.BEGIN_REQUEST.pack(bytes(32), (1 << 32) - 1), b"\xff" * 4096,
    ]  # fmt: skip
    for _ in range(ROUNDS):
        body = rng.choice(bodies)
        if rng.random() < 0.3:
            yield rng.choice([body, rng.randbytes(rng.randrange(1, 64)), body[: rng.randrange(len(body) + 1)] or b"x"])
        else:
            count = rng.choice([0, 1, 2, 64, 65, 4096, 0xFFFF])
            with contextlib.suppress(Exception):
                yield wire.pack(
                    rng.choice(ops), body, count=count, request=rng.getrandbits(32), flags=rng.getrandbits(8)
                )


@pytest.mark.timeout(120 + ROUNDS // 50)
@pytest.mark.parametrize("greeted", [False, True], ids=["before hello", "after hello"])
def test_hostile_packets_on_a_pods_socket(unharmed, greeted):
    rng = random.Random(10)
    sock = None
    peak = 0
    for number, packet in enumerate(hostile_packets(rng)):
        if sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(5)
            sock.connect(str(unharmed.sockets["team-a"]))
            if greeted:
                sock.send(hello())
                sock.recv(1 << 16)
        try:
            sock.send(packet)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1 << 16):
                    raise GoneError
            sock.setblocking(True)
        except (OSError, GoneError):
            sock.close()
            sock = None
        if number % 50 == 0:
            peak = max(peak, residue(unharmed.process.pid).threads)
    if sock is not None:
        sock.close()
    assert peak < 100


def test_the_largest_packet_there_is_and_one_larger(unharmed):
    for size in (wire.MAX_PACKET, wire.MAX_PACKET + 1, 150_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5)
            sock.connect(str(unharmed.sockets["team-a"]))
            sock.send(hello())
            sock.recv(1 << 16)
            with contextlib.suppress(OSError):  # the kernel may refuse what is too large
                sock.send(bytes(size))
                while sock.recv(1 << 16):
                    pass


REQUESTS = [
    b"\0" * 5000, b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET /status HTTP/9.9\r\n\r\n",
    b"POST /status HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n" + PICKLED,
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000, PICKLED, b"\r\n" * 9000,
]  # fmt: skip


def test_hostile_requests_on_the_health_port(unharmed):
    rng = random.Random(11)
    for number in range(ROUNDS // 4):
        data = REQUESTS[number % len(REQUESTS)] if number % 3 else rng.randbytes(rng.randrange(1, 9000))
        with socket.create_connection((unharmed.address, HTTP_PORT), timeout=10) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(1 << 16)
            assert b"root:" not in answer
            assert b"Traceback" not in answer
    assert unharmed.get("/healthz") == b"ok\n"


def test_many_who_send_a_byte_now_and_then_do_not_keep_a_probe_out(unharmed):
    with contextlib.ExitStack() as held:
        slow = []
        for _ in range(40):
            sock = held.enter_context(socket.create_connection((unharmed.address, HTTP_PORT), timeout=10))
            sock.sendall(b"GET /he")
            slow.append(sock)
        for _ in range(5):
            assert unharmed.get("/healthz") == b"ok\n"  # every place was taken
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(b"a")


def test_a_request_that_comes_a_byte_at_a_time_is_ended(unharmed):
    with socket.create_connection((unharmed.address, HTTP_PORT), timeout=10) as sock:
        sock.settimeout(0.2)
        began = time.monotonic()

        def ended() -> bool:
            try:
                sock.sendall(b"a")
                return sock.recv(10) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_for(ended, "the connection is ended", 30)
        assert time.monotonic() - began > 1


def test_hostile_messages_of_who_says_to_be_the_rendezvous(unharmed):
    rng = random.Random(12)
    messages = [
        PICKLED, b"[" * 4096, b'{"op":' * 600, b"\0", b'{"op":"add"}', b'{"op":"add","uid":"../../x","namespace":"a"}',
        b'{"op":"remove","uid":7}', b'{"op":"remove","uid":"' + b"x" * 4000, b'{"op":"synced","extra":[' + b"1," * 2000,
    ]  # fmt: skip
    (handoff,) = [a.partition("=")[2] for a in unharmed.arguments if a.startswith("--rendezvous-socket=")]
    for number in range(ROUNDS):
        message = messages[number % len(messages)] if number % 3 else rng.randbytes(rng.randrange(1, 6000))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
            sock.settimeout(5)
            sock.connect(handoff)
            fds = [sock.fileno()] * (number % 8)
            socket.send_fds(sock, [message], fds)
    assert unharmed.status()["pods"] == 2  # the fixed ones: nothing was added, nothing removed
