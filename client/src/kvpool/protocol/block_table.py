"""Memory layout of a block table: which blocks of one tenant and fingerprint are on this node's drives.

A memory file that the sidecar writes and its clients map read-only (Op.MAP). Integers are in the machine's byte order,
each written by one store.

======================= ============ ==================================================================================
offset                  size         content
======================= ============ ==================================================================================
0                       8            MAGIC
8                       8            number of buckets, a power of two
16                      8            valid until, nanoseconds of the system's monotonic clock; 0: the table is not valid
24                      8            number of tags removed so far
4096                    16 x 4096    ring of the tags removed last: number n is at n % REMOVALS
JOURNAL_END             256 each     buckets of 16 tags; EMPTY: a free place
======================= ============ ==================================================================================

A tag is the first 16 bytes of a block's id. No block can be opened by its tag: OPEN takes the whole id. A tag stands in
one of two buckets, given by its own bits (cuckoo filter: Fan et al., CoNEXT 2014). A tag that is read while it is being
written matches nothing, so readers need no lock. What is found is what a lookup's answer is: no promise.
Pure and thread-safe.
"""

from __future__ import annotations

import struct

__all__ = [
    "BUCKET_BYTES",
    "EMPTY",
    "HEADER",
    "JOURNAL_END",
    "JOURNAL_START",
    "MAGIC",
    "MAX_SLOTS",
    "PLACES",
    "REMOVALS",
    "REQUIRED_SEALS",
    "TAG_BYTES",
    "VALID_S",
    "VALID_UNTIL",
    "buckets_of",
    "file_bytes",
]

MAGIC = int.from_bytes(b"KVTABLE1", "little")
HEADER = struct.Struct("@QQQQ")  # magic, buckets, valid until, removed
VALID_UNTIL = 2  # number of the field in the header
TAG_BYTES = 16
PLACES = 16  # tags in a bucket
BUCKET_BYTES = TAG_BYTES * PLACES
REMOVALS = 4096
JOURNAL_START = 4096
JOURNAL_END = JOURNAL_START + REMOVALS * TAG_BYTES
MAX_SLOTS = 1 << 18  # 4 MiB
VALID_S = 1.0
"""How long a table is valid that its sidecar does not renew."""
EMPTY = bytes(TAG_BYTES)
REQUIRED_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010
"""F_SEAL_SEAL, SHRINK, GROW and FUTURE_WRITE (Linux 5.1): only the sidecar can change the file."""

_PAIR = struct.Struct("<II")


def buckets_of(tag: bytes, mask: int) -> tuple[int, int]:
    """Return the numbers of the tag's buckets. `mask`: the number of buckets less one."""
    first, second = _PAIR.unpack_from(tag)
    return first & mask, second & mask


def file_bytes(buckets: int) -> int:
    """Return the size of a table's file."""
    return JOURNAL_END + buckets * BUCKET_BYTES
