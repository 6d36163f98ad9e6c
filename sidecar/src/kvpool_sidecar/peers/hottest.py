"""The peer operation HOTTEST: a peer's most popular blocks, as a list of fixed-size rows, roots before leaves.

request: PEER_REQUEST with op HOTTEST; in place of the key a u32, the maximum number of rows, and zeros.
response: PEER_RESPONSE, then `u64 used bytes, u64 capacity`, then rows of
`key[32], u64 payload length (0: not on this node), f32 heat, u32 row of the block before it (NO_PARENT: not known)`.
"""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.blocks.popularity import PopularBlock
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.base import Usage

__all__ = ["MAX_ROWS", "HotList", "HotRow", "build_response", "pack", "request_hot_list", "unpack"]

MAX_ROWS = 1 << 14
_WANTED = struct.Struct("<I28x")
_HEAD = struct.Struct("<QQ")
_ROW = struct.Struct("<32sQfI")
_NO_PARENT = 0xFFFFFFFF
_MAX_BYTES = _HEAD.size + MAX_ROWS * _ROW.size
_HOTTEST = 1e30


class HotRow(NamedTuple):
    key: bytes
    payload_len: int  # 0: the peer does not have it itself
    heat: float
    parent: bytes | None


class HotList(NamedTuple):
    used_bytes: int
    capacity_bytes: int
    rows: list[HotRow]


def request_hot_list(link: PeerConnection, count: int, deadline: float) -> HotList:
    """Request the list, at most `count` rows. ProtocolError, PoolUnavailableError or DeadlineExceededError."""
    link.send_request(wire.Op.HOTTEST, [_WANTED.pack(count)])
    body = link.response_body(_MAX_BYTES, deadline)
    if body is None:
        raise ProtocolError("the peer returned no list of blocks")
    return unpack(body, count)


def build_response(
    hottest: Callable[[int, float], Sequence[PopularBlock]],
    payload_len: Callable[[bytes], int],
    usage: Callable[[], Usage],
    request: bytes,
) -> bytes:
    """Return the response body. `payload_len` returns 0 for a block that is not local."""
    (wanted,) = _WANTED.unpack(request)
    hot = hottest(min(wanted, MAX_ROWS), time.monotonic())
    used = usage()
    rows = [HotRow(one.key, payload_len(one.key), one.score, one.parent) for one in hot]
    return pack(HotList(used.used_bytes, used.capacity_bytes, rows))


def pack(found: HotList) -> bytes:
    """Encode the list. ValueError if there are more than MAX_ROWS."""
    if len(found.rows) > MAX_ROWS:
        raise ValueError(f"{len(found.rows)} rows are too many")
    places = {row.key: n for n, row in enumerate(found.rows)}
    body = bytearray(_HEAD.pack(found.used_bytes, found.capacity_bytes))
    for row in found.rows:
        parent = _NO_PARENT if row.parent is None else places.get(row.parent, _NO_PARENT)
        body += _ROW.pack(row.key, row.payload_len, min(row.heat, _HOTTEST), parent)
    return bytes(body)


def unpack(body: bytes, count: int) -> HotList:
    """Decode a list. ProtocolError for anything that `pack` would not produce, or more than `count` rows."""
    rows, rest = divmod(len(body) - _HEAD.size, _ROW.size)
    if rest or not 0 <= rows <= min(count, MAX_ROWS):
        raise ProtocolError(f"a list of blocks in {len(body)} bytes")
    used, capacity = _HEAD.unpack_from(body)
    raw = list(_ROW.iter_unpack(memoryview(body)[_HEAD.size :]))
    found: list[HotRow] = []
    for key, payload_len, heat, parent in raw:
        if not math.isfinite(heat) or heat < 0 or (parent != _NO_PARENT and parent >= rows):
            raise ProtocolError("a list of blocks is invalid")
        found.append(HotRow(key, payload_len, heat, None if parent == _NO_PARENT else raw[parent][0]))
    return HotList(used, capacity, found)
