"""How much memory the managed index gets where the user leaves it open. Pure.

    entries = nodes x capacity of a node's local tiers / 1 MiB        (blocks are larger with most models)
    memory  = entries x 110 bytes                                     (docs/contribute/scale.md: 96 to 112 measured)

rounded up to a step of 64Mi, 256Mi, 1Gi, 4Gi or 16Gi, because another size starts the index anew. Four nodes at least
are reckoned with, so that a young pool grows into its index. What is there stays while the next smaller step would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.quantity import to_bytes

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["ENTRY_BYTES", "index_memory"]

ENTRY_BYTES: Final = 110
_BLOCK: Final = 2**20
_MIB: Final = 2**20
_STEPS: Final = tuple(_MIB * 64 * 4**n for n in range(5))
_FEWEST: Final = 4


def index_memory(pool: KVCachePool, nodes: int, present: int) -> int:
    """Bytes for entries, a whole number of MiB. `present`: what the index has now, 0 if there is none."""
    asked = pool.spec.index.managed.max_memory if pool.spec.index.managed else None
    if asked is not None:
        return -(-to_bytes(asked) // _MIB) * _MIB
    capacity = sum(to_bytes(t.local.capacity) for t in pool.spec.tiers if t.local is not None)
    wanted = max(nodes, _FEWEST) * capacity // _BLOCK * ENTRY_BYTES
    step = next((s for s in _STEPS if s >= wanted), _STEPS[-1])
    return present if present == step * 4 and present in _STEPS else step
