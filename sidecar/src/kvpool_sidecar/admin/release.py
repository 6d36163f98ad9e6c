"""Operation `release`: a session has ended; its blocks on this node are evicted first.

Parameters: `tenant`, its id, and `session`, the SHA-256 digest of the session's name in hex. Counts: releasedBlocks and
knownSessions (1 if this node knew the session). No block is removed: one that is used again stays.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError
from kvpool.protocol.hint import session_key, session_tag
from kvpool.protocol.keys import tenant_tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.replication.session_hints import SessionHints

__all__ = ["Release"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TENANT = 512


class Release:
    """Operation `release`."""

    def __init__(self, secret: bytes, hints: SessionHints) -> None:
        self._secret = secret
        self._hints = hints

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        tenant, digest = params.get("tenant"), params.get("session")
        if params.keys() != {"tenant", "session"} or not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_TENANT:
            raise ProtocolError("release: set tenant, a name, and session only")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ProtocolError("release: session must be the SHA-256 digest of its name, 64 hexadecimal digits")
        tag = tenant_tag(self._secret, tenant)
        released, is_known = self._hints.release(
            tag, session_tag(session_key(self._secret, tag), bytes.fromhex(digest))
        )
        context.count("releasedBlocks", released)
        context.count("knownSessions", int(is_known))
