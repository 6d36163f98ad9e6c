"""Two peer operations by which a node that is drained finds a place for its blocks.

HEADROOM: "what can you take?" The request's 32 bytes are zeros; the answer is `Headroom`.
RECEIVE: "take a copy of this block, from whoever has it." The request names the block's key; with Flag.EVICT colder
blocks may go for it. The answer is one byte, `ReceiveResult`, once the copy is there and verified, or is not to be.

A node that knows neither (a sidecar of before) ends the connection, which is an answer, too.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import wire

if TYPE_CHECKING:
    from kvpool_sidecar.peers.connection import PeerConnection

__all__ = ["Headroom", "ReceiveResult", "request_headroom", "request_receive"]

_ROOM = struct.Struct("<QdB7x")


class Headroom(NamedTuple):
    """What a node can take."""

    spare_bytes: int  # without any eviction
    coldest_idle_s: float  # for which its coldest tenth was not used: what was used since may take its place
    leaving: bool  # it is drained itself

    def pack(self) -> bytes:
        return _ROOM.pack(self.spare_bytes, self.coldest_idle_s, self.leaving)


class ReceiveResult(enum.IntEnum):
    REFUSED = 0  # this node is drained itself, or takes no block of that size
    STORED = 1
    HAVE = 2  # it was there
    FULL = 3
    ABSENT = 4  # the index knows nobody who has it, or they do not give it
    BUSY = 5  # too many at once


def request_headroom(link: PeerConnection, deadline: float) -> Headroom:
    """ProtocolError, PoolUnavailableError, DeadlineExceededError or OSError."""
    link.send_request(wire.Op.HEADROOM, [bytes(32)])
    body = link.response_body(_ROOM.size, deadline)
    if body is None or len(body) != _ROOM.size:
        raise ProtocolError("the peer does not tell what it can take")
    spare, idle, leaving = _ROOM.unpack(body)
    if not math.isfinite(idle) or idle < 0:
        raise ProtocolError("the peer's room makes no sense")
    return Headroom(spare, idle, bool(leaving))


def request_receive(link: PeerConnection, key: bytes, deadline: float, *, evict: bool) -> ReceiveResult:
    """As `request_headroom`."""
    link.send_request(wire.Op.RECEIVE, [key], wire.Flag.EVICT if evict else wire.Flag.NONE)
    body = link.response_body(1, deadline)
    if body is None:
        raise ProtocolError("the peer does not say whether it took the block")
    try:
        return ReceiveResult(body[0])
    except ValueError:
        raise ProtocolError("the peer's answer makes no sense") from None
