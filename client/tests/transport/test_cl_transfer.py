"""The rule of kvpool.transport.transfer: once a batch was given up, no one writes into its buffers, whatever the
kernel does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_transfer import EXPECT, IDENT, KEY, answer, header_of, load_of, send, soon
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import CorruptBlockError, DeadlineExceededError, PoolUnavailableError, ProtocolError
from kvpool.protocol import block, peer_wire, wire
from kvpool.transport import block_writer, pending, transfer
from kvpool_testing.interpreter_lock import lets_others_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cold(*args: Any) -> int:
    """A file system that has nothing in memory, or cannot tell."""
    if len(args) == 4:
        raise OSError(errno.EOPNOTSUPP, "cannot tell")
    return os.preadv(*args)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000, transfer.PIECE_BYTES, 2 * transfer.PIECE_BYTES + 4097])
@pytest.mark.parametrize("preadv", [os.preadv, cold])
def test_read_back(tmp_path: Path, size: int, preadv: Any) -> None:
    payload = os.urandom(size)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)
    buffer = bytearray(size)
    load = load_of(memoryview(buffer), tmp_path / "b")
    assert transfer.read_file(load, soon(), EXPECT, True, preadv)
    load.close()
    assert buffer == payload


def test_a_caller_that_must_not_wait_hands_over_where_the_page_cache_ends(tmp_path: Path) -> None:
    payload = os.urandom(3 * transfer.PIECE_BYTES)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)

    def half(fd: int, views: Any, offset: int, *flags: int) -> int:
        if flags and offset >= transfer.PIECE_BYTES:
            raise BlockingIOError
        return os.preadv(fd, views, offset)

    buffer = bytearray(len(payload))
    load = load_of(memoryview(buffer), tmp_path / "b")
    batch = soon()
    batch.is_warm = True  # the blocks before it were cached
    assert not transfer.read_file(load, batch, EXPECT, False, half)
    assert load.offset == transfer.PIECE_BYTES
    assert transfer.read_file(load, batch, EXPECT, True, half)
    load.close()
    assert buffer == payload


@pytest.mark.parametrize("size", [100_000, 3 * transfer.PIECE_BYTES + 5])
@pytest.mark.parametrize("can_fill", [True, False])
def test_a_cold_block_is_brought_into_the_page_cache_by_a_thread_that_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, can_fill: bool
) -> None:
    payload = os.urandom(size)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)
    total, filled, asked = size + block.HEADER_BYTES, [], []

    def fill(_fd: int, offset: int, count: int) -> bool:
        filled.append((offset, offset + count))
        return can_fill

    def preadv(fd: int, views: Any, offset: int, *flags: int) -> int:
        wanted = offset + sum(map(len, views))
        asked.append((offset, bool(flags)))
        if flags and not (can_fill and any(a <= offset and min(wanted, total) <= b for a, b in filled)):
            raise BlockingIOError
        return os.preadv(fd, views, offset)

    monkeypatch.setattr(transfer.page_cache, "fill", fill)
    buffer = bytearray(size)
    load, batch = load_of(memoryview(buffer), tmp_path / "b"), soon(60)
    assert not transfer.read_file(load, batch, EXPECT, False, preadv)
    assert asked == [(total - 1, True)]  # no read that would begin a read-ahead of single pages
    assert not filled
    assert transfer.read_file(load, batch, EXPECT, True, preadv)
    load.close()
    assert buffer == payload
    assert [a for a, _ in filled] == list(range(0, total, transfer.PIECE_BYTES))[: len(filled)]
    assert max(b for _, b in filled) == total
    assert all(flags for _, flags in asked) == can_fill


def test_only_the_first_block_of_a_warm_batch_is_asked_whether_it_is(tmp_path: Path) -> None:
    batch, asked = soon(60), []

    def preadv(fd: int, views: Any, offset: int, *flags: int) -> int:
        asked.append(offset)
        return os.preadv(fd, views, offset, *flags)

    for n in range(3):
        payload = os.urandom(8192)
        (tmp_path / str(n)).write_bytes(header_of(payload) + payload)
        load = load_of(memoryview(bytearray(8192)), tmp_path / str(n))
        assert transfer.read_file(load, batch, EXPECT, False, preadv)
        load.close()
    assert asked == [8192 + block.HEADER_BYTES - 1, 0, 0, 0]


@pytest.mark.parametrize("tier", [wire.Tier.SHARED, wire.Tier.PEER])
def test_a_file_that_is_not_on_this_nodes_drives_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: wire.Tier
) -> None:
    """A mapping of a file system that hangs could stop the engine's other threads."""
    monkeypatch.setattr(transfer.page_cache, "fill", lambda *_: pytest.fail("mapped"))
    payload = os.urandom(8192)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)
    load = pending.PendingRead(0, IDENT, KEY, tier, memoryview(bytearray(8192)))
    load.descriptor = os.open(tmp_path / "b", os.O_RDONLY)
    assert transfer.read_file(load, soon(60), EXPECT, True, cold)
    load.close()


