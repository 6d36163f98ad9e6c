"""Two peer operations by which a drained node migrates its blocks.

HEADROOM: query free capacity. The request's 32 bytes are zeros; the response is `Headroom`.
RECEIVE: fetch a copy of this block from any node that has it. The request carries the block key; with Flag.EVICT colder
blocks may be evicted for it. The response is one byte, `ReceiveResult`, after the copy was verified or failed.

A node of an older release that knows neither closes the connection.
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
    """Free capacity of a node."""

    spare_bytes: int  # without eviction
    coldest_idle_s: float  # idle time of its coldest tenth; blocks used since may replace it
    leaving: bool  # it is drained itself

    def pack(self) -> bytes:
        return _ROOM.pack(self.spare_bytes, self.coldest_idle_s, self.leaving)


class ReceiveResult(enum.IntEnum):
    REFUSED = 0  # this node is drained itself, or accepts no block of that size
    STORED = 1
    HAVE = 2  # already present
    FULL = 3
    ABSENT = 4  # no node has it according to the index, or they do not deliver it
    BUSY = 5  # too many concurrent requests


def request_headroom(link: PeerConnection, deadline: float) -> Headroom:
    """Query a peer. ProtocolError, PoolUnavailableError, DeadlineExceededError or OSError."""
    link.send_request(wire.Op.HEADROOM, [bytes(32)])
    body = link.response_body(_ROOM.size, deadline)
    if body is None or len(body) != _ROOM.size:
        raise ProtocolError("the peer returned no headroom")
    spare, idle, leaving = _ROOM.unpack(body)
    if not math.isfinite(idle) or idle < 0:
        raise ProtocolError("the peer's headroom is invalid")
    return Headroom(spare, idle, bool(leaving))


def request_receive(link: PeerConnection, key: bytes, deadline: float, *, evict: bool) -> ReceiveResult:
    """Let a peer fetch a block. Raises as `request_headroom`."""
    link.send_request(wire.Op.RECEIVE, [key], wire.Flag.EVICT if evict else wire.Flag.NONE)
    body = link.response_body(1, deadline)
    if body is None:
        raise ProtocolError("the peer returned no result")
    try:
        return ReceiveResult(body[0])
    except ValueError:
        raise ProtocolError("the peer's result is invalid") from None
