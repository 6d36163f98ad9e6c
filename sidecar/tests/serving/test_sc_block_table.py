"""One block table: what readers find, and that only the process that made it can change it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.protocol import block_table as layout
from kvpool.transport.block_table import BlockTable
from kvpool_sidecar.serving.block_table import BlockTableWriter

_FAR = 1 << 62  # nanoseconds
_PUNCH, _KEEP_SIZE = 2, 1


def identity(n: int) -> tuple[bytes, bytes]:
    """Id and key of block `n`: uniform, as digests are."""
    rng = random.Random(n)
    return rng.randbytes(32), rng.randbytes(32)


def add(writer: BlockTableWriter, n: int, **kw) -> bool:
    block_id, key = identity(n)
    return writer.insert(block_id[: layout.TAG_BYTES], key, **kw)


def has(reader: BlockTable, *numbers: int) -> bool:
    return reader.has_all([identity(n)[0] for n in numbers])


def reader_of(writer: BlockTableWriter) -> BlockTable:
    descriptor = writer.open_for_reading()
    try:
        return BlockTable(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def writer():
    made = BlockTableWriter(1 << 12)
    made.set_valid_until(_FAR)
    yield made
    with contextlib.suppress(ValueError):
        made.close()


# -- what readers find


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120))
def test_readers_find_what_is_there_and_nothing_else(steps):
    writer = BlockTableWriter(1 << 8)
    writer.set_valid_until(_FAR)
    reader = reader_of(writer)
    there: set[int] = set()
    for is_added, n in steps:
        if is_added:
            assert add(writer, n)
            there.add(n)
        else:
            assert writer.remove(identity(n)[1]) == (n in there)
            there.discard(n)
        assert has(reader, n) == (n in there)
    assert {n for n in range(41) if has(reader, n)} == there
    assert has(reader, *there)
    assert writer.count == len(there)
    writer.close()


def test_a_prompt_is_found_only_as_a_whole(writer):
    reader = reader_of(writer)
    assert not has(reader, 1)
    for n in range(50):
        add(writer, n)
    assert has(reader, *range(50))
    assert not has(reader, *range(51))
    assert not has(reader, 60, *range(50))


def test_three_quarters_of_the_places_can_be_filled_and_each_block_is_found(writer):
    numbers = range(writer.slots * 3 // 4)
    assert [n for n in numbers if not add(writer, n)] == []
    assert has(reader_of(writer), *numbers)
    assert writer.is_full


def test_a_full_table_takes_a_new_block_only_in_place_of_another(writer):
    full = writer.slots * 3 // 4
    for n in range(full):
        add(writer, n)
    reader = reader_of(writer)
    assert has(reader, *range(full))
    assert not add(writer, full)
    assert add(writer, full, replaces=True)
    assert has(reader, full)
    assert writer.count == full
    assert sum(not has(reader, n) for n in range(full)) == 1


@pytest.mark.parametrize("others", [0, 10, layout.REMOVALS, layout.REMOVALS + 10])
def test_a_removal_reaches_a_reader_that_has_found_the_block_however_many_follow(writer, others):
    add(writer, 1)
    add(writer, 2)
    reader = reader_of(writer)
    assert has(reader, 1, 2)
    writer.remove(identity(1)[1])
    for n in range(100, 100 + others):
        add(writer, n)
        writer.remove(identity(n)[1])
    assert not has(reader, 1)
    assert has(reader, 2)


def test_what_could_not_be_loaded_is_searched_again(writer):
    add(writer, 1)
    reader = reader_of(writer)
    assert has(reader, 1)
    reader.forget([identity(1)[0], identity(2)[0]])
    assert has(reader, 1)


def test_the_id_of_zeros_is_not_an_empty_place(writer):
    assert not reader_of(writer).has_all([bytes(32)])


def test_a_table_that_is_not_renewed_or_is_closed_finds_nothing(writer):
    add(writer, 1)
    reader = reader_of(writer)
    writer.set_valid_until(time.monotonic_ns() - 1)
    assert not reader.is_valid
    assert not has(reader, 1)
    writer.set_valid_until(_FAR)
    assert has(reader, 1)
    writer.close()
    assert not reader.is_valid
    assert not has(reader, 1)


def test_blocks_stay_found_while_others_come_and_go_and_after_the_writer_was_killed(writer):
    """A second process changes the table without a pause, and is killed in the middle of it, again and again."""
    resident = range(1000)
    for n in resident:
        add(writer, n)
    for turn in range(5):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            for n in range(10**6 * (turn + 1), 10**9):
                add(writer, n)
                writer.remove(identity(n - 20)[1])
                os.write(write_end, b".") if n % 500 == 0 else None
        os.close(write_end)
        try:
            assert os.read(read_end, 1)  # it is at work
            for _ in range(30):
                fresh = reader_of(writer)
                assert has(fresh, *resident)
                assert not any(has(fresh, n) for n in range(2 * 10**9, 2 * 10**9 + 500))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read_end)
        assert has(reader_of(writer), *resident)


# -- who can change it


def content(writer: BlockTableWriter) -> bytes:
    descriptor = writer.open_for_reading()
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def _map_writable(descriptor: int) -> None:
    mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _make_writable(descriptor: int) -> None:
    """Map it read-only, then ask for more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    assert address != ctypes.c_void_p(-1).value
    if libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def _punch(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    if libc.fallocate(descriptor, _PUNCH | _KEEP_SIZE, 0, 4096) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


_ATTACKS = {
    "write": lambda fd: os.write(fd, b"x"),
    "pwrite": lambda fd: os.pwrite(fd, b"x", 0),
    "shrink": lambda fd: os.ftruncate(fd, 0),
    "grow": lambda fd: os.ftruncate(fd, 1 << 24),
    "punch": _punch,
    "map": _map_writable,
    "mprotect": _make_writable,
    "seal": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}


@pytest.mark.parametrize("attack", _ATTACKS)
@pytest.mark.parametrize("reopened", [False, True], ids=["as-given", "reopened-for-writing"])
def test_a_holder_of_the_descriptor_cannot_change_the_table(writer, attack, reopened):
    add(writer, 1)
    before = content(writer)
    descriptor = writer.open_for_reading()
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if reopened:  # what /proc allows a process of the same user, and root
        try:
            descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        except PermissionError:
            assert os.geteuid() != 0
    refusals = (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL)
    with pytest.raises(OSError, match=rf"\[Errno ({'|'.join(map(str, refusals))})\]"):
        _ATTACKS[attack](descriptor)
    assert content(writer) == before
    add(writer, 2)  # the process that made it still can
    assert has(reader_of(writer), 1, 2)


def test_not_even_its_own_process_can_shrink_a_table_so_reading_it_never_ends_a_process(writer):
    reader = reader_of(writer)
    with pytest.raises(PermissionError):
        os.ftruncate(writer._fd, 0)
    writer.close()
    assert not has(reader, 1)  # reads the mapping


@pytest.mark.parametrize("missing", [0x0001, 0x0002, 0x0004, 0x0010, 0x0017])
def test_a_file_that_others_could_change_is_never_mapped(missing):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, layout.file_bytes(1))
        os.pwrite(descriptor, layout.HEADER.pack(layout.MAGIC, 1, _FAR, 0), 0)
        if seals := layout.REQUIRED_SEALS & ~missing:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(ProtocolError):
            BlockTable(descriptor)
        if not missing & 0x0001:
            return
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, layout.REQUIRED_SEALS)
        BlockTable(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (layout.file_bytes(1) - 1, (layout.MAGIC, 1, _FAR, 0)),
        (layout.file_bytes(1) + 4096, (layout.MAGIC, 1, _FAR, 0)),
        (layout.file_bytes(1), (layout.MAGIC, 2, _FAR, 0)),
        (layout.file_bytes(1), (layout.MAGIC, 1 << 60, _FAR, 0)),
        (layout.file_bytes(3), (layout.MAGIC, 3, _FAR, 0)),
        (layout.file_bytes(1), (layout.MAGIC, 0, _FAR, 0)),
        (layout.file_bytes(1), (layout.MAGIC + 1, 1, _FAR, 0)),
        (layout.file_bytes(2 * layout.MAX_SLOTS // layout.PLACES), (layout.MAGIC, 1, _FAR, 0)),
    ],
)
def test_a_file_of_another_size_or_version_is_refused(size, header):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, layout.HEADER.pack(*header), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, layout.REQUIRED_SEALS)
        with pytest.raises(ProtocolError):
            BlockTable(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_that_is_no_memory_file_is_refused(tmp_path):
    with (tmp_path / "file").open("wb+") as file, pytest.raises(ProtocolError):
        BlockTable(file.fileno())
