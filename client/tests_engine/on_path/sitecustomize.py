"""On an engine's path: no process of it outlives the one that started it, so a killed engine leaves nothing behind."""

import ctypes
import os
import signal


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)
