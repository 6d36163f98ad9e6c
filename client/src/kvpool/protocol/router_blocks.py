"""The engine's blocks inside one block of the pool, as routers know them: 64-bit hashes, and tokens if requested.

An engine may store several of its blocks as one block of the pool. Routers that index the engine's own events know each
of them by a hash of 64 bits (vLLM: the low 64 bits of the block's hash; SGLang: the first 64). Encoding in a block's
header (kvpool.protocol.block, format version 4), little-endian:

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
     0     4 tokens of one of the engine's blocks
     4     2 number of them, at least 1
     6     1 1: the tokens follow; 0: they do not
     7     1 0
     8   8*n their hashes as routers know them, big-endian, in the order of the prompt
     .     8 that of the block before the first one; 0: unknown or none
     .   3*t the tokens' ids
====== ===== ==========================================================================

Pure and thread-safe.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_DETAILS", "NO_ROUTER_BLOCKS", "RouterBlocks", "pack_tokens"]

MAX_DETAILS = 3804  # bytes: from the end of a header's salt tag to its checksum
_HEAD = struct.Struct("<IHBx")
_HASH = 8
_TOKEN = 3


@dataclass(frozen=True, slots=True)
class RouterBlocks:
    """`hashes`: 8 bytes per block; `parent`: 8 bytes, or empty; `token_ids`: 3 bytes per token, or empty.

    `block_tokens`: tokens of each block. ValueError for sizes that do not agree or that a header cannot hold.
    """

    block_tokens: int = 0
    hashes: bytes = b""
    parent: bytes = b""
    token_ids: bytes = b""

    def __post_init__(self) -> None:
        count, rest = divmod(len(self.hashes), _HASH)
        if not self.hashes and not self.block_tokens and not self.parent and not self.token_ids:
            return
        if rest or not count or self.block_tokens <= 0 or len(self.parent) not in (0, _HASH):
            raise ValueError("the hashes of the engine's blocks are malformed")
        if self.token_ids and len(self.token_ids) != self.tokens * _TOKEN:
            raise ValueError("the token ids are not those of the engine's blocks")
        if self.size > MAX_DETAILS or self.block_tokens >= 1 << 32 or count >= 1 << 16:
            raise ValueError(f"a block's details have at most {MAX_DETAILS} bytes")

    def __bool__(self) -> bool:
        return bool(self.hashes)

    @property
    def count(self) -> int:
        """Number of the engine's blocks."""
        return len(self.hashes) // _HASH

    @property
    def tokens(self) -> int:
        """Number of tokens of all blocks."""
        return self.count * self.block_tokens

    @property
    def size(self) -> int:
        """Bytes of the encoding."""
        return _HEAD.size + len(self.hashes) + _HASH + len(self.token_ids)

    @property
    def hash_numbers(self) -> list[int]:
        """The hashes as unsigned numbers of 64 bits."""
        return list(struct.unpack(f">{self.count}Q", self.hashes))

    @property
    def token_numbers(self) -> list[int]:
        """The token ids; empty if unknown."""
        ids = self.token_ids
        return [int.from_bytes(ids[at : at + _TOKEN], "little") for at in range(0, len(ids), _TOKEN)]

    def without_tokens(self) -> RouterBlocks:
        """Return the same blocks without their content."""
        return RouterBlocks(self.block_tokens, self.hashes, self.parent) if self.token_ids else self

    def encode(self) -> bytes:
        """Encode; empty for no blocks."""
        if not self:
            return b""
        head = _HEAD.pack(self.block_tokens, self.count, bool(self.token_ids))
        return head + self.hashes + (self.parent or bytes(_HASH)) + self.token_ids

    @classmethod
    def decode(cls, data: bytes) -> RouterBlocks:
        """Decode what a header holds, padded with zeros. ValueError if it is malformed."""
        if len(data) < _HEAD.size or len(data) > MAX_DETAILS:
            raise ValueError("a block's details have another size")
        block_tokens, count, has_tokens = _HEAD.unpack_from(data)
        at = _HEAD.size + count * _HASH
        end = at + _HASH + (count * block_tokens * _TOKEN if has_tokens else 0)
        if has_tokens > 1 or not count or end > len(data) or any(data[end:]):
            raise ValueError("a block's details are malformed")
        parent = data[at : at + _HASH]
        return cls(block_tokens, data[_HEAD.size : at], parent if any(parent) else b"", data[at + _HASH : end])


NO_ROUTER_BLOCKS = RouterBlocks()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids into 3 bytes each. ValueError for ids that do not fit."""
    try:
        wide = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise ValueError("token ids are numbers of 24 bits") from None
    if any(wide[3::4]):
        raise ValueError("token ids are numbers of 24 bits")
    packed = bytearray(_TOKEN * len(token_ids))
    for at in range(_TOKEN):
        packed[at::_TOKEN] = wide[at::4]
    return bytes(packed)
