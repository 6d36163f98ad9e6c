"""Identities of vLLM's blocks (hash, parent, cache group), for pools that publish KV events. Needs no vLLM.

A vLLM offload key is the block's hash followed by the number of its cache group (4 bytes, big-endian). The order of
blocks follows from the request's context, which holds the end of each key's tokens (ReqContext,
vllm/v1/kv_offload/base.py).
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
    """Return one identity per key, or an empty sequence if they cannot be determined; never raises.

    `tokens`: tokens of one block, for each cache group. A parent that is not in the context is left empty.
    """
    try:
        positions: Mapping[bytes, int] = getattr(request, "_offload_key_positions", None) or {}
        ends = {(key[-_GROUP_BYTES:], end): key for key, end in positions.items()}
        return [_engine_block(key, positions, ends, tokens) for key in offload_keys]
    except Exception:
        _log.debug("kvpool: block identities are unknown", exc_info=True)
        return ()


def _engine_block(
    key: bytes, positions: Mapping[bytes, int], ends: Mapping[tuple[bytes, int], bytes], tokens: Sequence[int]
) -> EngineBlock:
    part = key[-_GROUP_BYTES:]
    group = int.from_bytes(part, "big")
    size = tokens[group] if group < len(tokens) else 0
    end = positions.get(key)
    before = ends.get((part, end - size), b"") if end is not None and size else b""
    return EngineBlock(key[:-_GROUP_BYTES], before[:-_GROUP_BYTES], part, size, group)
