"""How many blocks a node's table may have in the memory of its process. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["BYTES_PER_BLOCK", "block_limit"]

BYTES_PER_BLOCK: Final = 160  # resident, with a table for each tenant and the spare room of growing columns
_SHARE: Final = 3  # of the memory: a table that is rebuilt exists twice, and the rest of the process needs a third
_LEAST: Final = 1 << 16


def block_limit(memory_bytes: int, reserved_bytes: int) -> int:
    """Return the maximum number of blocks for a memory limit, `reserved_bytes` of which are for other purposes."""
    return max(_LEAST, (memory_bytes - reserved_bytes) // _SHARE // BYTES_PER_BLOCK)
