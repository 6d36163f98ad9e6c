"""Connects to a sidecar through the kubelet's directory of its pod: no other pod can put a socket there.

The sidecar listens in a volume of its own pod. The kernel reports which user listens, and the sidecar checks in the
same way that root connects.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from kvpool_sidecar.rendezvous.pods import SidecarPod

__all__ = ["dial_sidecar", "handoff_path"]

_CONNECT_TIMEOUT_S = 1.0
_UCRED = struct.Struct("3i")


def handoff_path(uid: str) -> str:
    """Return the path of the sidecar's socket below the kubelet's pods directory."""
    return f"{uid}/volumes/kubernetes.io~empty-dir/handoff/handoff.sock"


def dial_sidecar(pods_fd: int, sidecar: SidecarPod) -> socket.socket:
    """Connect. OSError if it does not listen; EPERM if another user than the sidecar's listens."""
    fd = safefs.open_beneath(pods_fd, handoff_path(sidecar.uid), os.O_PATH | os.O_NOFOLLOW)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.connect(f"/proc/self/fd/{fd}")
        _check_user(sock, sidecar)
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(fd)
    return sock


def _check_user(sock: socket.socket, sidecar: SidecarPod) -> None:
    _, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if user != sidecar.user:
        message = f"user {user} listens in the sidecar of pool {sidecar.pool}, expected {sidecar.user}"
        raise OSError(errno.EPERM, message)
