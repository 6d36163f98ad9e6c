"""The block file, format versions 1 to 4: a 4096-byte header, then the payload at offset 4096.

The payload starts at 4096 so that O_DIRECT and GPUDirect Storage can read it aligned. A block is immutable once it
has its name. Layout of the header, little-endian; bytes 168 to 4079 must be zero:

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
     0     8 magic `KVPOOLB1`
     8     2 format version (1)
    10     1 codec (0 = none, 1 = zstd frame, 2 = lz4 frame, 16 = encrypted; not 0 only on shared tiers, and never
             seen by a client)
    11     1 payload checksum algorithm (1 = xxh3_128)
    12     4 flags (0)
    16     8 payload length in bytes
    24     8 stored length in bytes (equals the payload length while codec is 0, else it is less; 16: any)
    32     8 created at, Unix milliseconds
    40    32 key        (kvpool.protocol.keys.key)
    72    32 block id      (kvpool.protocol.keys.block_id)
   104    32 fingerprint
   136    16 tenant tag
   152    16 payload checksum, big-endian digest of the payload bytes as they were before the codec
  4080    16 BLAKE2b-128 of bytes 0..167
====== ===== ==========================================================================

Version 2 is version 1 and the block's name in its engine, for pools that publish events
(docs/reference/kv-events.md). Bytes 260 to
4079 are zero there and the checksum at 4080 is of bytes 0..259. Blocks without such a name are written as version 1.

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
   168     1 length of the engine's block hash, 1 to 32
   169     1 length of the parent's hash, 0 (unknown, or the first block of a prompt) to 32
   170     1 length of the part (kvpool.protocol.keys.block_id), 0 to 16
   171     1 0
   172     4 tokens in the block, 0: unknown
   176     4 cache group
   180    32 engine's block hash, padded with zeros, as are the next two
   212    32 parent's hash
   244    16 part
====== ===== ==========================================================================

Version 3 is version 2 and the tag of the salt that the block's request had, for pools with `salt_tags` (purge by salt,
docs/how-to/operations.md). There the name may be absent: bytes 168 to 259 are zero then. Bytes 276 to 4079 are zero
and the
checksum is of bytes 0..275. Blocks without a salt are written as version 1 or 2.

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
   260    16 salt tag (kvpool.protocol.keys.salt_tag), not zero
====== ===== ==========================================================================

Version 4 is version 3 with the engine's blocks that this block consists of, and for pools with `events.promptTokensOf`
their tokens (kvpool.protocol.router_blocks). The name must be there, the salt tag may be zero, and the checksum is of
bytes 0..4079.

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
   276   var. the details, then zeros up to 4079
====== ===== ==========================================================================

Codec 16 is an encrypted block file (docs/reference/security.md): the block id's field holds the key's id (16 bytes) and
half of the file's salt, the checksum's field holds the other half, and the block's name in its engine is absent.

XXH3: https://github.com/Cyan4973/xxHash (algorithm description). BLAKE2b: RFC 7693.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvpool.errors import CorruptBlockError
from kvpool.protocol.router_blocks import NO_ROUTER_BLOCKS, RouterBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from xxhash import xxh3_128 as _xxh3_128_running
    from xxhash import xxh3_128_digest as _xxh3_128
except ImportError:  # the sidecar verifies for such a client (kvpool.protocol.wire, Flag.VERIFY)
    _xxh3_128 = None  # type: ignore[assignment]

__all__ = [
    "CAN_CHECKSUM",
    "CHECKSUM_XXH3_128",
    "CODEC_AES256GCM",
    "CODEC_LZ4",
    "CODEC_NONE",
    "CODEC_ZSTD",
    "FORMAT_VERSION",
    "FORMAT_VERSIONS",
    "FORMAT_VERSION_DETAILED",
    "FORMAT_VERSION_NAMED",
    "FORMAT_VERSION_SALTED",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_ENGINE_HASH",
    "MAX_PART",
    "NO_SALT",
    "BlockHeader",
    "EngineBlock",
    "RunningChecksum",
    "checksum",
    "decode_header",
    "encode_header",
    "payload_sum_of",
    "require",
    "running_checksum",
    "tenant_tag_of",
]

MAGIC = b"KVPOOLB1"
FORMAT_VERSION = 1
FORMAT_VERSION_NAMED = 2
FORMAT_VERSION_SALTED = 3
FORMAT_VERSION_DETAILED = 4
FORMAT_VERSIONS = (
    FORMAT_VERSION,
    FORMAT_VERSION_NAMED,
    FORMAT_VERSION_SALTED,
    FORMAT_VERSION_DETAILED,
)  # that this build reads
MAX_ENGINE_HASH = 32
MAX_PART = 16
NO_SALT = bytes(16)
HEADER_BYTES = 4096
CODEC_NONE = 0
CODEC_ZSTD = 1
CODEC_LZ4 = 2
CODEC_AES256GCM = 16
CHECKSUM_XXH3_128 = 1
CAN_CHECKSUM: bool = _xxh3_128 is not None

_FIELDS = struct.Struct("<8sHBBIQQQ32s32s32s16s16s")
_LENGTHS = struct.Struct("<8sHBBIQQ")
_CREATED_AT = _LENGTHS.size
_IDENTITY_AT = _CREATED_AT + 8
_PAYLOAD_SUM_AT = _FIELDS.size - 16
_SUM_AT = HEADER_BYTES - 16
_ENGINE_BLOCK = struct.Struct("<BBBxII32s32s16s")
_ENGINE_END = _FIELDS.size + _ENGINE_BLOCK.size
_SALTED_END = _ENGINE_END + len(NO_SALT)
_ENDS = dict(
    zip(FORMAT_VERSIONS, (_FIELDS.size, _ENGINE_END, _SALTED_END, _SUM_AT), strict=True)
)  # of the fields of a version
_PADDING = {end: bytes(_SUM_AT - end) for end in _ENDS.values()}  # compared, not hashed: as long as opening the file
_VERSION_AT = len(MAGIC)


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """A block's identity in its engine, as published to routers in KV events (docs/reference/kv-events.md).

    `engine_hash` (1 to 32 bytes) and `part` (at most 16) are the inputs of kvpool.protocol.keys.block_id;
    `parent_hash` is the engine hash of the preceding block, empty if unknown or none; `tokens` 0: unknown; `group`:
    the engine's cache group. `router_blocks`: the engine's blocks that this one consists of, if it reports them.
    ValueError for anything that a header cannot hold.
    """

    engine_hash: bytes
    parent_hash: bytes = b""
    part: bytes = b""
    tokens: int = 0
    group: int = 0
    router_blocks: RouterBlocks = NO_ROUTER_BLOCKS

    def __post_init__(self) -> None:
        sizes = (len(self.engine_hash), len(self.parent_hash), len(self.part))
        if not sizes[0] or max(sizes[:2]) > MAX_ENGINE_HASH or sizes[2] > MAX_PART:
            raise ValueError("an engine's hashes have 1 to 32 bytes, a part at most 16")
        if not 0 <= self.tokens < 1 << 32 or not 0 <= self.group < 1 << 32:
            raise ValueError("tokens and group are numbers of 32 bits")
        if self.router_blocks and self.router_blocks.tokens != self.tokens:
            raise ValueError("the engine's blocks have another number of tokens")


@dataclass(frozen=True)
class BlockHeader:
    """Decoded block header. Lengths in bytes; `created_ms` in Unix milliseconds; `salt_tag`: 16 bytes."""

    block_key: bytes
    block_id: bytes
    fingerprint: bytes
    tenant_tag: bytes
    payload_len: int
    payload_sum: bytes
    created_ms: int
    stored_len: int = -1
    codec: int = CODEC_NONE
    checksum_alg: int = CHECKSUM_XXH3_128
    engine_block: EngineBlock | None = None
    salt_tag: bytes = NO_SALT

    def __post_init__(self) -> None:
        if self.stored_len < 0:
            object.__setattr__(self, "stored_len", self.payload_len)


def checksum(payload: bytes | bytearray | memoryview) -> bytes:
    """Compute XXH3-128 of `payload`, 16 bytes big-endian. Releases the GIL. RuntimeError without xxhash."""
    if _xxh3_128 is None:
        raise RuntimeError("xxhash cannot be imported here; let the sidecar verify (CAN_CHECKSUM is False)")
    return _xxh3_128(payload)


class RunningChecksum(Protocol):
    """Incremental checksum, for bytes that are still in the processor's cache."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def running_checksum() -> RunningChecksum:
    """Start an incremental `checksum`: `update(view)` in order, then `digest()`. RuntimeError without xxhash."""
    if _xxh3_128 is None:
        raise RuntimeError("xxhash cannot be imported here; let the sidecar verify (CAN_CHECKSUM is False)")
    return _xxh3_128_running()


