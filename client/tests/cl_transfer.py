"""Blocks, loads and peers' answers for the tests of kvpool.transport."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from cl_fake_sidecar import block_id_of

from kvpool.protocol import block, peer_wire, wire
from kvpool.transport import pending

if TYPE_CHECKING:
    import socket
    from pathlib import Path

EXPECT = pending.Expectation(b"f" * 32, b"t" * 16, verify=True)
KEY, IDENT = block_id_of("key"), block_id_of("block_id")


def header_of(payload: bytes, **changes: Any) -> bytes:
    fields = {
        "block_key": KEY, "block_id": IDENT, "fingerprint": EXPECT.fingerprint, "tenant_tag": EXPECT.tenant_tag,
        "payload_len": len(payload), "payload_sum": block.checksum(payload), "created_ms": 7,
    }  # fmt: skip
    return block.encode_header(block.BlockHeader(**{**fields, **changes}))


def load_of(view: memoryview, path: Path | None = None) -> pending.PendingRead:
    load = pending.PendingRead(0, IDENT, KEY, wire.Tier.LOCAL, view)
    if path is not None:
        load.descriptor = os.open(path, os.O_RDONLY)
    return load


def soon(seconds: float = 5.0) -> pending.Batch:
    return pending.Batch(time.monotonic() + seconds)


def answer(payload: bytes, status: int = peer_wire.PeerStatus.OK, size: int | None = None, **changes: Any) -> bytes:
    data = header_of(payload, **changes) + payload
    return peer_wire.PEER_RESPONSE.pack(wire.MAGIC, status, 0, 0, len(data) if size is None else size) + data


def send(to: socket.socket, *parts: bytes) -> threading.Thread:
    def run() -> None:
        for part in parts:
            to.sendall(part)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
