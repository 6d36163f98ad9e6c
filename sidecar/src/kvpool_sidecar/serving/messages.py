"""Decodes the bodies of client requests and encodes replies. Pure; ProtocolError for a malformed body."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool.stats import BUCKETS_S, STORE, Reason
from kvpool_sidecar.serving.lookup_figures import LookupCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool_sidecar.serving.opener import OpenResult

__all__ = [
    "MIN_DEADLINE_S",
    "ClientReport",
    "decode_begin",
    "decode_report",
    "decode_tokens",
    "decode_used",
    "encode_begin_refusals",
    "encode_busy",
    "encode_open",
    "split_deadline",
]

MIN_DEADLINE_S = 0.001
_MAX_DEADLINE_S = 60.0
_MAX_COUNT = 1 << 53
_MAX_PROBLEM = 200
_COUNT_FAMILIES = ("hits", "bytes", "misses", "tokens", "lookup_depth", "time")
_MAX_REASONS = 48
_TIMED = {*(tier.name.lower() for tier in wire.Tier if tier), STORE}
_REASONS = frozenset(reason.value for reason in Reason if reason)
_TOKEN = struct.Struct("<I")
_DEADLINE = struct.Struct("<I")


class ClientReport(NamedTuple):
    """A client's REPORT: corrupt block ids, counts by family and label, packed histograms by label, and lookups.

    The lookups are in blocks.
    """

    corrupt: list[bytes]
    counts: list[tuple[str, str, int]]
    seconds: dict[str, list[int]]
    lookups: LookupCounts
    problem: str
    """Why the engine runs without the pool; empty otherwise."""


def split_deadline(body: memoryview) -> tuple[float, memoryview]:
    """Return the request's timeout in seconds and the rest of the body."""
    if len(body) < _DEADLINE.size:
        raise ProtocolError("no deadline")
    (ms,) = _DEADLINE.unpack_from(body)
    return min(max(ms / 1000, MIN_DEADLINE_S), _MAX_DEADLINE_S), body[_DEADLINE.size :]


def decode_begin(head: wire.Head, body: memoryview) -> list[tuple[bytes, int]]:
    """Return block id and payload length of each block to write."""
    if not 0 < head.items <= wire.MAX_BATCH or len(body) != head.items * wire.BEGIN_REQUEST.size:
        raise ProtocolError(f"{head.items} blocks in {len(body)} bytes")
    return list(wire.BEGIN_REQUEST.iter_unpack(body))


def decode_tokens(head: wire.Head, body: memoryview) -> list[int]:
    """Return the tokens of the writes to commit."""
    if not 0 < head.items <= wire.MAX_BATCH or len(body) != head.items * _TOKEN.size:
        raise ProtocolError(f"{head.items} tokens in {len(body)} bytes")
    return [token for (token,) in _TOKEN.iter_unpack(body)]


def decode_report(body: memoryview) -> ClientReport:
    """Return a client's report, with every count checked."""
    value = wire.unpack_json(body)
    corrupt = value.get("corrupt", [])
    if not isinstance(corrupt, list) or len(corrupt) > wire.MAX_BATCH:
        raise ProtocolError("too many corrupt blocks in one report")
    block_ids = [_block_id(text) for text in corrupt]
    counts = [(f, label, n) for f in _COUNT_FAMILIES for label, n in _counts(f, value.get(f, {}))]
    problem = value.get("problem", "")
    if not isinstance(problem, str):
        raise ProtocolError("problem is no text")
    seconds = _seconds(value.get("seconds", {}))
    return ClientReport(block_ids, counts, seconds, _lookups(value), problem[:_MAX_PROBLEM])


def decode_used(head: wire.Head, body: memoryview) -> tuple[list[bytes], int]:
    """Return the blocks of a lookup or load that needed no request, and the number of blocks of those not listed."""
    if len(body) < wire.USED_HEAD.size:
        raise ProtocolError("no count of unlisted blocks")
    (unlisted,) = wire.USED_HEAD.unpack_from(body)
    rest = body[wire.USED_HEAD.size :]
    if head.items == 0 and not rest:
        return [], unlisted
    return wire.split_block_ids(rest, head.items, wire.MAX_LOOKUP), unlisted


def encode_open(results: Sequence[OpenResult]) -> bytes:
    """Encode the entries of an OPEN reply, and the tokens of its new streams."""
    entries = [
        wire.OPEN_REPLY.pack(entry.status, entry.tier, entry.stream, entry.why, entry.payload_len, entry.key)
        for entry in results
    ]
    return b"".join(entries + [entry.token for entry in results])


def encode_busy(count: int) -> bytes:
    """Encode an OPEN reply with misses whose reason is an overloaded node."""
    return wire.OPEN_REPLY.pack(wire.OpenStatus.MISS, wire.Tier.MISS, 0, wire.MISS_BUSY, 0, bytes(32)) * count


def encode_begin_refusals(count: int) -> bytes:
    """Encode a BEGIN reply that refuses every block."""
    return wire.BEGIN_REPLY.pack(wire.BeginStatus.REFUSED, 0, bytes(32)) * count


def _counts(family: str, counts: object) -> Iterable[tuple[str, int]]:
    if not isinstance(counts, dict):
        raise ProtocolError(f"{family} is not an object")
    for label, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= _MAX_COUNT:
            raise ProtocolError(f"{family} is not a count")
        yield label, n


def _lookups(value: dict[str, Any]) -> LookupCounts:
    """Return the reported lookups in blocks. Unknown reasons count as `other`."""
    figures = dict(_counts("lookup", value.get("lookup", {})))
    misses = value.get("lookup_misses", {})
    if not isinstance(misses, dict) or len(misses) > _MAX_REASONS:
        raise ProtocolError("lookup_misses is not an object of at most 48 members")
    by_reason: Counter[str] = Counter()
    for reason, n in _counts("lookup_misses", misses):
        by_reason[reason if reason in _REASONS else "other"] += n
    asked, found = figures.get("asked_blocks", 0), figures.get("found_blocks", 0)
    if found > asked:
        raise ProtocolError("more blocks were found than asked for")
    return LookupCounts(asked, found, by_reason, figures.get("requests", 0), figures.get("complete", 0))


def _seconds(times: object) -> dict[str, list[int]]:
    if not isinstance(times, dict) or not times.keys() <= _TIMED:
        raise ProtocolError("seconds has labels other than the tiers")
    for packed in times.values():
        if not isinstance(packed, list) or len(packed) != len(BUCKETS_S) + 2:
            raise ProtocolError("seconds is not a histogram")
        if not all(type(n) is int and 0 <= n <= _MAX_COUNT for n in packed):
            raise ProtocolError("seconds has a value that is not a count")
    return times


def _block_id(text: object) -> bytes:
    try:
        block_id = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * wire.BLOCK_ID_BYTES else b""
    except ValueError:
        block_id = b""
    if len(block_id) != wire.BLOCK_ID_BYTES:
        raise ProtocolError("not a block id in hex")
    return block_id
