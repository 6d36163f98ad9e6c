"""Parse the sidecar's replies. ProtocolError for anything that does not match the request.

Descriptors of a reply are closed here unless they are returned inside a PendingRead, a PendingWrite or the connection's
streams.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool.stats import Reason
from kvpool.transport.descriptor_closer import close_later
from kvpool.transport.pending import PendingRead, PendingWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.transport.connection import Connection, Reply

_log = logging.getLogger("kvpool")

__all__ = [
    "BlockRequest",
    "LookupResult",
    "begun_stores",
    "commit_statuses",
    "lookup_tiers",
    "miss_reason",
    "opened_loads",
]

_TIERS = tuple(wire.Tier(number) for number in range(max(wire.Tier) + 1))
_MAX_TIER = len(_TIERS) - 1
_REASONS: dict[int, Reason] = {cause: Reason(cause.label) for cause in wire.MissCause}


class BlockRequest(NamedTuple):
    """One block of a batch: its position in the caller's list, its id, and the caller's buffer as flat bytes."""

    position: int
    block_id: bytes
    view: memoryview


class LookupResult(NamedTuple):
    """Tier of each block, in order, and why the first missing one was not found; Reason.NONE if none is missing."""

    tiers: list[wire.Tier]
    reason: Reason


def lookup_tiers(reply: Reply, count: int) -> tuple[Sequence[int], int | None]:
    """Return one tier number per requested block id, and the cause of the first miss (wire.MissCause) if it is given.

    The entry of the first miss may be MISS_CAUSE plus a cause instead of 0.
    """
    body = reply.body
    if reply.items != count or len(body) != count:
        raise ProtocolError("a LOOKUP reply of another length")
    if max(body) <= _MAX_TIER:
        return body, None
    tiers = bytearray(body)
    first = next(n for n, entry in enumerate(tiers) if entry == wire.Tier.MISS or entry > _MAX_TIER)
    cause = tiers[first] - wire.MISS_CAUSE
    tiers[first] = wire.Tier.MISS
    if cause < 0 or max(tiers) > _MAX_TIER:
        raise ProtocolError("a LOOKUP reply with unknown tiers")
    return tiers, cause


def miss_reason(cause: int) -> Reason:
    """Return the reason for a cause of wire.MissCause; a cause of a later release is ABSENT."""
    return _REASONS.get(cause, Reason.ABSENT)


def opened_loads(
    reply: Reply, window: Sequence[BlockRequest], connection: Connection, deadline: float
) -> list[PendingRead]:
    """Return one PendingRead per block: with a descriptor, with the number of a peer stream, or with a reason.

    New streams are dialed by `deadline`; the blocks of one that cannot be dialed fail, and the connection is broken.
    """
    loads: list[PendingRead] = []
    left = list(reply.descriptors)
    try:
        tokens = _open_entries(reply, window, connection, loads, left)
    except BaseException:
        for load in loads:
            load.close()
        raise
    finally:
        close_later(left)
    for number, token in tokens.items():
        _dial(connection, number, token, loads, deadline)
    return loads


def _dial(connection: Connection, number: int, token: bytes, loads: Sequence[PendingRead], deadline: float) -> None:
    try:
        connection.dial_stream(number, token, deadline)
    except OSError as e:
        _log.debug("kvpool: a peer's stream cannot be dialed: %s", e)
        connection.broken = True  # the sidecar has requested the blocks
        for load in loads:
            if load.stream == number:
                load.stream, load.reason = -1, Reason.CONNECTION


def _open_entries(
    reply: Reply, window: Sequence[BlockRequest], connection: Connection, loads: list[PendingRead], left: list[int]
) -> dict[int, bytes]:
    """Append to `loads`, and return the tokens of the streams to dial."""
    size = wire.OPEN_REPLY.size
    entries_bytes = len(window) * size
    tokens, rest = divmod(len(reply.body) - entries_bytes, peer_wire.STREAM_TOKEN_BYTES)
    if reply.items != len(window) or rest or not 0 <= tokens <= len(window):
        raise ProtocolError("an OPEN reply of another length")
    fresh_streams = []
    to_dial: list[int] = []
    named: set[int] = set()
    for n, (position, block_id, view) in enumerate(window):
        status, tier, number, why, length, key = wire.OPEN_REPLY.unpack_from(reply.body, n * size)
        if tier > _MAX_TIER:
            raise ProtocolError(f"an OPEN reply with tier {tier}")
        load = PendingRead(position, block_id, key, _TIERS[tier], view)
        loads.append(load)
        if status == wire.OpenStatus.MISS:
            load.reason = miss_reason(why)
        elif status == wire.OpenStatus.FILE:
            load.descriptor = _pop_descriptor(left)
            if length != len(view):
                load.reason = Reason.LENGTH
                load.close()
        elif status in (wire.OpenStatus.STREAM, wire.OpenStatus.STREAM_NEW_CONN, wire.OpenStatus.STREAM_DIAL):
            named.add(number)
            if length == len(view):
                load.stream = number
            else:
                load.reason = Reason.LENGTH
                connection.broken = True  # unwanted bytes will arrive on the stream
            if status == wire.OpenStatus.STREAM_NEW_CONN:
                fresh_streams.append(number)
            elif status == wire.OpenStatus.STREAM_DIAL:
                to_dial.append(number)
        else:
            raise ProtocolError(f"an OPEN reply with status {status}")
    for number in fresh_streams:  # their descriptors follow those of the files
        if number in connection.streams:
            raise ProtocolError(f"stream {number} is open already")
        stream = connection.streams[number] = socket.socket(fileno=_pop_descriptor(left))
        stream.setblocking(True)
    if not named <= connection.streams.keys() | set(to_dial):
        raise ProtocolError("a stream that was never opened")
    if len(set(to_dial)) != tokens or len(to_dial) != tokens or connection.streams.keys() & set(to_dial):
        raise ProtocolError("an OPEN reply whose tokens do not match its new streams")
    if left:
        raise ProtocolError("an OPEN reply with too many descriptors")
    at = range(entries_bytes, len(reply.body), peer_wire.STREAM_TOKEN_BYTES)
    return {number: reply.body[n : n + peer_wire.STREAM_TOKEN_BYTES] for number, n in zip(to_dial, at, strict=True)}


def begun_stores(
    reply: Reply, window: Sequence[BlockRequest]
) -> tuple[list[tuple[int, wire.BeginStatus]], list[PendingWrite]]:
    """Return the positions that need no write, each with HAVE or REFUSED, and the PendingWrites."""
    settled: list[tuple[int, wire.BeginStatus]] = []
    stores: list[PendingWrite] = []
    left = list(reply.descriptors)
    try:
        size = wire.BEGIN_REPLY.size
        _require(
            reply.items == len(window) and len(reply.body) == len(window) * size, "a BEGIN reply of another length"
        )
        for n, (position, block_id, view) in enumerate(window):
            status, token, key = wire.BEGIN_REPLY.unpack_from(reply.body, n * size)
            if status == wire.BeginStatus.WRITE:
                store = PendingWrite(position, block_id, key, token, view)
                store.descriptor = _pop_descriptor(left)
                stores.append(store)
            else:
                _require(status in (wire.BeginStatus.HAVE, wire.BeginStatus.REFUSED), f"a BEGIN status {status}")
                settled.append((position, wire.BeginStatus(status)))
        _require(not left, "a BEGIN reply with too many descriptors")
    except BaseException:
        for store in stores:
            store.close()
        raise
    finally:
        close_later(left)
    return settled, stores


def commit_statuses(reply: Reply, count: int) -> Sequence[int]:
    """Return one CommitStatus number per token."""
    if reply.items != count or len(reply.body) != count:
        raise ProtocolError("a COMMIT reply of another length")
    return reply.body


def _pop_descriptor(left: list[int]) -> int:
    _require(bool(left), "a reply without its descriptors")
    return left.pop(0)


def _require(fits: bool, otherwise: str) -> None:
    if not fits:
        raise ProtocolError(otherwise)
