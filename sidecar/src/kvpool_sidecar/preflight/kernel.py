"""Checks of kernel features that the sidecar needs and that a seccomp profile may block."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

from kvpool_sidecar.preflight.finding import failed, fine, warned
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["check_kernel", "passed_descriptor", "peer_credentials", "sealed_memory"]


def peer_credentials() -> None:
    """Check SO_PEERCRED, by which the server identifies callers. OSError if it does not work."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        _, uid, _ = struct.unpack("3i", a.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise OSError(f"SO_PEERCRED reports user {uid}")


def passed_descriptor() -> None:
    """Check SCM_RIGHTS, by which blocks reach engines. OSError if no descriptor arrives."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno()]))])
        _, control, _, _ = b.recvmsg(1, socket.CMSG_SPACE(4))
        if not control:
            raise OSError("SCM_RIGHTS: no descriptor arrives")
        os.close(array.array("i", control[0][2][:4])[0])


def sealed_memory() -> None:
    """Check sealed memfds, which carry blocks of peers and object stores. OSError if they are not available."""
    fd = os.memfd_create("preflight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)


def check_kernel(
    needed: tuple[Callable[[], None], ...] = (peer_credentials, passed_descriptor, sealed_memory),
    *,
    has_openat2: Callable[[], bool] = safefs.has_openat2,
) -> Iterator[Finding]:
    """Yield one finding for each missing feature, or one if all are present."""
    missing = [problem for probe in needed if (problem := _problem_of(probe))]
    release = os.uname().release
    for problem in missing:
        yield failed(
            "Kernel", f"Linux {release}: {problem}", "use Linux 5.6 or newer and the runtime's default seccomp profile"
        )
    if not has_openat2():
        yield warned(
            "Kernel",
            f"Linux {release} has no openat2: paths are resolved step by step, which is slower",
            "use Linux 5.6 or newer and the runtime's default seccomp profile",
        )
    elif not missing:
        yield fine("Kernel", f"Linux {release}")


def _problem_of(probe: Callable[[], None]) -> str:
    try:
        probe()
    except OSError as e:
        return f"{probe.__name__.replace('_', ' ')}: {e.strerror or e}"
    return ""
