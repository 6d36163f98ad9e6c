"""Blocks for tests: made, written and read back without the store under test."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from kvpool.protocol import block

if TYPE_CHECKING:
    from kvpool_sidecar.storage.base import CommitOutcome, Store, WriteTransaction

__all__ = ["TAG", "block_id", "header", "key", "payload", "put", "read", "write"]

TAG = b"t" * 16


def key(n: int) -> bytes:
    return hashlib.sha256(b"key" + n.to_bytes(8, "little")).digest()


def block_id(n: int) -> bytes:
    return hashlib.sha256(b"block id" + n.to_bytes(8, "little")).digest()


def payload(n: int, size: int = 20_000) -> bytes:
    """`size` bytes that differ for each `n`."""
    return (hashlib.sha256(n.to_bytes(8, "little")).digest() * (size // 32 + 1))[:size]


def header(n: int, data: bytes) -> block.BlockHeader:
    return block.BlockHeader(key(n), block_id(n), b"f" * 32, TAG, len(data), block.checksum(data), created_ms=1)


def write(pending: WriteTransaction, head: block.BlockHeader, data: bytes) -> None:
    """What a client does with the descriptor it was given."""
    os.pwrite(pending.writer, data, block.HEADER_BYTES)
    os.pwrite(pending.writer, block.encode_header(head), 0)


def put(store: Store, n: int, size: int = 20_000) -> CommitOutcome:
    """Store block `n`; the CommitOutcome. AssertionError if the store has it already."""
    data = payload(n, size)
    pending = store.begin(key(n), len(data))
    if pending is None:
        raise AssertionError(f"block {n} is there already")
    write(pending, header(n, data), data)
    return pending.commit()


def read(store: Store, n: int) -> bytes | None:
    """The payload of block `n`, checked in full; None if it is not there. CorruptBlockError if it is not right."""
    found = store.open(key(n))
    if found is None:
        return None
    try:
        data = os.pread(found.fd, block.HEADER_BYTES + found.payload_len, 0)
    finally:
        os.close(found.fd)
    body = data[block.HEADER_BYTES :]
    head = block.decode_header(data[: block.HEADER_BYTES])
    block.require(head, block_key=key(n), payload_len=len(body), payload_sum=lambda: block.checksum(body))
    return body
