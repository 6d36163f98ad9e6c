"""What vLLM's requests say of their sessions, and how it reaches the pool. Needs no vLLM.

Three places, the first that names a session wins (docs/reference/session-hints.md): `kvpool` in kv_transfer_params, the
`kv_hints` envelope of an orchestrator, and `kv_hint` in kv_transfer_params. A hint is sent when its request has
finished, after the request's stores. Unknown keys are ignored; nothing invalid fails a request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.protocol.hint import MAX_HINT_BLOCKS, MAX_SECONDS, MAX_SESSION, HintKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.client import Client
    from kvpool.engines.common.jobs import TransferJobs

__all__ = ["RequestHints", "SessionHintSender", "parse_request"]

_log = logging.getLogger("vllm.kvpool")

_MAX_ACTIONS = 16
_AFTER = {"ended": HintKind.ENDED, "tool": HintKind.KEEP, "continue": HintKind.TURN}
_VERSIONS = ("1", "1.0")
_ACTIONS = {
    "kvpool.release": HintKind.ENDED,
    "kvpool.retain": HintKind.KEEP,
    "kvpool.prefetch": HintKind.RESUME,
}


class _Said(NamedTuple):
    kind: HintKind
    seconds: int = 0


class RequestHints(NamedTuple):
    """What one request says of one session. Nothing is said without a session."""

    session: str
    said: tuple[_Said, ...]

    @property
    def at_start(self) -> list[_Said]:
        """What is sent when the request arrives."""
        return [one for one in self.said if one.kind is HintKind.RESUME]

    @property
    def at_end(self) -> list[_Said]:
        """What is sent when the request has finished; the blocks are the session's in any case."""
        return [one for one in self.said if one.kind is not HintKind.RESUME] or [_Said(HintKind.TURN)]


def parse_request(req_context: Any) -> RequestHints | None:
    """Return what the request says; None if it names no session."""
    params = getattr(req_context, "kv_transfer_params", None)
    params = params if isinstance(params, Mapping) else {}
    return (
        _of_params(params.get("kvpool"))
        or _of_envelope(getattr(req_context, "kv_hints", None))
        or _of_envelope(params.get("kv_hint"))
    )


def _of_params(value: object) -> RequestHints | None:
    if not isinstance(value, Mapping) or (session := _session(value.get("session"))) is None:
        return None
    said = []
    resume_in, ttl = _seconds(value.get("resume_in")), _seconds(value.get("ttl"))
    kind = _AFTER.get(str(value.get("after")))
    if kind is HintKind.TURN and resume_in:
        kind = HintKind.KEEP
    if kind is not None:
        said.append(_Said(kind, resume_in if kind is HintKind.KEEP else 0))
    if ttl:
        said.append(_Said(HintKind.TTL, ttl))
    return RequestHints(session, tuple(said))


def _of_envelope(value: object) -> RequestHints | None:
    """Read the pool's actions of a `kv_hints` envelope, an object or its JSON; all others are left alone."""
    actions = _member(value, "actions")
    if not isinstance(actions, list | tuple):
        return None
    session, said = None, []
    for action in actions[:_MAX_ACTIONS]:
        kind, version = _action(action)
        payload = _member(action, "payload")
        if kind is None or version not in _VERSIONS or not isinstance(payload, Mapping):
            continue
        named = _session(payload.get("session"))
        if named is None or session not in (None, named):
            continue
        session = named
        said.append(_Said(kind, _seconds(payload.get("seconds"))))
    return None if session is None else RequestHints(session, tuple(said))


def _action(action: object) -> tuple[HintKind | None, str]:
    """Return kind and version; the version is in a member of its own or after an `@`."""
    name, _, version = str(_member(action, "action_type")).partition("@")
    return _ACTIONS.get(name), version or str(_member(action, "action_version"))


def _member(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _session(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_SESSION else None


def _seconds(value: object) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return max(0, min(int(min(value, MAX_SECONDS)), MAX_SECONDS)) if is_number and value > 0 else 0  # type: ignore[call-overload,operator]


class SessionHintSender:
    """Sends the hints of requests in the background. `client` returns the current client, or None. Never raises."""

    def __init__(
        self,
        client: Callable[[], Client | None],
        block_ids: Callable[[bytes, Sequence[bytes]], list[bytes]],
        jobs: TransferJobs,
    ) -> None:
        self._client = client
        self._block_ids = block_ids
        self._jobs = jobs

    def request_started(self, req_context: Any) -> None:
        """Parse the request's hints once, and send those that are for now."""
        try:
            client = self._client()
            if client is None or not client.wants_hints or (found := parse_request(req_context)) is None:
                return
            req_context.set_state(found)
            for one in found.at_start:
                self._send(client, found.session, one, ())
        except Exception:
            _log.debug("kvpool: the request's hints cannot be used", exc_info=True)

    def request_finished(self, req_context: Any) -> None:
        """Send the hints that are for the time after the request, with its blocks in order."""
        try:
            client = self._client()
            found = req_context.get_state(RequestHints)
            if client is None or found is None or not client.wants_hints:
                return
            positions: Mapping[bytes, int] = getattr(req_context, "_offload_key_positions", None) or {}
            offload_keys = sorted(positions, key=positions.__getitem__)[:MAX_HINT_BLOCKS]
            for one in found.at_end:
                self._send(client, found.session, one, offload_keys)
        except Exception:
            _log.debug("kvpool: the request's hints cannot be sent", exc_info=True)

    def _send(self, client: Client, session: str, said: _Said, offload_keys: Sequence[bytes]) -> None:
        def work() -> None:
            block_ids = self._block_ids(client.fingerprint, offload_keys)
            client.hint(said.kind, session, said.seconds, block_ids)

        self._jobs.after_stores(work)
