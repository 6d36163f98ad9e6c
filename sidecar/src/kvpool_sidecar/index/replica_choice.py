"""Which of several replicas of a block an asker reads: rendezvous hashing of asker and holder. Pure.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).
"""

from __future__ import annotations

import functools
import zlib

__all__ = ["lane_of", "score"]

_LANES = 4  # most peers that a node reads from, of those with the same blocks
_MIX = 0x9E3779B97F4A7C15


def lane_of(block_key: bytes) -> int:
    """Return the lane of a block; an asker reads the blocks of a lane from one of the nodes that have them."""
    return block_key[0] % _LANES


@functools.lru_cache(maxsize=1 << 14)
def score(asker: int, holder: int, lane: int) -> int:
    """Rendezvous hash: askers spread over the holders of a block, and each asker reads a prompt from few of them.

    The holder with the lowest score is read first.
    """
    return zlib.crc32(b"%d %d %d" % (asker, holder, lane)) * _MIX >> 16 & 0xFFFFFFFF
