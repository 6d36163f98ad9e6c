"""Wire protocol between a client and the sidecar on its node. docs/contribute/design/protocol.md explains the reasons.

One SOCK_SEQPACKET unix socket; each message is one packet of at most MAX_PACKET bytes: `HEADER | body`. A reply
carries the request's id and `op | REPLY`. Open files travel as SCM_RIGHTS in the same packet. kvpool.protocol.peer_wire
is the protocol between sidecars; it shares this header's operation numbers.

====== ======= ============================================== ==================================================
op     name    request body                                   reply body
====== ======= ============================================== ==================================================
1      HELLO   JSON (ClientHello)                             JSON (ServerHello)
2      LOOKUP  u32 deadline_ms, count x block_id[32]          count x u8 tier (0 = miss)
3      OPEN    u32 deadline_ms, count x block_id[32]          count x OPEN_REPLY, token[16] per STREAM_DIAL; files
4      BEGIN   count x (block_id[32], u64 payload_len)        count x BEGIN_REPLY; one descriptor for each WRITE
5      COMMIT  count x u32 token                              count x u8 CommitStatus
6      REPORT  JSON (counters, corrupt block ids)             empty
7      DONE    -                                              none: no reply is sent
8      HINT    kvpool.protocol.hint                           none: no reply is sent
9      MAP     -                                              empty; descriptor of a table (block_table), or none
10     USED    USED_HEAD, count x block_id[32]                none: no reply is sent
11     LOADED  USED_HEAD, count x block_id[32]                none: no reply is sent
127    ERROR   -                                              u16 code, UTF-8 text
====== ======= ============================================== ==================================================

Admission control: a node admits a bounded number of bytes at a time. A rejected OPEN is answered by MISS entries that
carry MISS_BUSY. The reply to an OPEN may set WANTS_DONE: the client then sends DONE after it has read the blocks,
unless it sends another request first, so that the next request in the queue can start. To a client of a sidecar with
`block_tables`, MAP gives the table of its tenant and fingerprint, and USED reports one lookup that the client answered
from it. To a sidecar with `load_reports`, LOADED reports blocks that the client read again by descriptors of earlier
OPENs, while the table had them. LOOKUP answers up to the first miss (the rest is 0) unless EXHAUSTIVE is set. To a
client whose HELLO has `lookup_reports` the entry of the first miss is MISS_CAUSE plus a MissCause; such a client counts
its lookups itself and reports them. OPEN keeps the order of the block ids. For a block stored with COMMIT and VERIFY
the client leaves the header's payload checksum zero and the sidecar fills it in. REPORT is `{"corrupt": [block id hex,
at most 64], "hits": {tier: n}, "bytes": {tier: n}, "misses": {reason: n}, "tokens": {tier: n}, "lookup": {figure: n},
"lookup_misses": {reason: blocks}, "lookup_depth": {range: n}, "time": {figure: n}, "seconds": {tier or "store":
Histogram.packed}}`, each since the last report (kvpool.stats); `{"problem": text}` (fingerprint: zeros) says why an
engine runs without the pool.
Everything here is pure packing and unpacking; ProtocolError for anything out of bounds. Thread-safe.
"""

from __future__ import annotations

import enum
import json
import struct
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import json_fields
from kvpool.protocol.fingerprint_fields import MAX_FIELDS
from kvpool.protocol.hint import SESSION_KEY_BYTES
from kvpool.protocol.keys import SALT_KEY_BYTES
from kvpool.protocol.miss_cause import MissCause

__all__ = [
    "BEGIN_REPLY",
    "BEGIN_REQUEST",
    "BLOCK_ID_BYTES",
    "HEADER",
    "MAGIC",
    "MAX_BATCH",
    "MAX_BLOCK_TOKENS",
    "MAX_JSON",
    "MAX_LOOKUP",
    "MAX_PACKET",
    "MISS_BUSY",
    "MISS_CAUSE",
    "OPEN_REPLY",
    "PROTOCOL_VERSION",
    "REPLY",
    "USED_HEAD",
    "BeginStatus",
    "ClientHello",
    "CommitStatus",
    "ErrorCode",
    "Flag",
    "Head",
    "MissCause",
    "Op",
    "OpenStatus",
    "ServerHello",
    "Tier",
    "pack",
    "pack_deadline",
    "pack_json",
    "split_block_ids",
    "unpack",
    "unpack_json",
]

