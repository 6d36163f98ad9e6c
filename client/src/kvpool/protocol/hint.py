"""Session hints on the wire: what a session expects of its blocks. Pure; ProtocolError for anything out of bounds.

A hint changes the order of eviction and what is read ahead; never content, lifetime or who may read a block. HINT has
no reply; a sidecar that accepts it sends ServerHello.session_key. Body: HINT, then `count` block ids in the prompt's
order, 0 to MAX_HINT_BLOCKS. Without block ids the sidecar uses those that it knows of the session.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple

from kvpool.errors import ProtocolError

__all__ = [
    "MAX_HINT_BLOCKS",
    "MAX_SECONDS",
    "MAX_SESSION",
    "SESSION_KEY_BYTES",
    "SESSION_TAG_BYTES",
    "Hint",
    "HintKind",
    "session_digest",
    "session_key",
    "session_tag",
]

SESSION_KEY_BYTES = 32
SESSION_TAG_BYTES = 16
MAX_HINT_BLOCKS = 4096
MAX_SESSION = 256  # characters of a session's name
MAX_SECONDS = 86400
_BLOCK_ID_BYTES = 32
_HINT = struct.Struct("<16sBBHI")  # session tag, HintKind, reserved, flags, seconds


class HintKind(enum.IntEnum):
    """What a hint says of the session's blocks. `label` is the value in metrics."""

    ENDED = 1  # not needed any more
    KEEP = 2  # used again in about that many seconds
    TTL = 3  # an application asked to retain them; only a class of the eviction order
    RESUME = 4  # used on this node soon: read ahead
    FORGET = 5  # earlier hints no longer hold
    TURN = 6  # these are the session's blocks

    @property
    def label(self) -> str:
        """Lower case."""
        return self.name.lower()


class Hint(NamedTuple):
    """One HINT. `session` is a tag by `session_tag`."""

    kind: HintKind
    session: bytes
    seconds: int = 0
    block_ids: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Body of the packet; its count is the number of block ids."""
        if len(self.session) != SESSION_TAG_BYTES or len(self.block_ids) > MAX_HINT_BLOCKS:
            raise ProtocolError(f"hint with a session of {len(self.session)} bytes and {len(self.block_ids)} blocks")
        seconds = max(0, min(self.seconds, MAX_SECONDS))
        return _HINT.pack(self.session, self.kind, 0, 0, seconds) + b"".join(self.block_ids)

    @classmethod
    def unpack(cls, body: memoryview, count: int) -> Hint | None:
        """ProtocolError if it is malformed; None for a kind of a newer client."""
        if not 0 <= count <= MAX_HINT_BLOCKS or len(body) != _HINT.size + count * _BLOCK_ID_BYTES:
            raise ProtocolError(f"hint of {len(body)} bytes with {count} block ids")
        session, kind, _, _, seconds = _HINT.unpack_from(body)
        if kind not in HintKind.__members__.values():
            return None
        rest = bytes(body[_HINT.size :])
        block_ids = (rest[at : at + _BLOCK_ID_BYTES] for at in range(0, len(rest), _BLOCK_ID_BYTES))
        return cls(HintKind(kind), session, min(seconds, MAX_SECONDS), tuple(block_ids))


def session_key(pool_secret: bytes, tenant_tag: bytes) -> bytes:
    """Derive the 32-byte key of a tenant's session tags."""
    return hmac.digest(pool_secret, b"kvpool-session-v1" + len(tenant_tag).to_bytes(8, "big") + tenant_tag, "sha256")


def session_digest(session: str) -> bytes:
    """Compute SHA-256 of a session's name, 32 bytes, as used to release one (`printf %s NAME | sha256sum`)."""
    return hashlib.sha256(session.encode("utf-8", "surrogatepass")).digest()


def session_tag(key: bytes, digest: bytes) -> bytes:
    """Derive the tag by which hints name a session; it reveals the name only to holders of the tenant's session key."""
    return hashlib.blake2b(digest, digest_size=SESSION_TAG_BYTES, key=key, person=b"kvpool-session-1").digest()
