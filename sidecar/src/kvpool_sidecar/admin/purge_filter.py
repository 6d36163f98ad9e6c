"""Which blocks a purge is about, by what a block says of itself. Pure.

A block's header has the tag of its tenant, its fingerprint and when it was made; in pools with `salt_tags`, and where
the engine tells it, also a tag of the salt that its request had. Blocks without that tag fit no wish for a salt.
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
_TENANTS = 1024  # whose tags are remembered


class SaltSet:
    """Some salts, by their digests (kvpool.protocol.keys.salt_digest): they have other tags in each tenant.
    Thread-safe."""

    def __init__(self, secret: bytes, digests: Sequence[bytes]) -> None:
        self._secret = secret
        self._digests = tuple(digests)
        self._tags = functools.lru_cache(_TENANTS)(self._tags_of)

    def has(self, header: BlockHeader) -> bool:
        """Was the block's request salted with one of them?"""
        return header.salt_tag != NO_SALT and header.salt_tag in self._tags(header.tenant_tag)

    def _tags_of(self, tenant_tag: bytes) -> frozenset[bytes]:
        salt_key = keys.salt_key(self._secret, tenant_tag)
        return frozenset(keys.salt_tag(salt_key, digest) for digest in self._digests)


class PurgeFilter(NamedTuple):
    """All that is given must fit; nothing given: every block."""

    tag: bytes | None = None
    fingerprint: str = ""  # its first hexadecimal digits
    made_before_ms: int | None = None
    salts: SaltSet | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any], secret: bytes) -> PurgeFilter:
        """`tenant`, `fingerprint` (8 to 64 hexadecimal digits), `made_before_ms` (Unix), `salts` (1 to 64 digests of 64
        hexadecimal digits, any of which may fit), or `all`: true.

        ProtocolError for anything else: a wish that is not understood must not remove what it did not mean.
        """
        unknown = params.keys() - {"tenant", "fingerprint", "made_before_ms", "salts", "all", "tier"}
        if unknown:
            raise ProtocolError(f"purge: this sidecar does not know {', '.join(sorted(map(str, unknown)))[:100]}")
        given = [params.get(name) for name in ("tenant", "fingerprint", "made_before_ms", "salts")]
        tenant, digest, before, salts = given
        everything = params.get("all", False)
        if everything is not all(one is None for one in given):
            raise ProtocolError("purge: give tenant, fingerprint, made_before_ms or salts, or all: true alone")
        if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= _MAX_TENANT):
            raise ProtocolError("purge: tenant is a name")
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ProtocolError("purge: fingerprint has 8 to 64 hexadecimal digits")
        if before is not None and not (isinstance(before, int) and 0 < before < 1 << 63):
            raise ProtocolError("purge: made_before_ms is a time")
        wanted = SaltSet(secret, _digests(salts)) if salts is not None else None
        return cls(keys.tenant_tag(secret, tenant) if tenant else None, digest or "", before, wanted)

    @property
    def is_everything(self) -> bool:
        """No block needs to be looked at."""
        return self == PurgeFilter()

    def fits(self, header: BlockHeader | None) -> bool:
        """Is the block to go? One that says nothing that can be read is of no use to anybody, and goes."""
        if header is None:
            return True
        return (
            self.tag in (None, header.tenant_tag)
            and header.fingerprint.hex().startswith(self.fingerprint)
            and (self.made_before_ms is None or header.created_ms < self.made_before_ms)
            and (self.salts is None or self.salts.has(header))
        )


def _digests(salts: object) -> list[bytes]:
    if not isinstance(salts, list) or not 0 < len(salts) <= _MAX_SALTS:
        raise ProtocolError(f"purge: salts are a list of 1 to {_MAX_SALTS} digests")
    if not all(isinstance(text, str) and _SALT.fullmatch(text) for text in salts):
        raise ProtocolError("purge: a salt is given by its SHA-256, 64 hexadecimal digits")
    return [bytes.fromhex(text) for text in salts]