def encode_header(header: BlockHeader) -> bytes:
    """Encode the 4096 bytes that start the block's file. ValueError if a field has the wrong size."""
    sizes = (
        len(header.block_key),
        len(header.block_id),
        len(header.fingerprint),
        len(header.tenant_tag),
        len(header.payload_sum),
        len(header.salt_tag),
    )
    if sizes != (32, 32, 32, 16, 16, 16):
        raise ValueError(f"header fields must have 32, 32, 32, 16, 16 and 16 bytes, not {sizes}")
    engine_block, is_salted = header.engine_block, header.salt_tag != NO_SALT
    version = FORMAT_VERSION if engine_block is None else FORMAT_VERSION_NAMED
    details = engine_block.router_blocks.encode() if engine_block is not None else b""
    if details:
        version = FORMAT_VERSION_DETAILED
    elif is_salted:
        version = FORMAT_VERSION_SALTED
    fields = _FIELDS.pack(
        MAGIC, version, header.codec, header.checksum_alg, 0, header.payload_len, header.stored_len,
        header.created_ms, header.block_key, header.block_id, header.fingerprint, header.tenant_tag, header.payload_sum,
    )  # fmt: skip
    if engine_block is not None:
        fields += _ENGINE_BLOCK.pack(
            len(engine_block.engine_hash),
            len(engine_block.parent_hash),
            len(engine_block.part),
            engine_block.tokens,
            engine_block.group,
            engine_block.engine_hash,
            engine_block.parent_hash,
            engine_block.part,
        )
    elif is_salted:
        fields += bytes(_ENGINE_BLOCK.size)
    if is_salted or details:
        fields += header.salt_tag
    if details:
        fields += details + bytes(_SUM_AT - _SALTED_END - len(details))
    return fields + bytes(_SUM_AT - len(fields)) + hashlib.blake2b(fields, digest_size=16).digest()


