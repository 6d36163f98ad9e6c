"""Identities of a block and keys derived from the pool secret.

::

    block id = SHA-256("kvpool-ident-v1" | lp(fingerprint) | lp(engine block hash) | lp(part))     by the client
    key   = HMAC-SHA-256(pool secret, "kvpool-key-v1" | lp(tenant) | block id)                     by the sidecar
    tag   = HMAC-SHA-256(pool secret, "kvpool-tag-v1" | lp(tenant))[:16]                        in each block's header
    salt key = HMAC-SHA-256(pool secret, "kvpool-salt-v1" | lp(tag))                         for the tenant's clients
    salt tag = BLAKE2b-128(SHA-256(salt), key: salt key, person: "kvpool-salt-v1")           in headers, if requested

`lp(x)` is the length of `x` as 4 bytes little-endian, then `x`: no two inputs run together. The client knows neither
the secret nor the key of another tenant; the sidecar takes the tenant from the socket a request came in by.
HMAC: RFC 2104. BLAKE2b: RFC 7693. Golden vectors: client/tests/golden/keys.json. All functions are pure and
thread-safe.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FINGERPRINT_BYTES",
    "KEY_BYTES",
    "SALT_KEY_BYTES",
    "TAG_BYTES",
    "block_id",
    "block_key",
    "events_curve_keys",
    "events_token",
    "fingerprint",
    "hints_token",
    "index_login",
    "peer_secret",
    "salt_digest",
    "salt_key",
    "salt_tag",
    "shared_key_id",
    "tenant_tag",
]

KEY_BYTES = 32
FINGERPRINT_BYTES = 32
TAG_BYTES = 16
SALT_KEY_BYTES = 32


def _lp(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def fingerprint(inputs: Mapping[str, object]) -> bytes:
    """Compute 32 bytes over the canonical JSON of everything that changes the meaning of a block's bytes.

    `inputs` holds JSON values only (model, weights digest, dtype, layout, parallel sizes, engine version ...).
    Raises TypeError for a value that JSON cannot hold and ValueError for NaN.
    """
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(b"kvpool-fingerprint-v1" + text.encode("ascii")).digest()


def block_id(fingerprint: bytes, block_hash: bytes, part: bytes = b"") -> bytes:
    """Compute the 32-byte id of a block within a tenant. `part`: cache group or rank if the engine splits blocks."""
    return hashlib.sha256(b"kvpool-ident-v1" + _lp(fingerprint) + _lp(block_hash) + _lp(part)).digest()


def block_key(pool_secret: bytes, tenant: str, block_id: bytes) -> bytes:
    """Derive the block's 32-byte key in the pool; its lower-case hex is the file name."""
    return hmac.digest(pool_secret, b"kvpool-key-v1" + _lp(tenant.encode()) + block_id, "sha256")


def tenant_tag(pool_secret: bytes, tenant: str) -> bytes:
    """Derive 16 bytes that identify a tenant in block headers and accounting without naming it."""
    return hmac.digest(pool_secret, b"kvpool-tag-v1" + _lp(tenant.encode()), "sha256")[:TAG_BYTES]


def shared_key_id(key: bytes) -> bytes:
    """Derive the 16 bytes that identify a key of the encrypted shared tier and disclose nothing of it."""
    return hashlib.sha256(b"kvpool-key-id-v1" + key).digest()[:16]


def salt_key(pool_secret: bytes, tenant_tag: bytes) -> bytes:
    """Derive the 32-byte key of a tenant's salt tags; without it, salts cannot be guessed from a drive's contents."""
    return hmac.digest(pool_secret, b"kvpool-salt-v1" + _lp(tenant_tag), "sha256")


def salt_digest(salt: str) -> bytes:
    """Compute SHA-256 of a request's salt, 32 bytes, as used to purge by salt (`printf %s SALT | sha256sum`)."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()


def salt_tag(salt_key: bytes, salt_digest: bytes) -> bytes:
    """Derive 16 bytes for a block's header that reveal the request's salt only to holders of the tenant's salt key."""
    return hashlib.blake2b(salt_digest, digest_size=16, key=salt_key, person=b"kvpool-salt-v1").digest()


def peer_secret(pool_secret: bytes, pool_uid: str) -> bytes:
    """Derive the secret by which sidecars of one pool authenticate to each other."""
    return hmac.digest(pool_secret, b"kvpool-peer-v1" + _lp(pool_uid.encode()), "sha256")


def events_token(pool_secret: bytes, pool_uid: str, revision: int) -> str:
    """Derive the bearer token of routers that query prefixes (docs/reference/kv-events.md), 64 hexadecimal digits.

    It reveals nothing about the secret. Another `revision` (0 to 2**32 - 1) gives another token.
    """
    message = b"kvpool-events-v1" + _lp(pool_uid.encode()) + revision.to_bytes(4, "little")
    return hmac.digest(pool_secret, message, "sha256").hex()


def hints_token(pool_secret: bytes, pool_uid: str, revision: int) -> str:
    """Derive the bearer token of POST /hints (docs/reference/session-hints.md), as `events_token`."""
    message = b"kvpool-hints-v1" + _lp(pool_uid.encode()) + revision.to_bytes(4, "little")
    return hmac.digest(pool_secret, message, "sha256").hex()


def events_curve_keys(pool_secret: bytes, pool_uid: str, revision: int) -> tuple[bytes, bytes]:
    """Derive the Curve25519 secret keys of the event stream, 32 bytes each: that of the sidecars, that of routers.

    They reveal nothing about the secret. Another `revision` (0 to 2**32 - 1) gives other keys.
    """
    message = b"kvpool-events-curve-v1" + _lp(pool_uid.encode()) + revision.to_bytes(4, "little")
    server, router = (hmac.digest(pool_secret, message + role, "sha256") for role in (b"server", b"router"))
    return server, router


def index_login(pool_secret: bytes, password: str) -> str:
    """Derive an identifier of an index password, 16 hexadecimal digits that reveal nothing about it; empty for none."""
    if not password:
        return ""
    return hmac.digest(pool_secret, b"kvpool-index-login-v1" + _lp(password.encode()), "sha256").hex()[:16]
