"""What vLLM calls the blocks of a store, for pools that publish events. Needs no vLLM.

A vLLM key is the block's hash and four bytes, big-endian, that number its cache group. Which block comes before which
is told by the request's context, which keeps the end of each key's tokens (ReqContext, vllm/v1/kv_offload/base.py).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvpool.protocol.block import EngineBlock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["engine_blocks"]

_log = logging.getLogger("vllm.kvpool")
_GROUP_BYTES = 4


def engine_blocks(offload_keys: Sequence[bytes], request: Any, tokens: Sequence[int]) -> Sequence[EngineBlock | None]:
    """One name for each key, or none at all where they cannot be told; never raises.

    `tokens`: of one block, for each cache group. A parent that the context does not know is left empty.
    """
    try:
        positions: Mapping[bytes, int] = getattr(request, "_offload_key_positions", None) or {}
        ends = {(key[-_GROUP_BYTES:], end): key for key, end in positions.items()}
        return [_name(key, positions, ends, tokens) for key in offload_keys]
    except Exception:
        _log.debug("kvpool: blocks without names", exc_info=True)
        return ()


def _name(
    key: bytes, positions: Mapping[bytes, int], ends: Mapping[tuple[bytes, int], bytes], tokens: Sequence[int]
) -> EngineBlock:
    part = key[-_GROUP_BYTES:]
    group = int.from_bytes(part, "big")
    size = tokens[group] if group < len(tokens) else 0
    end = positions.get(key)
    before = ends.get((part, end - size), b"") if end is not None and size else b""
    return EngineBlock(key[:-_GROUP_BYTES], before[:-_GROUP_BYTES], part, size, group)
