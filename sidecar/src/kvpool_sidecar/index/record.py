"""One place where a block is, packed into 12 bytes. The value of an index entry is a few of them in a row."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "MAX_RECORDS",
    "PREFIX",
    "RECORD_BYTES",
    "Record",
    "entry_name",
    "is_entry_name",
    "pack",
    "unpack",
    "unpack_all",
    "with_room",
    "without",
]

PREFIX = b"b"
MAX_RECORDS = 32
_RECORD = struct.Struct("<HBBII")
RECORD_BYTES = _RECORD.size
_LONGEST = 0x10000 * RECORD_BYTES  # one for each node number


class Record(NamedTuple):
    node: int
    payload_len: int  # bytes, below 4 GiB
    generation: int  # of the node's directory: what an emptied drive once had is void
    tier: int = int(Tier.LOCAL)


def entry_name(key: bytes) -> bytes:
    """Name of a block's entry: half of the key is plenty for a hint."""
    return PREFIX + key[:16]


def is_entry_name(name: bytes) -> bool:
    """Is this the name of some block's entry?"""
    return len(name) == len(PREFIX) + 16 and name.startswith(PREFIX)


def pack(record: Record) -> bytes:
    """12 bytes."""
    return _RECORD.pack(record.node, record.tier, 0, record.payload_len, record.generation)


@functools.lru_cache(maxsize=1 << 14)  # a node's records differ in little, so most values have been seen before
def unpack(value: bytes | None) -> tuple[Record, ...]:
    """At most MAX_RECORDS of an entry; those of a version this build does not know, and torn ones, are left out."""
    return unpack_all((value or b"")[: MAX_RECORDS * RECORD_BYTES])


def unpack_all(value: bytes) -> tuple[Record, ...]:
    """All records of an entry: releases before the bound let entries grow."""
    records: list[Record] = []
    for at in range(0, min(len(value), _LONGEST) - RECORD_BYTES + 1, RECORD_BYTES):
        node, tier, zero, payload_len, generation = _RECORD.unpack_from(value, at)
        if zero == 0 and tier == Tier.LOCAL:
            records.append(Record(node, payload_len, generation, tier))
    return tuple(records)


def without(numbers: Collection[int], value: bytes) -> bytes:
    """Return an entry's value without any record of these nodes; unchanged if there are none."""
    records = unpack_all(value)
    left = [r for r in records if r.node not in numbers]
    return _pack_all(left) if len(left) < len(records) else value


def with_room(number: int, value: bytes) -> bytes:
    """Return an entry's value with room for a record of node `number`: the newest ones of other nodes, each once."""
    newest = {r.node: r for r in unpack_all(value) if r.node != number}
    return _pack_all(list(newest.values())[1 - MAX_RECORDS :])


def _pack_all(records: Collection[Record]) -> bytes:
    return b"".join(map(pack, records))
