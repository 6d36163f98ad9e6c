"""A FUSE file system over a directory, in a process of its own, that can stop to answer single operations.

It speaks the kernel's FUSE protocol (linux/fuse.h) on /dev/fuse, so it needs no library; mounting needs root. Commands
on standard input, one a line: `hang OPERATION`, `resume`. The file system dies with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["OPERATIONS", "FuseMount", "unavailable"]

OPERATIONS = {
    "lookup": 1, "getattr": 3, "setattr": 4, "mkdir": 9, "unlink": 10, "rmdir": 11, "rename": 12, "link": 13,
    "open": 14, "read": 15, "write": 16, "statfs": 17, "release": 18, "fsync": 20, "flush": 25, "init": 26,
    "opendir": 27, "readdir": 28, "releasedir": 29, "access": 34, "create": 35,
}  # fmt: skip
_NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_HEADER = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_MAX_WRITE = 1 << 17
_MNT_DETACH = 2
_MS_NOSUID_NODEV = 2 | 4


def unavailable() -> str:
    """Why this machine cannot mount FUSE; empty if it can."""
    if os.geteuid() != 0:
        return "mounting FUSE needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        return f"/dev/fuse: {e.strerror}"
    return ""


class FuseMount:
    """The directory `backing` mounted at `target` until `stop`."""

    def __init__(self, target: Path, backing: Path) -> None:
        self._target = target
        command = [sys.executable, "-m", "kvpool_testing.fuse_server", str(target), str(backing)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        assert self._process.stdout is not None
        started = self._process.stdout.readline().decode().strip()
        if started != "mounted":
            self.stop()
            raise OSError(started or "the FUSE server ended")

    def hang(self, operation: str) -> None:
        """Answer no further request of this kind; those that wait already are answered."""
        self._command(f"hang {operation}")

    def resume(self) -> None:
        """Answer every request, also those that wait."""
        self._command("resume")

    def stop(self) -> None:
        """End the file system: whatever hangs in it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        ctypes.CDLL(None).umount2(os.fsencode(self._target), _MNT_DETACH)

    def _command(self, text: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"done\n"


class _Request:
    def __init__(self, packet: bytes) -> None:
        _, self.opcode, self.unique, self.node, *_ = _HEADER.unpack_from(packet)
        self.body = packet[_HEADER.size :]


class _Server:
    """Answers requests on the descriptor `fuse`; a node is an O_PATH descriptor in the directory behind it."""

    def __init__(self, fuse: int, backing: str) -> None:
        self._fuse = fuse
        root = os.open(backing, os.O_PATH)
        self._nodes = {1: root}
        self._ids = {_identity(root): 1}
        self._hung: set[int] = set()
        self._waiting: list[_Request] = []
        handlers = {name: getattr(self, f"_{name}") for name in OPERATIONS}
        self._handlers: dict[int, Callable[[_Request], bytes]] = {OPERATIONS[n]: h for n, h in handlers.items()}

    def run(self) -> None:
        commands = b""
        while True:
            ready, _, _ = select.select([self._fuse, 0], [], [])
            if 0 in ready:
                more = os.read(0, 4096)
                if not more:
                    return
                *whole, commands = (commands + more).split(b"\n")
                for command in whole:
                    self._obey(command.decode())
                    os.write(1, b"done\n")
            if self._fuse in ready:
                request = _Request(os.read(self._fuse, _MAX_WRITE + 4096))
                if request.opcode in self._hung:
                    self._waiting.append(request)
                elif request.opcode not in _NO_REPLY:
                    self._answer(request)

    def _obey(self, command: str) -> None:
        verb, _, operation = command.partition(" ")
        if verb == "hang":
            self._hung.add(OPERATIONS[operation])
            return
        self._hung.clear()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._answer(request)

    def _answer(self, request: _Request) -> None:
        body, number = b"", 0
        try:
            handler = self._handlers.get(request.opcode)
            if handler is None:
                number = errno.ENOSYS
            else:
                body = handler(request)
        except OSError as e:
            number = e.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # the kernel no longer waits for it
            os.write(self._fuse, _REPLY.pack(_REPLY.size + len(body), -number, request.unique) + body)

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _entry(self, parent: int, name: bytes) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        identity = _identity(fd)
        known = self._ids.get(identity)
        if known is None:
            known = self._ids[identity] = max(self._nodes) + 1
            self._nodes[known] = fd
        else:
            os.close(fd)
        return struct.pack("<QQQQII", known, 0, 0, 0, 0, 0) + _attributes(os.fstat(self._nodes[known]))

    def _init(self, request: _Request) -> bytes:
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 16, 12, _MAX_WRITE, 1, 0, 0, 0)

    def _lookup(self, request: _Request) -> bytes:
        return self._entry(request.node, _name(request.body))

    def _getattr(self, request: _Request) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._nodes[request.node]))

    def _setattr(self, request: _Request) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid = struct.unpack_from(
            "<IIQQQQQQIIIIIII", request.body
        )
        path = self._path(request.node)
        if valid & 1:
            os.chmod(path, mode & 0o7777)
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        if valid & 0x180:
            os.utime(path)
        elif valid & 0x30:
            os.utime(path, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
        return self._getattr(request)

    def _mkdir(self, request: _Request) -> bytes:
        mode, _ = struct.unpack_from("<II", request.body)
        os.mkdir(_name(request.body[8:]), mode, dir_fd=self._nodes[request.node])
        return self._entry(request.node, _name(request.body[8:]))

    def _unlink(self, request: _Request) -> bytes:
        os.unlink(_name(request.body), dir_fd=self._nodes[request.node])
        return b""

    def _rmdir(self, request: _Request) -> bytes:
        os.rmdir(_name(request.body), dir_fd=self._nodes[request.node])
        return b""

    def _rename(self, request: _Request) -> bytes:
        (to,) = struct.unpack_from("<Q", request.body)
        old, new, _ = request.body[8:].split(b"\0", 2)
        os.rename(old, new, src_dir_fd=self._nodes[request.node], dst_dir_fd=self._nodes[to])
        return b""

    def _link(self, request: _Request) -> bytes:
        (source,) = struct.unpack_from("<Q", request.body)
        name = _name(request.body[8:])
        os.link(self._path(source), name, dst_dir_fd=self._nodes[request.node], follow_symlinks=True)
        return self._entry(request.node, name)

    def _open(self, request: _Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        fd = os.open(self._path(request.node), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
        return struct.pack("<QIi", fd, 0, 0)

    def _create(self, request: _Request) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", request.body)
        name = _name(request.body[16:])
        fd = os.open(name, flags | os.O_CREAT, mode & 0o7777, dir_fd=self._nodes[request.node])
        return self._entry(request.node, name) + struct.pack("<QIi", fd, 0, 0)

    def _read(self, request: _Request) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", request.body)
        return os.pread(fd, size, offset)

    def _write(self, request: _Request) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", request.body)
        return struct.pack("<II", os.pwrite(fd, request.body[40 : 40 + size], offset), 0)

    def _statfs(self, request: _Request) -> bytes:
        s = os.statvfs(self._path(request.node))
        numbers = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax, s.f_frsize)
        return struct.pack("<QQQQQIII28x", *numbers)

    def _release(self, request: _Request) -> bytes:
        os.close(struct.unpack_from("<Q", request.body)[0])
        return b""

    def _fsync(self, request: _Request) -> bytes:
        return b""

    _flush = _access = _releasedir = _fsync

    def _opendir(self, request: _Request) -> bytes:
        return struct.pack("<QIi", 0, 0, 0)

    def _readdir(self, request: _Request) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", request.body)
        found = b""
        for n, name in enumerate(sorted(os.listdir(self._path(request.node)))[offset:], offset + 1):
            encoded = os.fsencode(name)
            entry = struct.pack("<QQII", n, n, len(encoded), 0) + encoded
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _name(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


def _attributes(s: os.stat_result) -> bytes:
    times = [divmod(ns, 10**9) for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
    return _ATTRIBUTES.pack(
        s.st_ino, s.st_size, s.st_blocks, *(t[0] for t in times), *(t[1] for t in times),
        s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0,
    )  # fmt: skip


def _main(target: str, backing: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"kvpool-test", os.fsencode(target), b"fuse", ctypes.c_ulong(_MS_NOSUID_NODEV), options):
        os.write(1, f"mount: {os.strerror(ctypes.get_errno())}\n".encode())
        return
    os.write(1, b"mounted\n")
    _Server(fuse, backing).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
