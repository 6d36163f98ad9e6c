"""POST /hints of the sidecar's HTTP port: session hints of routers, gateways, and engines without hints of their own.

Reference: docs/reference/session-hints.md. The caller names a tenant, and a session or a prompt's block hashes. The
token is the pool's token for hints: a router that may query prefixes need not be allowed to release sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool.errors import ProtocolError
from kvpool.protocol import keys
from kvpool.protocol.hint import MAX_HINT_BLOCKS, MAX_SECONDS, MAX_SESSION, Hint, HintKind, session_digest, session_tag
from kvpool_sidecar.replication.session_hints import HintOutcome
from kvpool_sidecar.system.json_requests import MAX_BODY, MAX_PART, decode_request, is_bearer, read_hex, read_tenant
from kvpool_sidecar.tenancy.identity import Tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.replication.session_hints import SessionHints

__all__ = ["MAX_BODY", "HintApi", "parse_hint"]

ACTIONS: Final[Mapping[str, HintKind]] = {
    "release": HintKind.ENDED,
    "retain": HintKind.KEEP,
    "prefetch": HintKind.RESUME,
    "forget": HintKind.FORGET,
}
_FAMILY = "hint_requests"
_MAX_HASH = 64
_FIRST_GROUP = bytes(4)  # the part of vLLM's first cache group
_STATUS = {HintOutcome.OFF: 404, HintOutcome.LIMITED: 429}


class ParsedHint:
    """A request: the tenant's namespace, the digest of the session's name, and the hint without its session tag."""

    def __init__(self, namespace: str, digest: bytes, hint: Hint) -> None:
        self.namespace = namespace
        self.digest = digest
        self.hint = hint


def parse_hint(body: bytes) -> ParsedHint:
    """Decode a request. ProtocolError if it is invalid."""
    value = decode_request(body)
    tenant, action, session = read_tenant(value.get("tenant")), value.get("action"), value.get("session")
    if not isinstance(action, str) or action not in ACTIONS:
        raise ProtocolError(f"action is one of {', '.join(ACTIONS)}")
    seconds = value.get("seconds", 0)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not 0 <= seconds <= MAX_SECONDS:
        raise ProtocolError(f"seconds is a number from 0 to {MAX_SECONDS}")
    if session is not None and (not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION):
        raise ProtocolError(f"session is a text of 1 to {MAX_SESSION} characters")
    block_ids = _block_ids(value)
    if session is None and not block_ids:
        raise ProtocolError("session or hashes is required")
    digest = session_digest(session) if session is not None else block_ids[-1]
    return ParsedHint(tenant, digest, Hint(ACTIONS[action], b"", seconds, block_ids))


def _block_ids(value: dict[str, Any]) -> tuple[bytes, ...]:
    hashes = value.get("hashes", [])
    if not isinstance(hashes, list) or len(hashes) > MAX_HINT_BLOCKS:
        raise ProtocolError(f"hashes is a list of at most {MAX_HINT_BLOCKS} block hashes in hex")
    if not hashes:
        return ()
    fingerprint = read_hex(value.get("fingerprint"), "fingerprint", keys.FINGERPRINT_BYTES, keys.FINGERPRINT_BYTES)
    part = read_hex(value.get("part", _FIRST_GROUP.hex()), "part", 0, MAX_PART)
    return tuple(keys.block_id(fingerprint, read_hex(one, "each of hashes", 1, _MAX_HASH), part) for one in hashes)


class HintApi:
    """Thread-safe. `token()` is the pool's current one; `tenant_id` maps a namespace to the id of its tenant."""

    def __init__(
        self,
        hints: SessionHints,
        stats: Stats,
        *,
        secret: bytes,
        token: Callable[[], str],
        tenant_id: Callable[[str], str],
    ) -> None:
        self._hints = hints
        self._stats = stats
        self._secret = secret
        self._token = token
        self._tenant_id = tenant_id

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is valid, in constant time."""
        ok = is_bearer(authorization, self._token())
        if not ok:
            self._stats.add(_FAMILY, "refused")
        return ok

    def respond(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and JSON: `{"blocks": of this node that took the hint, "outcome": HintOutcome}`."""
        try:
            parsed = parse_hint(body)
        except ProtocolError as e:
            self._stats.add(_FAMILY, "malformed")
            return 400, {"error": str(e)}
        tenant = Tenant(self._secret, self._tenant_id(parsed.namespace))
        hint = parsed.hint._replace(session=session_tag(tenant.session_key, parsed.digest))
        applied = self._hints.apply(tenant, hint)
        self._stats.add(_FAMILY, "answered")
        return _STATUS.get(applied.outcome, 202), {"blocks": applied.blocks, "outcome": str(applied.outcome)}
