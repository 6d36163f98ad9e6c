"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_limit"]

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(files: tuple[str, ...] = _LIMITS) -> int:
    """Return the bytes of the container's limit (cgroup v2 or v1); without one, the memory of the machine."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in files:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(int(text), machine)  # without a limit v1 has a number above all memory, v2 the word "max"
    return machine
