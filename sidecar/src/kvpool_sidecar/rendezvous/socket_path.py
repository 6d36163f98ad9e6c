"""Creates two sockets in a pod's volume: for requests, and for streams of peers' blocks.

Manipulations of the directory by the pod can harm only that pod.
The pod owns the contents of the directory and may create links, directories, pipes or sockets there. So nothing in it
is listed, read or followed: the directory is opened without following links, and each socket is bound under a random
name and renamed to `kv.sock` or `kv.sock.stream`, replacing any file of that name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import NamedTuple

from kvpool_sidecar.system import safe_open as safefs
from kvpool_sidecar.system.unix_socket import listen_at

__all__ = [
    "SOCKET",
    "STREAM_SOCKET",
    "VOLUME",
    "PlacedSocket",
    "is_in_place",
    "place_socket",
    "remove_socket",
    "volume_path",
]

VOLUME = "kvpool"
SOCKET = "kv.sock"
STREAM_SOCKET = f"{SOCKET}.stream"  # kvpool.protocol.peer_wire.STREAM_SUFFIX


class PlacedSocket(NamedTuple):
    """The listening sockets of a pod, (device, inode) of their directory, and their own inodes."""

    listener: socket.socket
    streams: socket.socket
    directory: tuple[int, int]
    inodes: tuple[int, int]

    def close(self) -> None:
        """Close the sockets; their files stay."""
        self.listener.close()
        self.streams.close()


def volume_path(uid: str) -> str:
    """Return the path of the pod's volume below the kubelet's pods directory."""
    return f"{uid}/volumes/kubernetes.io~empty-dir/{VOLUME}"


def place_socket(pods_fd: int, uid: str) -> PlacedSocket | None:
    """Create the sockets; None while the volume does not exist. OSError if the directory cannot be used."""
    try:
        dir_fd = _open(pods_fd, uid)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(os.close, dir_fd)  # not kept open: that would prevent the kubelet from unmounting the volume
        with contextlib.ExitStack() as placed:
            streams = placed.enter_context(listen_at(dir_fd, STREAM_SOCKET, 0o666, socket.SOCK_STREAM))
            listener = placed.enter_context(listen_at(dir_fd, SOCKET, 0o666))  # last: a client finds both
            info = os.fstat(dir_fd)
            inodes = (_status(SOCKET, dir_fd).st_ino, _status(STREAM_SOCKET, dir_fd).st_ino)
            placed.pop_all()
        return PlacedSocket(listener, streams, (info.st_dev, info.st_ino), inodes)


def is_in_place(pods_fd: int, uid: str, placed: PlacedSocket) -> bool | None:
    """Return whether both sockets are still there; None if the volume is gone, False if anything was replaced."""
    try:
        dir_fd = _open(pods_fd, uid)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(dir_fd)
        current = [_status(name, dir_fd) for name in (SOCKET, STREAM_SOCKET)]
    except FileNotFoundError:
        return False
    finally:
        os.close(dir_fd)
    same = (info.st_dev, info.st_ino) == placed.directory and tuple(one.st_ino for one in current) == placed.inodes
    return same and all(stat.S_ISSOCK(one.st_mode) for one in current)


def remove_socket(pods_fd: int, uid: str, placed: PlacedSocket) -> None:
    """Close and delete the sockets unless one was replaced. A file that remains ends with the pod's volume."""
    placed.close()
    with contextlib.suppress(OSError):
        if is_in_place(pods_fd, uid, placed):
            dir_fd = _open(pods_fd, uid)
            try:
                os.unlink(SOCKET, dir_fd=dir_fd)
                os.unlink(STREAM_SOCKET, dir_fd=dir_fd)
            finally:
                os.close(dir_fd)


def _status(name: str, dir_fd: int) -> os.stat_result:
    return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)


def _open(pods_fd: int, uid: str) -> int:
    return safefs.open_beneath(pods_fd, volume_path(uid), os.O_RDONLY | os.O_DIRECTORY)
