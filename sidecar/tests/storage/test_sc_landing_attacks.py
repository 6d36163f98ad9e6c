"""Pods that keep what they were given to change a block after COMMIT: as another user, the sidecar's user and root."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import signal
import time

import pytest

from kvpool.errors import CorruptBlockError, RefusedError
from kvpool_sidecar.storage.landing import memfd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")

SIDECAR_UID = 65532
SIZE = 16 * mmap.PAGESIZE
GOOD = bytes(range(256)) * (SIZE // 256)
PODS = {"other user": 1234, "the sidecar's user": SIDECAR_UID, "root": 0}


def committed_file() -> int:
    """A memory file of the sidecar's user with the block's bytes, not yet sealed."""
    fd, _ = memfd.create(SIZE)
    os.fchown(fd, SIDECAR_UID, SIDECAR_UID)
    os.pwrite(fd, GOOD, 0)
    return fd


class Pod:
    """A process of `uid` that holds `writer`. It runs `before`, waits for `go`, and runs `after` with the result."""

    def __init__(self, uid, writer, before, after) -> None:
        ready, self._go, done = os.pipe(), os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(20)
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                kept = before(writer)
                os.write(ready[1], b"r")
                os.read(self._go[0], 1)
                after(writer, kept)
            os.write(ready[1], b"r")
            os.write(done[1], b"d")
            os.read(self._go[0], 1)  # what it holds stays held
            os._exit(0)
        self._done = done[0]
        os.read(ready[0], 1)
        self._fds = (*ready, *self._go, *done)

    def act(self) -> None:
        os.write(self._go[1], b"g")
        os.read(self._done, 1)

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for fd in self._fds:
            os.close(fd)


def reopen(writer):
    """Another descriptor of the file, to read and write; None where the kernel refuses it."""
    for prepare in (lambda: None, lambda: os.fchmod(writer, 0o666)):
        with contextlib.suppress(OSError):
            prepare()
            return os.open(f"/proc/self/fd/{writer}", os.O_RDWR)
    return None


def keep_descriptor(writer):
    return os.dup(writer)


def keep_mapping(writer):
    fd = reopen(writer)
    return None if fd is None else mmap.mmap(fd, SIZE)


def keep_mapping_of_a_child(writer):
    mapped = keep_mapping(writer)
    if mapped is None:
        return None
    here, there = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        os.close(there)
        os.read(here, 1)  # until its parent ends
        os._exit(0)
    os.close(here)
    mapped.close()
    return there


def keep_page_in_pipe(writer):
    fd = reopen(writer)
    if fd is None:
        return None
    pipe = os.pipe()
    os.splice(fd, pipe[1], mmap.PAGESIZE)
    return pipe


def add_seal(writer):
    fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def cut(writer):
    os.ftruncate(writer, SIZE - mmap.PAGESIZE)


def change(writer, kept):
    """Every way to write that the pod has."""
    fds = [writer, kept if isinstance(kept, int) else None, reopen(writer)]
    for fd in fds:
        if fd is None:
            continue
        attempts = (
            lambda fd=fd: os.pwrite(fd, b"EVIL", 0),
            lambda fd=fd: os.writev(fd, [b"EVIL"]),
            lambda fd=fd: mmap.mmap(fd, SIZE).__setitem__(slice(0, 4), b"EVIL"),
            lambda fd=fd: os.posix_fallocate(fd, 0, 2 * SIZE),
            lambda fd=fd: os.ftruncate(fd, 2 * SIZE),
            lambda fd=fd: os.pwrite(fd, b"EVIL", SIZE),
        )
        for attempt in attempts:
            with contextlib.suppress(OSError, ValueError):
                attempt()
    if isinstance(kept, mmap.mmap):
        kept[:4] = b"EVIL"


# what a pod keeps, and what COMMIT then says for: another user, the sidecar's user, root
MATRIX = [
    (keep_descriptor, "stored", "stored", "stored"),
    (keep_mapping, "stored", "refused", "refused"),
    (keep_mapping_of_a_child, "stored", "refused", "refused"),
    (keep_page_in_pipe, "stored", "refused", "refused"),
    (add_seal, "refused", "refused", "refused"),
    (cut, "corrupt", "corrupt", "corrupt"),
]


def sealed(fd) -> str:
    try:
        memfd.seal(fd, SIZE)
    except RefusedError:
        return "refused"
    except CorruptBlockError:
        return "corrupt"
    return "stored"


@pytest.mark.parametrize("uid", PODS.values(), ids=PODS.keys())
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row[0].__name__)
def test_what_a_pod_keeps_changes_no_committed_block(uid, row):
    before, *outcomes = row
    fd = committed_file()
    writer = memfd.open_for_pod(fd)
    pod = Pod(uid, writer, before, change)
    try:
        outcome = sealed(fd)
        pod.act()
        if outcome == "stored":
            assert os.pread(fd, 2 * SIZE, 0) == GOOD
        assert outcome == outcomes[list(PODS.values()).index(uid)]
    finally:
        pod.end()
        os.close(writer)
        os.close(fd)


@pytest.mark.parametrize("uid", PODS.values(), ids=PODS.keys())
def test_a_pod_that_keeps_a_sealed_file_keeps_no_memory(uid):
    fd = committed_file()
    writer = memfd.open_for_pod(fd)
    pod = Pod(uid, writer, keep_descriptor, lambda writer, kept: os.posix_fallocate(kept, 0, SIZE))
    try:
        memfd.seal(fd, SIZE)
        assert memfd.reclaim(fd)
        pod.act()
        assert os.fstat(fd).st_blocks == 0
    finally:
        pod.end()
        os.close(writer)
        os.close(fd)


def test_only_another_user_can_neither_read_nor_map_what_it_writes():
    for uid, opens in ((1234, False), (SIDECAR_UID, True), (0, True)):
        fd = committed_file()
        writer = memfd.open_for_pod(fd)
        outcome = os.memfd_create("outcome")

        def attempt(writer, outcome=outcome):
            os.write(outcome, b"yes" if reopen(writer) is not None else b"no")

        pod = Pod(uid, writer, attempt, lambda *_: None)
        pod.end()
        assert os.pread(outcome, 9, 0) == (b"yes" if opens else b"no")
        for one in (fd, writer, outcome):
            os.close(one)


def hammer(writer, seed):
    """Write, map, cut and splice at random until the end."""
    rng = random.Random(seed)
    fd = reopen(writer)
    pipe = os.pipe2(os.O_NONBLOCK)
    while True:
        with contextlib.suppress(OSError, ValueError):
            way = rng.randrange(6)
            if way < 2:
                os.pwrite(fd, b"EVIL", rng.randrange(SIZE - 4))
            elif way < 4:
                mapped = mmap.mmap(fd, SIZE)
                until = time.monotonic() + 0.003
                while time.monotonic() < until:
                    at = rng.randrange(SIZE - 4)
                    mapped[at : at + 4] = rng.randbytes(4)
                mapped.close()
            elif way == 4:
                os.splice(fd, pipe[1], mmap.PAGESIZE, offset_src=0)
                os.read(pipe[0], mmap.PAGESIZE)
            else:
                time.sleep(0.002)


def fuzz(rounds, *, until_changed=False):
    """Return how many files were sealed, and how many of them changed afterwards."""
    sealed_files = changed = 0
    for number in range(rounds):
        fd = committed_file()
        writer = memfd.open_for_pod(fd)
        pids = []
        for seed in range(2):
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                with contextlib.suppress(BaseException):
                    hammer(writer, number * 2 + seed)
                os._exit(0)
            pids.append(pid)
        deadline = time.monotonic() + 0.3
        outcome = "refused"
        while outcome != "stored" and time.monotonic() < deadline:
            time.sleep(0.002)
            outcome = sealed(fd)
        if outcome == "stored":
            seen = os.pread(fd, SIZE, 0)
            time.sleep(0.02)
            sealed_files += 1
            changed += os.pread(fd, SIZE, 0) != seen
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(writer)
        os.close(fd)
        if until_changed and changed:
            break
    return sealed_files, changed


def test_no_sealed_file_changes_under_random_attacks_of_root():
    sealed_files, changed = fuzz(40)
    assert sealed_files > 0
    assert changed == 0


def test_the_random_attacks_change_a_file_under_a_weaker_seal(monkeypatch):
    """Control: F_SEAL_FUTURE_WRITE leaves a mapping from before writable."""
    future_write = 0x0010
    monkeypatch.setattr(memfd, "_COMMITTED", future_write | fcntl.F_SEAL_SEAL)
    _, changed = fuzz(100, until_changed=True)
    assert changed > 0


def test_a_file_that_is_cut_while_it_is_written_out_is_an_error_and_no_crash(tmp_path):
    fd = committed_file()
    memfd.seal(fd, SIZE)
    target = os.open(tmp_path / "block", os.O_WRONLY | os.O_CREAT, 0o600)
    mapped = mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ)
    os.ftruncate(fd, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad address") as caught:  # what the kernel says for a page beyond the end
        os.pwrite(target, memoryview(mapped)[mmap.PAGESIZE :], 0)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(CorruptBlockError):
        memfd.copy_to(target, fd, SIZE)
    with memoryview(mapped) as view, pytest.raises(CorruptBlockError):
        memfd._write(target, view, direct=False)
    with memfd._mapped(fd, SIZE) as view, pytest.raises(CorruptBlockError):
        memfd._write(target, view, direct=False)
    os.close(target)
    os.close(fd)
