"""Runs in an injected pod and attacks the socket of its own pod, in every way a tenant can, until the pod is deleted.

    GET /report    how often each attack ran, and what it got; `crossed`: bytes of a block that is not its own

Attacks: lookups of the largest size on all connections, writes that are never committed, descriptors that are never
closed, streams that are never read, packets of noise, connections that come and go, committed blocks with wrong
checksums or with writes after the commit, requests for blocks of the neighbor.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from sc_raw import GoneError, Raw, block_id, header, payload, write_block

from kvpool.protocol import keys, wire
from kvpool_testing.traffic import block_id_of

if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET = "/run/kvpool/kv.sock"
PORT = 8000
BLOCK = 256 * 1024
NEIGHBOR_BLOCKS = 512
_ERRORS = (OSError, GoneError, AssertionError)


class Hostile:
    """Threads of attacks. `neighbor_first`: number of the first block that the neighbor stored."""

    def __init__(self, neighbor_first: int, neighbor_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.crossed = 0
        fingerprint = keys.fingerprint({"model": "load", "block": neighbor_bytes})
        numbers = range(neighbor_first, neighbor_first + NEIGHBOR_BLOCKS)
        self._neighbor = [block_id_of(fingerprint, n) for n in numbers]
        self._held: list[Any] = []

    def start(self) -> None:
        attacks: list[Callable[[random.Random], None]] = [
            self._flood, self._flood, self._flood, self._unfinished, self._descriptors, self._unread,
            self._noise, self._churn, self._spoiled, self._late_write, self._neighbors_blocks,
        ]  # fmt: skip
        for number, attack in enumerate(attacks):
            threading.Thread(target=self._repeat, args=(attack, number), daemon=True).start()

    def _repeat(self, attack: Callable[[random.Random], None], number: int) -> None:
        rng = random.Random(number)
        name = attack.__name__.strip("_")
        while True:
            try:
                attack(rng)
                self.counts[name] += 1
            except _ERRORS as e:
                self.counts[f"{name}: {type(e).__name__}"] += 1
                time.sleep(0.05)

    def _flood(self, _rng: random.Random) -> None:
        with Raw(SOCKET) as raw:
            names = b"".join(os.urandom(32) for _ in range(wire.MAX_LOOKUP))
            for _ in range(50):
                raw.ask(wire.Op.LOOKUP, struct.pack("<I", 16) + names, count=wire.MAX_LOOKUP)

    def _unfinished(self, rng: random.Random) -> None:
        """Open as many writes as are given, fill them, and keep them for seconds."""
        with Raw(SOCKET) as raw:
            held: list[int] = []
            try:
                for _ in range(16):
                    begun = raw.begin([(block_id(rng.randbytes(8)), 8 * BLOCK) for _ in range(32)])
                    held += [fd for _, _, _, fd in begun if fd >= 0]
                    for fd in held[-32:]:
                        with contextlib.suppress(OSError):
                            os.pwrite(fd, bytes(BLOCK), 0)
                time.sleep(rng.random() * 5)
            finally:
                for fd in held:
                    os.close(fd)

    def _descriptors(self, rng: random.Random) -> None:
        """Open the same blocks over and over, and close nothing for seconds."""
        with Raw(SOCKET) as raw:
            names = {block_id(n): payload(n, BLOCK) for n in range(8)}
            raw.put(names)
            held: list[int] = []
            try:
                for _ in range(200):
                    held += [entry.fd for entry in raw.open(list(names)) if entry.fd >= 0]
                time.sleep(rng.random() * 5)
            finally:
                for fd in held:
                    os.close(fd)

    def _unread(self, rng: random.Random) -> None:
        """Dial the streams of the other node's blocks, and read nothing."""
        with Raw(SOCKET) as raw:
            for _ in range(8):
                raw.open([block_id(n) for n in range(64)], dial=rng.random() < 0.8)
            time.sleep(rng.random() * 5)

    def _noise(self, rng: random.Random) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(2)
        with sock:
            sock.connect(SOCKET)
            for _ in range(64):
                packet = rng.randbytes(rng.randrange(1, 4096))
                if rng.random() < 0.7:
                    count = rng.choice([0, 1, 64, 4096, 0xFFFF])
                    packet = wire.pack(rng.choice(list(wire.Op)), packet, count=count, request=rng.getrandbits(32))
                sock.send(packet)
                self.counts["packets"] += 1

    def _churn(self, _rng: random.Random) -> None:
        for _ in range(64):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(2)
            with sock:
                sock.connect(SOCKET)

    def _spoiled(self, rng: random.Random) -> None:
        """Blocks whose checksum, key or length is wrong."""
        with Raw(SOCKET) as raw:
            assert raw.server is not None
            name, data = block_id(rng.randbytes(8)), payload(rng.getrandbits(32), BLOCK)
            ((status, token, key, fd),) = raw.begin([(name, BLOCK)])
            if status == wire.BeginStatus.WRITE:
                wrong = rng.choice([{"payload_sum": rng.randbytes(16)}, {"block_key": rng.randbytes(len(key))}, {}])
                write_block(fd, header(name, key, data, rng.randbytes(len(raw.server.tenant_tag)), **wrong), data)
                raw.commit([token])
                self.counts["spoiled blocks"] += 1

    def _late_write(self, rng: random.Random) -> None:
        """Keep the descriptor and a mapping over the commit, and write afterwards."""
        with Raw(SOCKET) as raw:
            assert raw.server is not None
            name, data = block_id(rng.randbytes(8)), payload(rng.getrandbits(32), BLOCK)
            ((status, token, key, fd),) = raw.begin([(name, BLOCK)])
            if status != wire.BeginStatus.WRITE:
                return
            kept = os.dup(fd)
            try:
                write_block(fd, header(name, key, data, raw.server.tenant_tag), data)
                raw.commit([token])
                with contextlib.suppress(OSError):
                    os.pwrite(kept, rng.randbytes(4096), 4096)
                    self.counts["written after the commit"] += 1
                with contextlib.suppress(OSError, ValueError), mmap.mmap(kept, 8192) as memory:
                    memory[:64] = rng.randbytes(64)
                    self.counts["mapped after the commit"] += 1
            finally:
                os.close(kept)

    def _neighbors_blocks(self, rng: random.Random) -> None:
        """Ask for what another tenant stored, by its names."""
        with Raw(SOCKET) as raw:
            wanted = rng.sample(self._neighbor, 32)
            self.crossed += sum(1 for tier in raw.lookup(wanted) if tier in (1, 2, 3))
            self.crossed += sum(1 for entry in raw.open(wanted, dial=False) if entry.status != wire.OpenStatus.MISS)


def serve(hostile: Hostile, address: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"counts": dict(hostile.counts), "crossed": hostile.crossed}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address, PORT), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    os.nice(19)
    settings = json.loads(os.environ.get("LOAD_SETTINGS") or "{}")
    attacks = Hostile(int(settings["neighbor_first"]), int(settings["neighbor_bytes"]))
    attacks.start()
    serve(attacks, os.environ["POD_IP"])
