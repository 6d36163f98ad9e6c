"""What the sidecar asks of the kernel, and what a seccomp profile may have taken away."""

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

__all__ = ["look_at_kernel", "passed_descriptor", "peer_credentials", "sealed_memory"]


def peer_credentials() -> None:
    """The server knows its callers by them. OSError if a socket does not tell."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        _, uid, _ = struct.unpack("3i", a.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise OSError(f"SO_PEERCRED says user {uid}")


def passed_descriptor() -> None:
    """Blocks are handed to engines as descriptors. OSError if none arrives."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno()]))])
        _, control, _, _ = b.recvmsg(1, socket.CMSG_SPACE(4))
        if not control:
            raise OSError("SCM_RIGHTS: no descriptor arrives")
        os.close(array.array("i", control[0][2][:4])[0])


def sealed_memory() -> None:
    """Blocks of peers and of object stores are handed over in sealed memory. OSError if there is none."""
    fd = os.memfd_create("preflight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)


def look_at_kernel(
    needed: tuple[Callable[[], None], ...] = (peer_credentials, passed_descriptor, sealed_memory),
    *,
    has_openat2: Callable[[], bool] = safefs.has_openat2,
) -> Iterator[Finding]:
    """One finding for each thing that is missing, or one for all that are there."""
    missing = [told for try_out in needed if (told := _trouble(try_out))]
    release = os.uname().release
    for told in missing:
        yield failed(
            "Kernel", f"Linux {release}: {told}", "use Linux 5.6 or newer and the runtime's default seccomp profile"
        )
    if not has_openat2():
        yield warned(
            "Kernel",
            f"Linux {release} has no openat2: paths are walked step by step",
            "use Linux 5.6 or newer and the runtime's default seccomp profile",
        )
    elif not missing:
        yield fine("Kernel", f"Linux {release}")


def _trouble(try_out: Callable[[], None]) -> str:
    try:
        try_out()
    except OSError as e:
        return f"{try_out.__name__.replace('_', ' ')}: {e.strerror or e}"
    return ""
