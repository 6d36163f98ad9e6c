"""Puts a socket into a pod's volume. Whatever the pod has made of that directory harms the pod alone.

The pod owns the directory's contents and may put links, directories, pipes or sockets of its own there. So nothing in
it is listed, read or followed: the directory is opened without following a link, the socket is bound under a random
name and renamed over whatever is called `kv.sock`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.system import safe_open as safefs
from kvpool_sidecar.system.unix_socket import listen_at

if TYPE_CHECKING:
    import socket

__all__ = ["SOCKET", "VOLUME", "PlacedSocket", "is_in_place", "put_socket", "take_away", "volume_path"]

VOLUME = "kvpool"
SOCKET = "kv.sock"


class PlacedSocket(NamedTuple):
    """A listening socket and where it is: (device, inode) of the directory, inode of the socket."""

    listener: socket.socket
    directory: tuple[int, int]
    inode: int


def volume_path(uid: str) -> str:
    """The pod's volume below the kubelet's pods directory."""
    return f"{uid}/volumes/kubernetes.io~empty-dir/{VOLUME}"


def put_socket(pods_fd: int, uid: str) -> PlacedSocket | None:
    """None while the pod has no such volume yet. OSError if its directory does not let us."""
    try:
        dir_fd = _open(pods_fd, uid)
    except FileNotFoundError:
        return None
    try:
        listener = listen_at(dir_fd, SOCKET, 0o666)
        try:
            info = os.fstat(dir_fd)
            inode = os.stat(SOCKET, dir_fd=dir_fd, follow_symlinks=False).st_ino
        except OSError:
            listener.close()
            raise
        return PlacedSocket(listener, (info.st_dev, info.st_ino), inode)
    finally:
        os.close(dir_fd)  # never kept: an open directory would keep the kubelet from unmounting the volume


def is_in_place(pods_fd: int, uid: str, placed: PlacedSocket) -> bool | None:
    """Is it still there? None: the volume is gone. False: it was removed or replaced, or the volume is another."""
    try:
        dir_fd = _open(pods_fd, uid)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(dir_fd)
        found = os.stat(SOCKET, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    finally:
        os.close(dir_fd)
    same = (info.st_dev, info.st_ino) == placed.directory and found.st_ino == placed.inode
    return same and stat.S_ISSOCK(found.st_mode)


def take_away(pods_fd: int, uid: str, placed: PlacedSocket) -> None:
    """Close, and remove the socket if it is still ours. What cannot be removed stays: the pod's volume ends with it."""
    placed.listener.close()
    with contextlib.suppress(OSError):
        if is_in_place(pods_fd, uid, placed):
            dir_fd = _open(pods_fd, uid)
            try:
                os.unlink(SOCKET, dir_fd=dir_fd)
            finally:
                os.close(dir_fd)


def _open(pods_fd: int, uid: str) -> int:
    return safefs.open_beneath(pods_fd, volume_path(uid), os.O_RDONLY | os.O_DIRECTORY)
