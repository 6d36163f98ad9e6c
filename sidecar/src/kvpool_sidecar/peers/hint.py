"""The peer operation SESSION: a hint about a session, for a node that served it before.

In place of the key: session tag[16], u8 HintKind, u8 0, u16 0, u32 seconds, 8 zeros. The response is a u32, the number
of blocks that took the hint. A node of an older release closes the connection.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool.protocol.hint import MAX_SECONDS, Hint, HintKind

if TYPE_CHECKING:
    from kvpool_sidecar.peers.connection import PeerConnection

__all__ = ["pack_blocks", "request_hint", "unpack"]

_REQUEST = struct.Struct("<16sBBHI8x")
_BLOCKS = struct.Struct("<I")


def request_hint(link: PeerConnection, hint: Hint, deadline: float) -> int:
    """Send a hint to a peer; return the blocks that took it. ProtocolError, PoolUnavailableError, OSError."""
    link.send_request(wire.Op.SESSION, [_REQUEST.pack(hint.session, hint.kind, 0, 0, hint.seconds)])
    body = link.response_body(_BLOCKS.size, deadline)
    if body is None or len(body) != _BLOCKS.size:
        raise ProtocolError("the peer returned no number of blocks")
    blocks: int = _BLOCKS.unpack(body)[0]
    return blocks


def unpack(request: bytes) -> Hint | None:
    """Decode a request; None for a kind of a newer release."""
    session, kind, _, _, seconds = _REQUEST.unpack(request)
    if kind not in HintKind.__members__.values():
        return None
    return Hint(HintKind(kind), session, min(seconds, MAX_SECONDS))


def pack_blocks(blocks: int) -> bytes:
    """Encode the response."""
    return _BLOCKS.pack(min(blocks, 0xFFFFFFFF))
