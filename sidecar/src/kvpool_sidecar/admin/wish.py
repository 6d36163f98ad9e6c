"""Which blocks a purge is about, by what a block says of itself. Pure.

A block's header has the tag of its tenant, its fingerprint and when it was made. It has no salt: a request's
`cache_salt` is inside the engine's hash, so nobody can tell by a block which salt it was made with.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool import keys
from kvpool.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool.block import BlockHeader

__all__ = ["Wish"]

_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_MAX_TENANT = 512


class Wish(NamedTuple):
    """All that is given must fit; nothing given: every block."""

    tag: bytes | None = None
    fingerprint: str = ""  # its first hexadecimal digits
    made_before_ms: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any], secret: bytes) -> Wish:
        """`tenant`, `fingerprint` (8 to 64 hexadecimal digits), `made_before_ms` (Unix), or `all`: true.

        ProtocolError for anything else: a wish that is not understood must not remove what it did not mean.
        """
        unknown = params.keys() - {"tenant", "fingerprint", "made_before_ms", "all", "tier"}
        if unknown:
            raise ProtocolError(f"purge: this sidecar does not know {', '.join(sorted(map(str, unknown)))[:100]}")
        tenant, digest, before = (params.get(name) for name in ("tenant", "fingerprint", "made_before_ms"))
        everything = params.get("all", False)
        if everything is not (tenant is None and digest is None and before is None):
            raise ProtocolError("purge: give tenant, fingerprint or made_before_ms, or all: true alone")
        if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= _MAX_TENANT):
            raise ProtocolError("purge: tenant is a name")
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ProtocolError("purge: fingerprint has 8 to 64 hexadecimal digits")
        if before is not None and not (isinstance(before, int) and 0 < before < 1 << 63):
            raise ProtocolError("purge: made_before_ms is a time")
        return cls(keys.tenant_tag(secret, tenant) if tenant else None, digest or "", before)

    @property
    def is_everything(self) -> bool:
        """No block needs to be looked at."""
        return self == Wish()

    def fits(self, header: BlockHeader | None) -> bool:
        """Is the block to go? One that says nothing that can be read is of no use to anybody, and goes."""
        if header is None:
            return True
        return (
            self.tag in (None, header.tenant_tag)
            and header.fingerprint.hex().startswith(self.fingerprint)
            and (self.made_before_ms is None or header.created_ms < self.made_before_ms)
        )
