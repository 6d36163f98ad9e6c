"""The protocol by hand: what tests of the sidecar say to it, without the client library."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

from kvpool.protocol import block, keys, peer_wire, wire

SECRET = b"a secret of this test, long enough"
FINGERPRINT = keys.fingerprint({"model": "test"})


def block_id(n: int | bytes) -> bytes:
    return keys.block_id(FINGERPRINT, n if isinstance(n, bytes) else n.to_bytes(8, "little"))


def payload(n: int, size: int = 64 * 1024) -> bytes:
    return (n.to_bytes(8, "little") * (size // 8 + 1))[:size]


class Entry(NamedTuple):
    status: int
    tier: int
    stream: int
    length: int
    key: bytes
    fd: int


class GoneError(Exception):
    """The sidecar closed the connection."""


class Raw:
    """One connection. Raises GoneError when the sidecar ends it, AssertionError when an answer makes no sense."""

    def __init__(
        self, path, *, hello: bool = True, timeout: float = 10.0, granted: bool = False, dials: bool = True
    ) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(timeout)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self.request = 0
        self.streams: dict[int, socket.socket] = {}
        self.tokens: dict[int, bytes] = {}
        self.server: wire.ServerHello | None = None
        if hello:
            try:
                said = wire.ClientHello(FINGERPRINT, "test", "model", reads_granted=granted, dials_streams=dials)
                answer, fds = self.ask(wire.Op.HELLO, said.pack())
            except BaseException:
                self.socket.close()
                raise
            assert not fds
            self.server = wire.ServerHello.unpack(answer[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.socket.close()

    def send(self, packet: bytes) -> None:
        try:
            self.socket.sendall(packet)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise GoneError from e

    def receive(self) -> tuple[wire.Head, bytes, list[int]]:
        try:
            data, fds, flags, _ = socket.recv_fds(self.socket, wire.MAX_PACKET, 256, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as e:
            raise GoneError from e
        if not data:
            raise GoneError
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        head, body = wire.unpack(data)
        return head, bytes(body), fds

    def ask(self, op, body=b"", *, count=0, flags=0):
        self.request += 1
        self.send(wire.pack(op, body, count=count, request=self.request, flags=flags))
        head, answer, fds = self.receive()
        assert head.request == self.request
        assert head.op == op | wire.REPLY, (head, answer)
        return (head, answer), fds

    def lookup(self, block_ids, *, flags=0, ms=1000) -> list[int]:
        (head, body), fds = self.ask(
            wire.Op.LOOKUP, struct.pack("<I", ms) + b"".join(block_ids), count=len(block_ids), flags=flags
        )
        assert not fds
        assert head.items == len(body) == len(block_ids)
        return list(body)

    def open(self, block_ids, *, flags=0, ms=2000, dial=True) -> list[Entry]:
        (_, body), fds = self.ask(
            wire.Op.OPEN, struct.pack("<I", ms) + b"".join(block_ids), count=len(block_ids), flags=flags
        )
        split = len(block_ids) * wire.OPEN_REPLY.size
        rows = list(wire.OPEN_REPLY.iter_unpack(body[:split]))
        files = [row for row in rows if row[0] == wire.OpenStatus.FILE]
        fresh = [row for row in rows if row[0] == wire.OpenStatus.STREAM_DIAL]
        assert len(fds) == len(files)
        assert len(body) == split + len(fresh) * peer_wire.STREAM_TOKEN_BYTES
        left = iter(fds)
        out = [Entry(s, t, c, n, k, next(left) if s == wire.OpenStatus.FILE else -1) for s, t, c, _, n, k in rows]
        for n, row in enumerate(fresh):
            assert row[2] not in self.streams
            at = split + n * peer_wire.STREAM_TOKEN_BYTES
            self.tokens[row[2]] = body[at : at + peer_wire.STREAM_TOKEN_BYTES]
            if dial:
                self.streams[row[2]] = self.dial(self.tokens[row[2]])
        return out

    def dial(self, token: bytes) -> socket.socket:
        """A connection to the stream socket, after the token was sent."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(10)
        stream.connect(self.path + peer_wire.STREAM_SUFFIX)
        stream.sendall(token)
        return stream

    def read(self, entry: Entry) -> bytes | None:
        """The block file of one entry, header and payload; None for a miss."""
        if entry.status == wire.OpenStatus.FILE:
            try:
                return os.pread(entry.fd, block.HEADER_BYTES + entry.length, 0)
            finally:
                os.close(entry.fd)
        if entry.status == wire.OpenStatus.MISS:
            return None
        stream = self.streams[entry.stream]
        magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(exactly(stream, peer_wire.PEER_RESPONSE.size))
        assert magic == wire.MAGIC
        if status == peer_wire.PeerStatus.MISS:
            assert size == 0
            return None
        assert size == block.HEADER_BYTES + entry.length
        return exactly(stream, size)

    def get(self, block_ids, **kw) -> list[bytes | None]:
        """Payloads, verified like a client must."""
        out = []
        for one, entry in zip(block_ids, self.open(block_ids, **kw), strict=True):
            data = self.read(entry)
            out.append(None if data is None else verified(data, one, entry.key))
        return out

    def begin(self, items) -> list[tuple[int, int, bytes, int]]:
        """(status, token, key, fd or -1) of each."""
        body = b"".join(wire.BEGIN_REQUEST.pack(i, n) for i, n in items)
        (_, answer), fds = self.ask(wire.Op.BEGIN, body, count=len(items))
        rows = list(wire.BEGIN_REPLY.iter_unpack(answer))
        assert len(rows) == len(items)
        left = iter(fds)
        out = [(s, t, k, next(left) if s == wire.BeginStatus.WRITE else -1) for s, t, k in rows]
        assert next(left, None) is None
        return out

    def commit(self, tokens, *, flags=0) -> list[int]:
        body = b"".join(struct.pack("<I", t) for t in tokens)
        (_, answer), fds = self.ask(wire.Op.COMMIT, body, count=len(tokens), flags=flags)
        assert not fds
        assert len(answer) == len(tokens)
        return list(answer)

    def put(self, items: dict[bytes, bytes], salt: str = "", *, fill: bool = False) -> list[int]:
        """Store payloads by block id; CommitStatus of each, -1 where BEGIN refused. `salt`: what their request had.

        `fill`: the sidecar computes the checksums.
        """
        more = {"salt_tag": keys.salt_tag(self.server.salt_key, keys.salt_digest(salt))} if salt else {}
        if fill:
            more["payload_sum"] = bytes(16)
        out: dict[bytes, int] = {}
        names = list(items)
        for at in range(0, len(names), 32):
            chunk = names[at : at + 32]
            tokens = {}
            for one, (status, token, key, fd) in zip(
                chunk, self.begin([(i, len(items[i])) for i in chunk]), strict=True
            ):
                out[one] = wire.CommitStatus.HAVE if status == wire.BeginStatus.HAVE else -1
                if status == wire.BeginStatus.WRITE:
                    write_block(fd, header(one, key, items[one], self.server.tenant_tag, **more), items[one])
                    tokens[one] = token
            if tokens:
                flags = wire.Flag.VERIFY if fill else 0
                out.update(zip(tokens, self.commit(list(tokens.values()), flags=flags), strict=True))
        return [out[i] for i in names]


def header(one: bytes, its_key: bytes, data: bytes, tag: bytes, **changes) -> block.BlockHeader:
    fields = {
        "block_key": its_key,
        "block_id": one,
        "fingerprint": FINGERPRINT,
        "tenant_tag": tag,
        "payload_len": len(data),
        "payload_sum": block.checksum(data),
        "created_ms": int(time.time() * 1000),
    }
    return block.BlockHeader(**{**fields, **changes})


def write_block(fd: int, head: block.BlockHeader, data: bytes) -> None:
    """Write and close."""
    os.pwrite(fd, data, block.HEADER_BYTES)
    os.pwrite(fd, block.encode_header(head), 0)
    os.close(fd)


def verified(data: bytes, one: bytes, key: bytes) -> bytes:
    """The payload. CorruptBlockError if anything is wrong."""
    head = block.decode_header(data[: block.HEADER_BYTES])
    body = data[block.HEADER_BYTES :]
    block.require(
        head,
        block_key=key,
        block_id=one,
        fingerprint=FINGERPRINT,
        payload_len=len(body),
        payload_sum=lambda: block.checksum(body),
    )
    return body


def exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        got = stream.recv(size - len(data))
        if not got:
            raise GoneError
        data += got
    return bytes(data)
