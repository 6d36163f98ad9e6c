"""Runs one command and ends everything that it started when the benchmark is gone, however that ended.

    python guard.py PARENT-PID COMMAND...      (a file of its own: it imports nothing of ours)

vLLM's server starts a process for its engine, which outlives a server that is killed. prctl(2), PR_SET_PDEATHSIG: the
kernel sends SIGTERM to this process when the thread that started it ends; all that the command started is in its group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """The command's exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    child: subprocess.Popen[bytes] | None = None

    def over(_signal: int = 0, _frame: object = None) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, over)
    child = subprocess.Popen(command)
    if os.getppid() != parent:  # it went before the kernel was told
        over()
    status = child.wait()
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
