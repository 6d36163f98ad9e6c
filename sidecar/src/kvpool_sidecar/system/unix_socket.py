"""Listening unix sockets at paths of any length, put in place of what was there. Standard library only.

An address of a unix socket holds 107 bytes, a kubelet's path is longer: bind through /proc/self/fd/<directory>. Bound
under a temporary name and renamed, so that a client never finds a socket that does not listen yet.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading

__all__ = ["listen_at"]

BACKLOG = 64
_umask_lock = threading.Lock()  # the umask is that of the process


def listen_at(dir_fd: int, name: str, mode: int, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """A listening unix socket called `name` in the directory `dir_fd`; OSError if it cannot be put there.

    Follows no link. A file, link or socket of that name is replaced; a directory is moved aside. The process's
    umask is changed for a moment.
    """
    temporary = f".{name}.{secrets.token_hex(6)}"
    sock = socket.socket(socket.AF_UNIX, kind)
    bound = False
    try:
        with _umask_lock:
            before = os.umask(0o777 & ~mode)
            try:
                sock.bind(f"/proc/self/fd/{dir_fd}/{temporary}")
                bound = True
            finally:
                os.umask(before)
        sock.listen(BACKLOG)
        try:
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except IsADirectoryError:
            os.rename(name, f".{name}.aside.{secrets.token_hex(6)}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        sock.close()
        if bound:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=dir_fd)
        raise
    return sock
