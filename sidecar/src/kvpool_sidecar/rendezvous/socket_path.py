"""Creates a socket in a pod's volume. Manipulations of the directory by the pod can harm only that pod.

The pod owns the contents of the directory and may create links, directories, pipes or sockets there. So nothing in it
is listed, read or followed: the directory is opened without following links, and the socket is bound under a random
name and renamed to `kv.sock`, replacing any file of that name.
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

__all__ = ["SOCKET", "VOLUME", "PlacedSocket", "is_in_place", "place_socket", "remove_socket", "volume_path"]

VOLUME = "kvpool"
SOCKET = "kv.sock"


class PlacedSocket(NamedTuple):
    """A listening socket, (device, inode) of its directory, and its own inode."""

    listener: socket.socket
    directory: tuple[int, int]
    inode: int


def volume_path(uid: str) -> str:
    """Return the path of the pod's volume below the kubelet's pods directory."""
    return f"{uid}/volumes/kubernetes.io~empty-dir/{VOLUME}"


def place_socket(pods_fd: int, uid: str) -> PlacedSocket | None:
    """Create the socket; None while the volume does not exist. OSError if the directory cannot be used."""
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
        os.close(dir_fd)  # not kept open: that would prevent the kubelet from unmounting the volume


def is_in_place(pods_fd: int, uid: str, placed: PlacedSocket) -> bool | None:
    """Return whether the socket is still there; None if the volume is gone, False if either was replaced."""
    try:
        dir_fd = _open(pods_fd, uid)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(dir_fd)
        current = os.stat(SOCKET, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    finally:
        os.close(dir_fd)
    same = (info.st_dev, info.st_ino) == placed.directory and current.st_ino == placed.inode
    return same and stat.S_ISSOCK(current.st_mode)


def remove_socket(pods_fd: int, uid: str, placed: PlacedSocket) -> None:
    """Close and delete the socket unless it was replaced. A file that cannot be deleted ends with the pod's volume."""
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
