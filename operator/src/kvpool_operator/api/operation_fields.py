"""Field types and validation rules of KVCacheOperation, with their error messages."""

from __future__ import annotations

from typing import Final

from kvpool_operator.api.rules import Rule, bytes_between, duration_between, immutable, matching

__all__ = [
    "ACTIONS",
    "MAX_SALTS",
    "ONE_ACTION",
    "SOME_BLOCKS",
    "SPEC_STAYS",
    "Age",
    "Bandwidth",
    "Digest",
    "Limit",
    "NodeName",
    "Salt",
    "SessionDigest",
    "TenantName",
]

ACTIONS: Final = ("purge", "warm", "verify", "preflight", "drain", "release")
"""Spec fields of which exactly one is set."""

ONE_ACTION: Final = Rule(
    f"[{', '.join(f'has(self.{name})' for name in ACTIONS)}].exists_one(given, given)",
    f"set exactly one action: {', '.join(ACTIONS)}",
)
SOME_BLOCKS: Final = Rule(
    "self.all != (has(self.tenant) || has(self.fingerprint) || has(self.salts) || has(self.olderThan))",
    "select the blocks: tenant, fingerprint, salts, olderThan (a block must match all), or all: true alone",
)
SPEC_STAYS: Final = immutable("an operation", "delete it, which cancels it, and create another one")

TenantName = matching(
    r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?|kvt/[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
    r"|kvt:[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?:[0-9a-f-]{36})$",
    300,
    "give the name of a tenant: a namespace, kvt/NAME for a KVCacheTenant, or kvt:NAME:UID for one that is gone",
)
Digest = matching(
    r"^[0-9a-f]{8,64}$", 64, "give a fingerprint's first 8 to 64 hexadecimal digits, as the pool's status shows them"
)
MAX_SALTS: Final = 64
Salt = matching(
    r"^sha256:[0-9a-f]{64}$",
    71,
    'give the digest of a salt, "sha256:" and 64 hexadecimal digits: printf %s "$SALT" | sha256sum',
)
SessionDigest = matching(
    r"^sha256:[0-9a-f]{64}$",
    71,
    'give the digest of a session, "sha256:" and 64 hexadecimal digits: printf %s "$SESSION" | sha256sum',
)
NodeName = matching(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", 253, "give the name of a node")
Age = duration_between("1s", "87600h", "give an age from 1s to 87600h, such as 72h")
Bandwidth = bytes_between("1Mi", "100Gi", "give bandwidth in bytes per second from 1Mi to 100Gi, such as 100Mi")
Limit = duration_between("1s", "168h", "give timeout from 1s to 168h, such as 1h")