def decode_header(data: bytes | bytearray | memoryview, *, where: str = "", packed: bool = False) -> BlockHeader:
    """Decode a header. CorruptBlockError if it is torn, foreign or of a version this build cannot read.

    `packed`: the reader can decompress and decrypt; otherwise such a block counts as unreadable.
    """
    if len(data) != HEADER_BYTES:
        raise CorruptBlockError("block header is truncated", where=where)
    end = _ENDS.get(data[_VERSION_AT], _FIELDS.size)
    if not _is_whole(data, data[:end]):
        raise CorruptBlockError("block header fails its checksum", where=where)
    magic, version, codec, alg, flags, payload_len, stored_len, created, key, block_id, fp, tag, psum = _FIELDS.unpack(
        data[: _FIELDS.size]
    )
    if magic != MAGIC or version not in FORMAT_VERSIONS or flags != 0:
        raise CorruptBlockError(f"not a block of format {' or '.join(map(str, FORMAT_VERSIONS))}", where=where)
    plain = codec == CODEC_NONE and stored_len == payload_len
    squeezed = packed and codec in (CODEC_ZSTD, CODEC_LZ4) and 0 < stored_len < payload_len
    encrypted = packed and codec == CODEC_AES256GCM and min(stored_len, payload_len) > 0
    if alg != CHECKSUM_XXH3_128 or not (plain or squeezed or encrypted):
        raise CorruptBlockError(
            "block uses a codec or checksum this build cannot read", block_key=key.hex(), where=where
        )
    salt = bytes(data[_ENGINE_END:_SALTED_END]) if version >= FORMAT_VERSION_SALTED else NO_SALT
    if version == FORMAT_VERSION_SALTED and salt == NO_SALT:
        raise CorruptBlockError("block has an empty salt tag", block_key=key.hex(), where=where)
    # a salted header may have no engine block identity, but then all of it is zero
    has_engine_block = version in (FORMAT_VERSION_NAMED, FORMAT_VERSION_DETAILED) or (
        salt != NO_SALT and any(data[_FIELDS.size : _ENGINE_END])
    )
    details = bytes(data[_SALTED_END:_SUM_AT]) if version == FORMAT_VERSION_DETAILED else b""
    engine_block = _engine_block_of(data, where, details) if has_engine_block else None
    return BlockHeader(key, block_id, fp, tag, payload_len, psum, created, stored_len, codec, alg, engine_block, salt)


