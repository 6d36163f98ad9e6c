"""A sidecar that keeps blocks in files of one directory and can be told to misbehave.

A double for faults only: what a well-behaved sidecar does is tested with the real one. Single-threaded per connection;
every hook is a plain attribute.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool.errors import ProtocolError
from kvpool.protocol import block, peer_wire, wire
from kvpool.protocol.keys import block_key as block_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = b"s" * 32
TENANT = "tests"
TAG = b"t" * 16


class FakeSidecar:
    """`faults[op]` may be a callable (connection, head, body) -> True if it has answered in its own way."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "blocks"
        self.directory.mkdir(exist_ok=True)
        self.path = str(directory / "kv.sock")
        self.faults: dict[int, Callable[..., bool]] = {}
        self.hello: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []
        self.hellos: list[wire.ClientHello] = []
        self.requests: list[int] = []
        self.delay_s = 0.0
        self.open_flags = 0  # of the answers to OPEN
        self.peer_blocks: set[bytes] = set()  # block ids that are served as streams
        self.corrupt_stream: Callable[[bytes], bytes] | None = None
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._stop = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._spawn(self._accept)

    def stop(self) -> None:
        self._stop = True
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._threads.clear()
        self._connections.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def file_of(self, block_id: bytes) -> Path:
        return self.directory / block_key(SECRET, TENANT, block_id).hex()

    def plant(self, block_id: bytes, fingerprint: bytes, payload: bytes, /, **changes: Any) -> Path:
        """Put a block there without a client; `changes` are header fields that lie."""
        fields = {
            "block_key": block_key(SECRET, TENANT, block_id),
            "block_id": block_id,
            "fingerprint": fingerprint,
            "tenant_tag": TAG,
            "payload_len": len(payload),
            "payload_sum": block.checksum(payload),
            "created_ms": 1,
        }
        path = self.file_of(block_id)
        path.write_bytes(block.encode_header(block.BlockHeader(**{**fields, **changes})) + payload)
        return path

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while not self._stop:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        state: dict[str, Any] = {"tokens": {}, "streams": {}}
        try:
            while not self._stop:
                packet = connection.recv(wire.MAX_PACKET)
                if not packet:
                    break
                head, body = wire.unpack(packet)
                self.requests.append(head.op)
                if self.delay_s:
                    time.sleep(self.delay_s)
                fault = self.faults.get(head.op)
                if fault is not None and fault(connection, head, body):
                    continue
                self._answer(connection, head, bytes(body), state)
        except (OSError, ProtocolError, struct.error):
            pass  # as the real one: what is not exactly right ends the connection
        finally:
            for descriptor, _, _ in state["tokens"].values():
                os.close(descriptor)
            for stream in state["streams"].values():
                stream.close()
            connection.close()

    def send(
        self, connection: socket.socket, head: wire.Head, body: bytes, count: int, fds: list[int] | None = None
    ) -> None:
        flags = self.open_flags if head.op == wire.Op.OPEN else 0
        packet = wire.pack(head.op | wire.REPLY, body, count=count, request=head.request, flags=flags)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        connection.sendmsg([packet], rights)
        for descriptor in fds or []:
            os.close(descriptor)

    def _answer(self, connection: socket.socket, head: wire.Head, body: bytes, state: dict[str, Any]) -> None:
        op = head.op
        if op == wire.Op.HELLO:
            self.hellos.append(wire.ClientHello.unpack(body))
            fields = {"tenant_tag": TAG, "max_block_bytes": 1 << 30, "pool": "ns/p", "node": "n", **self.hello}
            self.send(connection, head, wire.ServerHello(**fields).pack(), 0)
        elif op == wire.Op.LOOKUP:
            block_ids = wire.split_block_ids(memoryview(body)[4:], head.items, wire.MAX_LOOKUP)
            self.send(
                connection, head, bytes(self._tiers(block_ids, bool(head.flags & wire.Flag.EXHAUSTIVE))), len(block_ids)
            )
        elif op == wire.Op.OPEN:
            self._open(connection, head, body, state)
        elif op == wire.Op.BEGIN:
            self._begin(connection, head, body, state)
        elif op == wire.Op.COMMIT:
            self._commit(connection, head, body, state)
        elif op == wire.Op.REPORT:
            self.reports.append(wire.unpack_json(body))
            self.send(connection, head, b"", 0)

    def _tiers(self, block_ids: list[bytes], every: bool) -> list[int]:
        tiers: list[int] = []
        for block_id in block_ids:
            tier = wire.Tier.PEER if block_id in self.peer_blocks else wire.Tier.LOCAL
            tiers.append(tier if self.file_of(block_id).exists() else 0)
            if not tiers[-1] and not every:
                break
        return tiers + [0] * (len(block_ids) - len(tiers))

    def _open(self, connection: socket.socket, head: wire.Head, body: bytes, state: dict[str, Any]) -> None:
        block_ids = wire.split_block_ids(memoryview(body)[4:], head.items, wire.MAX_BATCH)
        out, files, streams, to_send = b"", [], [], []
        for block_id in block_ids:
            path = self.file_of(block_id)
            key = block_key(SECRET, TENANT, block_id)
            if not path.exists():
                out += wire.OPEN_REPLY.pack(wire.OpenStatus.MISS, 0, 0, 0, 0, key)
                continue
            length = path.stat().st_size - block.HEADER_BYTES
            if block_id not in self.peer_blocks:
                files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                out += wire.OPEN_REPLY.pack(wire.OpenStatus.FILE, wire.Tier.LOCAL, 0, 0, length, key)
                continue
            status = wire.OpenStatus.STREAM
            if 1 not in state["streams"]:
                ours, theirs = socket.socketpair()
                state["streams"][1] = ours
                streams.append(os.dup(theirs.fileno()))
                theirs.close()
                status = wire.OpenStatus.STREAM_NEW_CONN
            out += wire.OPEN_REPLY.pack(status, wire.Tier.PEER, 1, 0, length, key)
            to_send.append(path.read_bytes())
        self.send(connection, head, out, len(block_ids), files + streams)
        if to_send:
            self._spawn(self._send_stream, state["streams"][1], to_send)

    def _send_stream(self, stream: socket.socket, blocks: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            for data in blocks:
                answer = peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, len(data)) + data
                stream.sendall(self.corrupt_stream(answer) if self.corrupt_stream else answer)

    def _begin(self, connection: socket.socket, head: wire.Head, body: bytes, state: dict[str, Any]) -> None:
        out, files = b"", []
        for n in range(head.items):
            block_id, length = wire.BEGIN_REQUEST.unpack_from(body, n * wire.BEGIN_REQUEST.size)
            key = block_key(SECRET, TENANT, block_id)
            if self.file_of(block_id).exists():
                out += wire.BEGIN_REPLY.pack(wire.BeginStatus.HAVE, 0, key)
                continue
            token = len(state["tokens"]) + 1
            descriptor = os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, length + block.HEADER_BYTES)
            state["tokens"][token] = (descriptor, block_id, length)
            files.append(os.dup(descriptor))
            out += wire.BEGIN_REPLY.pack(wire.BeginStatus.WRITE, token, key)
        self.send(connection, head, out, head.items, files)

    def _commit(self, connection: socket.socket, head: wire.Head, body: bytes, state: dict[str, Any]) -> None:
        out = []
        for n in range(head.items):
            token = int.from_bytes(body[4 * n : 4 * n + 4], "little")
            descriptor, block_id, length = state["tokens"].pop(token)
            data = os.pread(descriptor, length + block.HEADER_BYTES, 0)
            os.close(descriptor)
            header = block.decode_header(data[: block.HEADER_BYTES])
            found = block.checksum(data[block.HEADER_BYTES :])
            if head.flags & wire.Flag.VERIFY:
                header = dataclasses.replace(header, payload_sum=found)
                data = block.encode_header(header) + data[block.HEADER_BYTES :]
            good = header.block_id == block_id and header.payload_sum == found
            if good:
                self.file_of(block_id).write_bytes(data)
            out.append(wire.CommitStatus.STORED if good else wire.CommitStatus.REJECTED)
        self.send(connection, head, bytes(out), len(out))


def block_id_of(name: str) -> bytes:
    """Some 32 bytes."""
    return hashlib.sha256(name.encode()).digest()