PROTOCOL_VERSION = 1
MAGIC = b"KVP1"
HEADER = struct.Struct("<4sBBHI")  # magic, op, flags, count, request id
BLOCK_ID_BYTES = 32
MAX_LOOKUP = 4096  # block ids in one LOOKUP: 1 M tokens in blocks of 256
MAX_BATCH = 64  # descriptors in one packet (the kernel's own limit is 253)
MAX_JSON = 8192
MAX_BLOCK_TOKENS = 1 << 20
MAX_PACKET = HEADER.size + 24 + MAX_LOOKUP * BLOCK_ID_BYTES  # the largest is a HINT
REPLY = 0x80


class Op(enum.IntEnum):
    HELLO = 1
    LOOKUP = 2
    OPEN = 3
    BEGIN = 4
    COMMIT = 5
    REPORT = 6
    DONE = 7
    HINT = 8
    MAP = 9
    USED = 10
    LOADED = 11
    # between sidecars (kvpool.protocol.peer_wire)
    RDMA = 16  # parameters for reading the peer's registered memory
    STAGE = 17  # copy the block into registered memory
    RELEASE = 18  # the staged block has been read; no reply
    HOTTEST = 32  # the most requested blocks (kvpool_sidecar.peers.hottest)
    HEADROOM = 33  # free capacity of the peer (kvpool_sidecar.peers.migration)
    RECEIVE = 34  # fetch a copy of this block from any node that has it
    SESSION = 35  # a hint about a session whose blocks the peer has (kvpool_sidecar.peers.hint)
    ERROR = 127


class Flag(enum.IntFlag):
    NONE = 0
    EXHAUSTIVE = 1  # LOOKUP: answer for every block id, not only up to the first miss
    VERIFY = 2  # OPEN: the sidecar checks payloads first; COMMIT: the sidecar computes the payload checksum
    LOCAL_ONLY = 4  # OPEN: no STREAM entries, for a client that cannot verify streams
    WANTS_DONE = 8  # reply to OPEN: send DONE after reading
    EVICT = 16  # RECEIVE: colder blocks may be evicted for it


class Tier(enum.IntEnum):
    MISS = 0
    LOCAL = 1
    PEER = 2
    SHARED = 3


MISS_BUSY = MissCause.BUSY


class OpenStatus(enum.IntEnum):
    MISS = 0
    FILE = 1  # a read-only descriptor of the block file is attached
    STREAM = 2  # the block file comes next on connection `conn`
    STREAM_NEW_CONN = 3  # as STREAM, and the connection's descriptor is attached; from older sidecars only
    STREAM_DIAL = 4  # as STREAM, on a connection that the client must dial


class BeginStatus(enum.IntEnum):
    REFUSED = 0  # full, over quota or too large: do not store
    WRITE = 1  # a descriptor of an unnamed file, already of full length, is attached
    HAVE = 2  # the block is already stored


class CommitStatus(enum.IntEnum):
    REJECTED = 0
    STORED = 1
    HAVE = 2


class ErrorCode(enum.IntEnum):
    BAD_REQUEST = 1
    VERSION = 2
    OVERLOADED = 3
    INTERNAL = 4


OPEN_REPLY = struct.Struct("<BBHIQ32s")  # OpenStatus, Tier, conn, why it is a MISS, payload_len, key
MISS_CAUSE = 0x80  # LOOKUP reply: the entry of the first miss may be this plus a MissCause
USED_HEAD = struct.Struct("<I")  # blocks of earlier lookups or loads that no USED or LOADED listed
BEGIN_REQUEST = struct.Struct("<32sQ")  # block id, payload_len
BEGIN_REPLY = struct.Struct("<B3xI32s")  # BeginStatus, token, key


class Head(NamedTuple):
    op: int
    flags: int
    items: int  # the packet's count
    request: int