def test_bytes_from_a_drive_are_copied_without_the_interpreters_lock(aligned: Callable[[int], memoryview]) -> None:
    size = transfer.PIECE_BYTES
    buffer = aligned(2 * size)
    unverified = pending.Expectation(EXPECT.fingerprint, EXPECT.tenant_tag, verify=False)
    source = os.urandom(size)
    header = header_of(bytes(2 * size))

    def without_a_turn(_fd: int, views: Any, offset: int, *flags: int) -> int:
        if flags:
            raise BlockingIOError
        views[0][:] = source[: len(views[0])]
        return len(views[0])

    def read() -> None:
        load = load_of(buffer)
        load.offset = block.HEADER_BYTES + size  # the header is not read again
        load.header[:] = header
        assert transfer.read_file(load, soon(), unverified, True, without_a_turn)

    assert lets_others_run(read)
    assert buffer[size:] == source


@pytest.mark.parametrize("size", [100_000, 2 * transfer.PIECE_BYTES])
@pytest.mark.parametrize("protected", [True, False])
def test_a_read_that_hangs_writes_nothing_after_it_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, protected: bool
) -> None:
    """The engine uses the slot again. Without the check under the gate, the late read would overwrite it."""
    payload = os.urandom(size)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)
    entered, go = threading.Event(), threading.Event()
    if not protected:
        monkeypatch.setattr(transfer, "refuse_if_over", lambda *_: None)

    def hung(*args: Any) -> int:
        if len(args) == 4:
            raise BlockingIOError
        entered.set()
        assert go.wait(10)
        return os.preadv(*args)

    buffer = bytearray(len(payload))
    load, batch, outcome = load_of(memoryview(buffer), tmp_path / "b"), soon(60), []

    def read() -> None:
        try:
            outcome.append(transfer.read_file(load, batch, EXPECT, True, hung))
        except DeadlineExceededError as e:
            outcome.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    assert entered.wait(30)
    batch.closed = True
    with load.gate:  # does not wait for the hung read
        pass
    buffer[:] = b"\xaa" * len(buffer)
    go.set()
    thread.join(30)
    load.close()
    assert isinstance(outcome[0], DeadlineExceededError) == protected
    assert (set(buffer) == {0xAA}) == protected


def test_who_gives_up_waits_for_a_copy_that_has_begun(
    monkeypatch: pytest.MonkeyPatch, aligned: Callable[[int], memoryview]
) -> None:
    """The copy runs without the interpreter's lock, so the engine could use the slot again in the middle of it."""
    size = transfer.PIECE_BYTES
    buffer, copying, go = aligned(size), threading.Event(), threading.Event()
    memmove = ctypes.memmove

    def slow(to: int, source: int, count: int) -> None:
        copying.set()
        assert go.wait(30)
        memmove(to, source, count)

    monkeypatch.setattr(ctypes, "memmove", slow)

    def from_drive(_fd: int, views: Any, _offset: int, *flags: int) -> int:
        if flags:
            raise BlockingIOError
        views[0][:] = bytes(len(views[0]))
        return len(views[0])

    load, batch = load_of(buffer), soon(60)
    load.offset = block.HEADER_BYTES

    def read() -> None:
        with pytest.raises((CorruptBlockError, DeadlineExceededError)):
            transfer.read_file(load, batch, EXPECT, True, from_drive)

    thread = threading.Thread(target=read)
    thread.start()
    assert copying.wait(30)
    batch.closed = True
    assert not load.gate.acquire(timeout=0.1)
    go.set()
    with load.gate:
        buffer[:] = b"\xaa" * size
    thread.join(30)
    assert buffer == b"\xaa" * size


