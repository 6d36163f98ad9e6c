"""Whoever reads a block first leaves it in the page cache in large folios. As root, where the file system has them."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import folios

from kvpool.protocol import block, wire
from kvpool.transport import pending, transfer
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.peers import server
from kvpool_sidecar.replication import prefetch
from kvpool_sidecar.storage.landing import memfd

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIZE = 2 << 20
_TOTAL = _SIZE + block.HEADER_BYTES
_KEY, _FINGERPRINT, _TAG = b"k" * 32, b"f" * 32, b"t" * 16


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[int]:
    """A block's file of which nothing is in the page cache."""
    payload = os.urandom(_SIZE)
    header = block.BlockHeader(
        block_key=_KEY, block_id=_KEY, fingerprint=_FINGERPRINT, tenant_tag=_TAG, payload_len=_SIZE,
        payload_sum=block.checksum(payload), created_ms=1,
    )  # fmt: skip
    file = tmp_path / "block"
    file.write_bytes(block.encode_header(header) + payload)
    fd = os.open(file, os.O_RDONLY)
    folios.drop(fd)
    folios.fill_large(fd, _TOTAL)
    if not folios.large_share(fd, _TOTAL):
        pytest.skip("no large folios here, or the kernel does not show them")
    folios.drop(fd)
    yield fd
    os.close(fd)


def share(fd: int) -> float | None:
    return folios.large_share(fd, _TOTAL)


def read_as_client(fd: int) -> pending.PendingRead:
    load = pending.PendingRead(0, _KEY, _KEY, wire.Tier.LOCAL, memoryview(bytearray(_SIZE)))
    load.descriptor = fd
    batch = pending.Batch(time.monotonic() + 60)
    expect = pending.Expectation(_FINGERPRINT, _TAG, verify=True)
    assert not transfer.read_file(load, batch, expect, False)
    assert transfer.read_file(load, batch, expect, True)
    return load


def test_a_client_that_reads_a_cold_block(cold: int):
    read_as_client(cold)
    assert share(cold) > 0.9


def test_a_read_that_the_kernel_refuses_would_begin_one_of_single_pages(cold: int):
    """Why the client asks for the last page first: a kernel that has mended this makes the question superfluous."""
    with pytest.raises(BlockingIOError):
        os.preadv(cold, [bytearray(_TOTAL)], 0, os.RWF_NOWAIT)
    folios.fill_large(cold, _TOTAL)
    assert share(cold) < 0.5


def test_reading_ahead_after_a_lookup(cold: int):
    assert not prefetch.in_memory(cold, _TOTAL)
    for at in range(0, _TOTAL, prefetch.STRIDE_BYTES):
        prefetch.fill(cold, at, min(prefetch.STRIDE_BYTES, _TOTAL - at))
    assert prefetch.in_memory(cold, _TOTAL)
    assert share(cold) > 0.9


def test_a_peer_that_sends_a_cold_block(cold: int):
    a, b = socket.socketpair()
    with a, b:
        received = bytearray()

        def receive() -> None:
            while len(received) < _TOTAL + 4:
                received.extend(b.recv(1 << 20))

        thread = threading.Thread(target=receive)
        thread.start()
        assert server.send_file(a, b"head", server.Source(cold, _TOTAL, is_cold=True))
        thread.join(30)
    assert received[4:] == os.pread(cold, _TOTAL, 0)
    assert share(cold) > 0.9


def test_a_header_that_was_read_alone_keeps_no_block_from_them(cold: int):
    header = blockfile.read_start(os.dup(cold))
    assert block.decode_header(header).block_key == _KEY
    again = os.open(f"/proc/self/fd/{cold}", os.O_RDONLY)
    try:
        folios.fill_large(again, _TOTAL)
        assert share(again) > 0.9
        assert blockfile.read_start(again) == header
        assert share(again) > 0.9  # what was cached stays
    finally:
        os.close(again)


@pytest.mark.parametrize("size", [256 << 10, _SIZE])
def test_a_header_that_the_sidecar_completes_is_written_past_the_page_cache(cold: int, tmp_path: Path, size: int):
    source, _ = memfd.create(size + block.HEADER_BYTES)
    os.pwrite(source, os.urandom(size), block.HEADER_BYTES)
    start = os.urandom(block.HEADER_BYTES)
    target = os.open(tmp_path / "target", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        memfd.copy_to(target, source, size + block.HEADER_BYTES, start)
        reader = os.open(tmp_path / "target", os.O_RDONLY)
        assert folios.large_share(reader, block.HEADER_BYTES) == 0
        folios.fill_large(reader, size + block.HEADER_BYTES)
        assert folios.large_share(reader, size + block.HEADER_BYTES) > 0.9
        expected = start + os.pread(source, size, block.HEADER_BYTES)
        assert os.pread(reader, size + block.HEADER_BYTES, 0) == expected
        os.close(reader)
    finally:
        os.close(source)
        os.close(target)
