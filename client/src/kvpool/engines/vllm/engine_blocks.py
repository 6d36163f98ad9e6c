"""Identities of vLLM's blocks (hash, parent, cache group), for pools that publish KV events. Needs no vLLM.

A vLLM offload key is the hash of a chunk's last block followed by the number of its cache group (4 bytes, big-endian).
The order of chunks follows from the request's context, which holds the end of each key's tokens (ReqContext,
vllm/v1/kv_offload/base.py). The blocks inside a chunk and their tokens are the request's (recorded_request).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engines.vllm.recorded_request import request_of
from kvpool.protocol.block import EngineBlock
from kvpool.protocol.router_blocks import MAX_DETAILS, NO_ROUTER_BLOCKS, RouterBlocks, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BlockLayout", "engine_blocks"]

_log = logging.getLogger("vllm.kvpool")
_GROUP_BYTES = 4
_HASH = 8
_CONTENT_BEYOND_TOKENS = ("cache_salt", "lora_request", "mm_features", "prompt_embeds")


class BlockLayout(NamedTuple):
    """Tokens of a chunk and of a block, for each cache group, and of one of the request's block hashes."""

    chunk_tokens: Sequence[int]
    block_tokens: Sequence[int] = ()
    hash_tokens: int = 0

    @classmethod
    def of(cls, offloading_spec: Any) -> BlockLayout:
        """Read the layout from an OffloadingSpec (vllm/v1/kv_offload/base.py)."""
        block_tokens = list(offloading_spec.tokens_per_block)
        chunk_tokens = [n * offloading_spec.blocks_per_chunk for n in block_tokens]
        cache = getattr(offloading_spec.config, "cache", None)
        return cls(chunk_tokens, block_tokens, getattr(cache, "tokens_per_hash", 0) or 0)


def engine_blocks(
    offload_keys: Sequence[bytes], req_context: Any, layout: BlockLayout, *, with_tokens: bool = False
) -> Sequence[EngineBlock | None]:
    """Return one identity per key, or an empty sequence if they cannot be determined; never raises.

    A parent that is not in the context is left empty. `with_tokens`: the request's tokens too.
    """
    try:
        positions: Mapping[bytes, int] = getattr(req_context, "_offload_key_positions", None) or {}
        ends = {(key[-_GROUP_BYTES:], end): key for key, end in positions.items()}
        request = request_of(req_context)
        has_tokens = with_tokens and request is not None and _is_text_only(request)
        found = []
        for key in offload_keys:
            identity = _engine_block(key, positions, ends, layout.chunk_tokens)
            blocks = _router_blocks(key, positions.get(key), request, layout, with_tokens=has_tokens)
            found.append(identity if not blocks else _with(identity, blocks))
        return found
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


def _with(identity: EngineBlock, blocks: RouterBlocks) -> EngineBlock:
    e = identity
    return EngineBlock(e.engine_hash, e.parent_hash, e.part, e.tokens, e.group, blocks)


def _is_text_only(request: Any) -> bool:
    """Return whether the request's block hashes depend on its tokens alone: a router that hashes tokens finds those."""
    return not any(getattr(request, name, None) for name in _CONTENT_BEYOND_TOKENS)


def _router_blocks(
    key: bytes, end: int | None, request: Any, layout: BlockLayout, *, with_tokens: bool
) -> RouterBlocks:
    """Return the blocks of one chunk; none if the request does not have them, or if a header has no room for them."""
    group = int.from_bytes(key[-_GROUP_BYTES:], "big")
    if request is None or not end or group >= len(layout.block_tokens):
        return NO_ROUTER_BLOCKS
    size, each, per_hash = layout.chunk_tokens[group], layout.block_tokens[group], layout.hash_tokens
    if not per_hash or each % per_hash or size % each or end % size:
        return NO_ROUTER_BLOCKS
    hashes = request.block_hashes
    start, last = end - size, end // per_hash - 1
    if last >= len(hashes) or hashes[last] != key[:-_GROUP_BYTES]:
        return NO_ROUTER_BLOCKS
    packed = b"".join(hashes[n][-_HASH:] for n in range((start + each) // per_hash - 1, last + 1, each // per_hash))
    parent = hashes[start // per_hash - 1][-_HASH:] if start else b""
    blocks = RouterBlocks(each, packed, parent)
    if not with_tokens or blocks.size + 3 * size > MAX_DETAILS:
        return blocks
    token_ids = request.all_token_ids[start:end]
    return RouterBlocks(each, packed, parent, pack_tokens(token_ids)) if len(token_ids) == size else blocks