@pytest.mark.parametrize("cached", [True, False])
def test_a_block_that_is_read_slowly_ends_at_the_deadline(tmp_path: Path, cached: bool) -> None:
    payload = os.urandom(8 * transfer.PIECE_BYTES)
    (tmp_path / "b").write_bytes(header_of(payload) + payload)
    batch = soon(60)

    def slow(fd: int, views: Any, offset: int, *flags: int) -> int:
        if flags and not cached:
            raise BlockingIOError
        if offset > transfer.PIECE_BYTES:
            batch.deadline = time.monotonic()
        return os.preadv(fd, views, offset)

    load = load_of(memoryview(bytearray(len(payload))), tmp_path / "b")
    with pytest.raises(DeadlineExceededError):
        transfer.read_file(load, batch, EXPECT, True, slow)
    load.close()
    assert load.offset < len(payload)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 * (4096 + 5000) - 1), st.booleans())
def test_any_flipped_bit_of_a_file_is_corrupt(tmp_path_factory: pytest.TempPathFactory, bit: int, late: bool) -> None:
    payload = bytes(range(250)) * 20
    data = bytearray(header_of(payload) + payload)
    data[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.mktemp("flip") / "b"
    path.write_bytes(data)
    load = load_of(memoryview(bytearray(len(payload))), path)
    with pytest.raises(CorruptBlockError):
        transfer.read_file(load, soon(), EXPECT, True, cold if late else os.preadv)
    load.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4096 + 4999))
def test_a_file_cut_anywhere_is_corrupt(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    payload = bytes(range(250)) * 20
    path = tmp_path_factory.mktemp("cut") / "b"
    path.write_bytes((header_of(payload) + payload)[:size])
    load = load_of(memoryview(bytearray(len(payload))), path)
    with pytest.raises(CorruptBlockError):
        transfer.read_file(load, soon(), EXPECT, True)
    load.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"block_key": bytes(32)},
        {"block_id": bytes(32)},
        {"fingerprint": bytes(32)},
        {"tenant_tag": bytes(16)},
        {"payload_len": 4999},
        {"payload_sum": bytes(16)},
    ],
)
def test_a_whole_block_that_is_another_one_is_corrupt(tmp_path: Path, changes: dict[str, Any]) -> None:
    payload = bytes(5000)
    (tmp_path / "b").write_bytes(header_of(payload, **changes) + payload)
    load = load_of(memoryview(bytearray(len(payload))), tmp_path / "b")
    with pytest.raises(CorruptBlockError):
        transfer.read_file(load, soon(), EXPECT, True)
    load.close()


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_streams_bring_blocks_in_order(pair: Any, blocking: bool) -> None:
    ours, theirs = pair
    ours.setblocking(blocking)
    payloads = [os.urandom(n) for n in (1, 5_000_000, 70_000)]
    data = b"".join(answer(p) for p in payloads)
    miss = peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.MISS, 0, 0, 0)
    bad = answer(b"x" * 100, payload_sum=bytes(16))
    thread = send(theirs, data[:100], data[100:], miss, bad, answer(b"last"))
    for payload in payloads:
        buffer = bytearray(len(payload))
        transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(buffer)), is_last=True)
        assert buffer == payload
    with pytest.raises(pending.PeerMissError):
        transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(bytearray(5))), is_last=True)
    with pytest.raises(CorruptBlockError):
        transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(bytearray(100))), is_last=True)
    transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(bytearray(4))), is_last=True)  # still in order
    thread.join(5)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(5000),
        peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, 1 << 60),
        peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, 4096 + 99),
        peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.MISS, 0, 0, 1),
        peer_wire.PEER_RESPONSE.pack(wire.MAGIC, 9, 0, 0, 4096 + 100),
    ],
)
def test_garbage_on_a_stream(pair: Any, data: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(data)
    with pytest.raises(ProtocolError):
        transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(bytearray(100))), is_last=True)


