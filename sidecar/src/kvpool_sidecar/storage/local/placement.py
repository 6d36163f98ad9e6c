"""Which drive of a node a block belongs on: weighted rendezvous hashing, so that a new drive moves only its share.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights as in Schindelhauer and
Schomaker, "Weighted distributed hash tables" (2005). Pure.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["choose"]


def choose(block_key: bytes, names: Sequence[str], weights: Sequence[int]) -> int:
    """Index of the drive for `block_key`; `weights` are the drives' capacities, all above 0."""
    if len(names) == 1:
        return 0

    def score(index: int) -> float:
        digest = hashlib.blake2b(names[index].encode() + b"\0" + block_key, digest_size=8).digest()
        uniform = (int.from_bytes(digest, "little") + 1) / (2**64 + 2)
        return -weights[index] / math.log(uniform)

    return max(range(len(names)), key=score)