def _is_whole(data: bytes | bytearray | memoryview, fields: bytes | bytearray | memoryview) -> bool:
    end = len(fields)
    return data[_SUM_AT:] == hashlib.blake2b(fields, digest_size=16).digest() and data[end:_SUM_AT] == _PADDING[end]


def _engine_block_of(data: bytes | bytearray | memoryview, where: str, details: bytes) -> EngineBlock:
    n_hash, n_parent, n_part, tokens, group, engine_hash, parent, part = _ENGINE_BLOCK.unpack(
        data[_FIELDS.size : _ENGINE_END]
    )
    fits = n_hash <= len(engine_hash) and n_parent <= len(parent) and n_part <= len(part)
    if not fits or any(engine_hash[n_hash:] + parent[n_parent:] + part[n_part:]):
        raise CorruptBlockError("block has a malformed engine block identity", where=where)
    try:
        router_blocks = RouterBlocks.decode(details) if details else NO_ROUTER_BLOCKS
        return EngineBlock(engine_hash[:n_hash], parent[:n_parent], part[:n_part], tokens, group, router_blocks)
    except ValueError:
        raise CorruptBlockError("block has an impossible engine block identity", where=where) from None


def payload_sum_of(
    data: bytes | bytearray | memoryview,
    key: bytes,
    block_id: bytes,
    fingerprint: bytes,
    tenant_tag: bytes,
    length: int,
) -> bytes:
    """Return the payload's checksum of a valid header with exactly these fields; else CorruptBlockError.

    Equivalent to `decode_header` and `require` in a quarter of their time: a load calls it for each block.
    """
    version = data[_VERSION_AT] if len(data) == HEADER_BYTES and data[_VERSION_AT] in _ENDS else FORMAT_VERSION
    end = _ENDS[version]
    fields = bytes(data[:end])
    if (
        len(data) == HEADER_BYTES
        and fields[_IDENTITY_AT:_PAYLOAD_SUM_AT] == key + block_id + fingerprint + tenant_tag
        and fields[:_CREATED_AT] == _LENGTHS.pack(MAGIC, version, CODEC_NONE, CHECKSUM_XXH3_128, 0, length, length)
        and _is_whole(data, fields)
    ):
        return fields[_PAYLOAD_SUM_AT : _FIELDS.size]
    header = decode_header(data)
    require(
        header, block_key=key, block_id=block_id, fingerprint=fingerprint, tenant_tag=tenant_tag, payload_len=length
    )
    return header.payload_sum


def tenant_tag_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the tenant tag of a header, unverified."""
    return bytes(data[_PAYLOAD_SUM_AT - 16 : _PAYLOAD_SUM_AT])


def require(
    header: BlockHeader,
    *,
    block_key: bytes | None = None,
    block_id: bytes | None = None,
    fingerprint: bytes | None = None,
    tenant_tag: bytes | None = None,
    payload_len: int | None = None,
    payload_sum: Callable[[], bytes] | None = None,
    where: str = "",
) -> None:
    """Require that `header` matches the requested block; `payload_sum` is called last, only if all else matches.

    CorruptBlockError names the first field that differs; an argument of None is not checked.
    """
    wanted = (
        ("block key", block_key, header.block_key),
        ("block id", block_id, header.block_id),
        ("fingerprint", fingerprint, header.fingerprint),
        ("tenant tag", tenant_tag, header.tenant_tag),
        ("payload length", payload_len, header.payload_len),
    )
    for name, want, have in wanted:
        if want is not None and want != have:
            raise CorruptBlockError(f"block has another {name}", block_key=header.block_key.hex(), where=where)
    if payload_sum is not None and payload_sum() != header.payload_sum:
        raise CorruptBlockError("payload fails its checksum", block_key=header.block_key.hex(), where=where)
