"""Selects the blocks of a purge by their headers. Pure.

A header has the tenant's tag, the fingerprint and the creation time. In pools with `salt_tags` it also has a tag of the
request's salt, if the engine provides it. A block without a salt tag matches no filter for salts.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import keys
from kvpool.protocol.block import NO_SALT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool.protocol.block import BlockHeader

__all__ = ["PurgeFilter", "SaltSet"]

_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_MAX_TENANT = 512
_SALT = re.compile(r"[0-9a-f]{64}")
_MAX_SALTS = 64
_MAX_TENANTS = 1024  # whose tags are cached


class SaltSet:
    """Salts given by their digests (kvpool.protocol.keys.salt_digest), whose tags differ by tenant. Thread-safe."""

    def __init__(self, secret: bytes, digests: Sequence[bytes]) -> None:
        self._secret = secret
        self._digests = tuple(digests)
        self._tags = functools.lru_cache(_MAX_TENANTS)(self._tags_of)

    def contains(self, header: BlockHeader) -> bool:
        """Return whether the block's request had one of these salts."""
        return header.salt_tag != NO_SALT and header.salt_tag in self._tags(header.tenant_tag)

    def _tags_of(self, tenant_tag: bytes) -> frozenset[bytes]:
        salt_key = keys.salt_key(self._secret, tenant_tag)
        return frozenset(keys.salt_tag(salt_key, digest) for digest in self._digests)


class PurgeFilter(NamedTuple):
    """Conjunction of the given criteria; without any, it matches every block."""

    tag: bytes | None = None
    fingerprint: str = ""  # its first hexadecimal digits
    made_before_ms: int | None = None
    salts: SaltSet | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any], secret: bytes) -> PurgeFilter:
        """Parse `tenant`, `fingerprint` (8 to 64 hex digits), `made_before_ms` (Unix time), `salts`, or `all`: true.

        `salts` are 1 to 64 digests of 64 hexadecimal digits, any of which matches. ProtocolError for anything else: an
        unknown criterion must not delete blocks that were not meant.
        """
        unknown = params.keys() - {"tenant", "fingerprint", "made_before_ms", "salts", "all", "tier"}
        if unknown:
            raise ProtocolError(f"purge: this sidecar does not support {', '.join(sorted(map(str, unknown)))[:100]}")
        given = [params.get(name) for name in ("tenant", "fingerprint", "made_before_ms", "salts")]
        tenant, digest, before, salts = given
        everything = params.get("all", False)
        if everything is not all(one is None for one in given):
            raise ProtocolError("purge: set tenant, fingerprint, made_before_ms or salts, or only all: true")
        if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= _MAX_TENANT):
            raise ProtocolError("purge: tenant must be a name")
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ProtocolError("purge: fingerprint must have 8 to 64 hexadecimal digits")
        if before is not None and not (isinstance(before, int) and 0 < before < 1 << 63):
            raise ProtocolError("purge: made_before_ms must be a Unix time in milliseconds")
        salt_set = SaltSet(secret, _digests(salts)) if salts is not None else None
        return cls(keys.tenant_tag(secret, tenant) if tenant else None, digest or "", before, salt_set)

    @property
    def is_everything(self) -> bool:
        """Whether every block matches, so that no header must be read."""
        return self == PurgeFilter()

    def matches(self, header: BlockHeader | None) -> bool:
        """Return whether the block is selected. A block without a readable header is useless and always selected."""
        if header is None:
            return True
        return (
            self.tag in (None, header.tenant_tag)
            and header.fingerprint.hex().startswith(self.fingerprint)
            and (self.made_before_ms is None or header.created_ms < self.made_before_ms)
            and (self.salts is None or self.salts.contains(header))
        )


def _digests(salts: object) -> list[bytes]:
    if not isinstance(salts, list) or not 0 < len(salts) <= _MAX_SALTS:
        raise ProtocolError(f"purge: salts must be a list of 1 to {_MAX_SALTS} digests")
    if not all(isinstance(text, str) and _SALT.fullmatch(text) for text in salts):
        raise ProtocolError("purge: a salt must be its SHA-256 digest, 64 hexadecimal digits")
    return [bytes.fromhex(text) for text in salts]
