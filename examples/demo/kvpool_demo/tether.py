"""Processes that cannot outlive the one that started them.

    python tether.py PARENT-PID COMMAND...      (a file of its own: it starts in 20 ms)

prctl(2), PR_SET_PDEATHSIG: the kernel sends the signal when the thread that started the process ends, so start from the
main thread. It survives execve(2) and is not inherited by fork(2): a forked process calls `die_with_parent` itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; end at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is the demo's own