@pytest.mark.parametrize("size", [0, 5, 16, 200, 4112, 4200])
def test_a_stream_that_ends_early(pair: Any, size: int) -> None:
    ours, theirs = pair
    theirs.sendall(answer(bytes(1000))[:size])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(PoolUnavailableError):
        transfer.PeerStream(ours, soon(), EXPECT).read(load_of(memoryview(bytearray(1000))), is_last=True)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stream_that_stalls_ends_at_the_deadline(pair: Any, blocking: bool) -> None:
    ours, theirs = pair
    ours.setblocking(blocking)
    theirs.sendall(answer(bytes(1000))[:4500])
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        transfer.PeerStream(ours, soon(0.2), EXPECT).read(load_of(memoryview(bytearray(1000))), is_last=True)
    assert 0.15 < time.monotonic() - began < 1.0


def store_of(view: memoryview, directory: Path) -> pending.PendingWrite:
    store = pending.PendingWrite(0, IDENT, KEY, 1, view)
    store.descriptor = os.open(directory / "b", os.O_RDWR | os.O_CREAT)
    return store


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 1 << 20, 2 * transfer.PIECE_BYTES + 4096])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_written_is_read(tmp_path: Path, aligned: Callable[[int], memoryview], size: int, shift: int) -> None:
    view = aligned(size + shift)[shift:]
    view[:] = os.urandom(size)
    store = store_of(view, tmp_path)
    flags = fcntl.fcntl(store.descriptor, fcntl.F_GETFL)
    block_writer.write_file(store, soon(), EXPECT)
    assert fcntl.fcntl(store.descriptor, fcntl.F_GETFL) == flags  # the sidecar shares the open file
    store.close()
    buffer = bytearray(size)
    load = load_of(memoryview(buffer), tmp_path / "b")
    assert transfer.read_file(load, soon(), EXPECT, True)
    load.close()
    assert buffer == view


def test_aligned_buffers_bypass_the_page_cache(tmp_path: Path, aligned: Callable[[int], memoryview]) -> None:
    view = aligned(8 << 20)
    store = store_of(view, tmp_path)
    try:
        fcntl.fcntl(store.descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        store.close()
        pytest.skip("this file system has no O_DIRECT")
    fcntl.fcntl(store.descriptor, fcntl.F_SETFL, 0)
    block_writer.write_file(store, soon(), EXPECT)
    with pytest.raises(BlockingIOError):  # nothing of the payload is in the page cache
        os.preadv(store.descriptor, [bytearray(4096)], 4 << 20, os.RWF_NOWAIT)
    store.close()


def test_a_small_block_is_written_by_one_call_and_a_short_one_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = os.urandom(256 << 10)
    calls: list[int] = []
    pwritev = os.pwritev

    def write(limit: int) -> bytes:
        def counted(fd: int, views: Any, at: int) -> int:
            calls.append(at)
            return pwritev(fd, [memoryview(b"".join(views))[:limit]], at)

        calls.clear()
        monkeypatch.setattr(os, "pwritev", counted)
        store = store_of(memoryview(payload), tmp_path)
        block_writer.write_file(store, soon(), EXPECT, lambda: 7)
        store.close()
        return (tmp_path / "b").read_bytes()

    whole = header_of(payload) + payload
    assert write(len(whole)) == whole
    assert calls == [0]
    (tmp_path / "b").unlink()
    assert write(100_000) == whole
    assert calls == [0, 100_000, 200_000]
    with pytest.raises(OSError, match="nothing"):
        write(0)


def test_a_store_that_was_given_up_stops(tmp_path: Path) -> None:
    batch = soon()
    batch.closed = True
    store = store_of(memoryview(bytes(4096)), tmp_path)
    with pytest.raises(DeadlineExceededError):
        block_writer.write_file(store, batch, EXPECT)
    store.close()


def test_without_a_checksum_of_ones_own_the_header_leaves_it_to_the_sidecar(tmp_path: Path) -> None:
    store = store_of(memoryview(b"x" * 100), tmp_path)
    block_writer.write_file(store, soon(), pending.Expectation(EXPECT.fingerprint, EXPECT.tenant_tag, verify=False))
    store.close()
    assert block.decode_header((tmp_path / "b").read_bytes()[:4096]).payload_sum == bytes(16)