def pack(op: int, body: bytes = b"", *, count: int = 0, request: int = 0, flags: int = 0) -> bytes:
    """Build one packet. ProtocolError if it is larger than MAX_PACKET."""
    packet = HEADER.pack(MAGIC, op, flags, count, request) + body
    if len(packet) > MAX_PACKET:
        raise ProtocolError(f"packet of {len(packet)} bytes is over the limit of {MAX_PACKET}")
    return packet


def unpack(packet: bytes | memoryview) -> tuple[Head, memoryview]:
    """Split one packet into head and body."""
    if not HEADER.size <= len(packet) <= MAX_PACKET:
        raise ProtocolError(f"packet of {len(packet)} bytes")
    magic, op, flags, count, request = HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise ProtocolError("not a KVPool packet")
    return Head(op, flags, count, request), memoryview(packet)[HEADER.size :]


def pack_deadline(deadline: float) -> bytes:
    """Pack the u32 of LOOKUP and OPEN: four fifths of the time until `deadline` (time.monotonic()), at least 1 ms.

    The rest is reserved for the reply's way back, so that partial results of the sidecar still count.
    """
    return struct.pack("<I", max(1, min(int((deadline - time.monotonic()) * 800), 0xFFFFFFFF)))


def split_block_ids(body: memoryview, count: int, limit: int) -> list[bytes]:
    """Split exactly `count * 32` bytes into `count` block ids."""
    if not 0 < count <= limit or len(body) != count * BLOCK_ID_BYTES:
        raise ProtocolError(f"{count} block ids in {len(body)} bytes")
    return [bytes(body[i * BLOCK_ID_BYTES : (i + 1) * BLOCK_ID_BYTES]) for i in range(count)]


def pack_json(value: dict[str, Any]) -> bytes:
    """Encode compact JSON of at most MAX_JSON bytes."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_JSON:
        raise ProtocolError(f"JSON of {len(data)} bytes is over the limit of {MAX_JSON}")
    return data


def unpack_json(body: bytes | memoryview) -> dict[str, Any]:
    """Decode a JSON object of at most MAX_JSON bytes."""
    if len(body) > MAX_JSON:
        raise ProtocolError(f"JSON of {len(body)} bytes is over the limit of {MAX_JSON}")
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"not JSON: {type(e).__name__}") from None
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object")
    return value


@dataclass(frozen=True)
class ClientHello:
    """First message of a client. `fingerprint` is 32 bytes; `engine` and `model` are display labels (status, metrics).

    `fields` are short digests of the fingerprint's inputs (kvpool.protocol.fingerprint_fields); older ones send none.
    `reads_granted`: the client accepts blocks of the tenants in ServerHello.readable_tags; older clients get none.
    `tokens_per_block`: 0 if unknown. `lookup_reports`: the client reports its lookups, and accepts causes of misses.
    `dials_streams`: it dials streams of peers' blocks. `is_tested`: the plug-in was tested with the engine's version; a
    client that does not say so counts as tested.
    """

    fingerprint: bytes
    engine: str = ""
    model: str = ""
    version: int = PROTOCOL_VERSION
    fields: dict[str, str] = field(default_factory=dict)
    reads_granted: bool = False
    tokens_per_block: int = 0
    lookup_reports: bool = False
    dials_streams: bool = False
    is_tested: bool = True

    def pack(self) -> bytes:
        """JSON body of HELLO; texts are cut to 64 and 256 characters."""
        return pack_json(
            {
                "version": self.version,
                "fingerprint": self.fingerprint.hex(),
                "engine": self.engine[:64],
                "model": self.model[:256],
                "fields": dict(list(self.fields.items())[:MAX_FIELDS]),
                **({"reads_granted": True} if self.reads_granted else {}),
                **({"tokens_per_block": self.tokens_per_block} if self.tokens_per_block else {}),
                **({"lookup_reports": True} if self.lookup_reports else {}),
                **({"dials_streams": True} if self.dials_streams else {}),
                **({} if self.is_tested else {"tested": False}),
            }
        )

    @classmethod
    def unpack(cls, body: bytes | memoryview) -> ClientHello:
        """ProtocolError if a field is missing, of a wrong type or too long."""
        value = unpack_json(body)
        return cls(
            fingerprint=json_fields.hex_field(value, "fingerprint", 32),
            engine=json_fields.text_field(value, "engine", 64),
            model=json_fields.text_field(value, "model", 256),
            version=json_fields.int_field(value, "version", 0xFFFF),
            fields=json_fields.digests(value.get("fields", {})),
            reads_granted=value.get("reads_granted") is True,
            tokens_per_block=json_fields.int_field(
                {"tokens_per_block": 0, **value}, "tokens_per_block", MAX_BLOCK_TOKENS
            ),
            lookup_reports=value.get("lookup_reports") is True,
            dials_streams=value.get("dials_streams") is True,
            is_tested=value.get("tested") is not False,
        )


@dataclass(frozen=True)
class ServerHello:
    """Reply of the sidecar. `tenant_tag` (16 bytes) goes into the headers of the blocks this client writes.

    `deadlines` are the fields of kvpool.config.Deadlines that the pool sets for its clients; the client chooses the
    missing ones. `events`: the pool publishes KV events and requests engine block identities (block.EngineBlock);
    `router_blocks`: with the engine's blocks in them; `prompt_tokens`: and with their tokens.
    `readable_tags`: tags of the other tenants whose blocks may be returned (docs/how-to/tenants.md), at most
    kvpool.config.MAX_READS_FROM. `salt_key` (32 bytes, or empty): the pool requests salt tags
    (kvpool.protocol.keys.salt_tag) in the blocks' headers. `session_key` (32 bytes, or empty): it accepts HINT, with
    session tags by this key. `block_tables`: it accepts MAP and USED. `load_reports`: it accepts LOADED.
    """

    tenant_tag: bytes
    max_block_bytes: int
    pool: str = ""
    node: str = ""
    deadlines: dict[str, int] = field(default_factory=dict)
    version: int = PROTOCOL_VERSION
    events: bool = False
    router_blocks: bool = False
    prompt_tokens: bool = False
    readable_tags: tuple[bytes, ...] = ()
    salt_key: bytes = b""
    session_key: bytes = b""
    block_tables: bool = False
    load_reports: bool = False

    def pack(self) -> bytes:
        """JSON body of the reply to HELLO."""
        return pack_json(
            {
                "version": self.version,
                "tenant_tag": self.tenant_tag.hex(),
                "max_block_bytes": self.max_block_bytes,
                "pool": self.pool,
                "node": self.node,
                "deadlines": self.deadlines,
                **({"events": True} if self.events else {}),
                **({"router_blocks": True} if self.router_blocks else {}),
                **({"prompt_tokens": True} if self.prompt_tokens else {}),
                **({"block_tables": True} if self.block_tables else {}),
                **({"load_reports": True} if self.load_reports else {}),
                **({"readable_tags": [tag.hex() for tag in self.readable_tags]} if self.readable_tags else {}),
                **{name: key.hex() for name in ("salt_key", "session_key") if (key := getattr(self, name))},
            }
        )

    @classmethod
    def unpack(cls, body: bytes | memoryview) -> ServerHello:
        """ProtocolError if a field is missing, of a wrong type or too long."""
        value = unpack_json(body)
        deadlines = value.get("deadlines", {})
        if not isinstance(deadlines, dict):
            raise ProtocolError("deadlines is not an object")
        return cls(
            tenant_tag=json_fields.hex_field(value, "tenant_tag", 16),
            max_block_bytes=json_fields.int_field(value, "max_block_bytes", 1 << 40),
            pool=json_fields.text_field(value, "pool", 512),
            node=json_fields.text_field(value, "node", 256),
            deadlines={k: json_fields.int_field(deadlines, k, 1 << 31) for k in deadlines if isinstance(k, str)},
            version=json_fields.int_field(value, "version", 0xFFFF),
            events=value.get("events") is True,
            router_blocks=value.get("router_blocks") is True,
            prompt_tokens=value.get("prompt_tokens") is True,
            readable_tags=json_fields.tags(value.get("readable_tags", [])),
            salt_key=json_fields.hex_field(value, "salt_key", SALT_KEY_BYTES) if "salt_key" in value else b"",
            session_key=json_fields.hex_field(value, "session_key", SESSION_KEY_BYTES)
            if "session_key" in value
            else b"",
            block_tables=value.get("block_tables") is True,
            load_reports=value.get("load_reports") is True,
        )
