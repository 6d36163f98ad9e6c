"""ASGI middleware for vLLM's API server: session words that clients already send become the pool's session hints.

Enabled in one of two ways (docs/reference/session-hints.md): `--middleware kvpool.engines.vllm_words.SessionWords`, or
the name `kvpool_words` in the variable VLLM_PLUGINS, for which vLLM's endpoint plug-ins call `plugin`. It adds `kvpool`
to the request's `kv_transfer_params` and changes nothing else: a request that has the key, that says nothing of a
session, that is too large or no JSON, passes unchanged, and so does every response.

Words, the first that is there: the headers X-Dynamo-Session-ID (with X-Dynamo-Session-Final), those of agents, the
members `session_id` and `prompt_cache_key`. `prompt_cache_retention` and `cache_control` give the retention. Needs no
vLLM.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from kvpool.protocol.hint import MAX_SESSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

__all__ = ["PLUGIN_NAME", "SessionWords", "hints_of", "plugin"]

_log = logging.getLogger("vllm.kvpool")

PLUGIN_NAME: Final = "kvpool_words"
MAX_BODY = 8 << 20  # bytes that are parsed at most
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_DYNAMO, _DYNAMO_FINAL = b"x-dynamo-session-id", b"x-dynamo-session-final"
_AGENTS = (b"x-claude-code-session-id", b"session-id", b"thread-id", b"x-session-id", b"x-session-affinity")
_MEMBERS = ("session_id", "prompt_cache_key")
_MEMBER_WORDS = tuple(f'"{name}"'.encode() for name in _MEMBERS)
_RETENTION_S = {"in_memory": 300, "in-memory": 300, "24h": 86_400}
_TTL_S = {"5m": 300, "1h": 3600}
_MAX_VALUES = 4096  # that are searched for cache_control


class SessionWords:
    """See the module. Wraps an ASGI application."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope.get("method") != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        read, body = await _read(receive)
        if body is not None:
            changed = _with_hints(body, dict(scope["headers"]))
            if changed is not None:
                scope = {**scope, "headers": _with_length(scope["headers"], len(changed))}
                read = [{"type": "http.request", "body": changed, "more_body": False}]
        await self._app(scope, _replay(read, receive), send)


async def _read(receive: Receive) -> tuple[list[Message], bytes | None]:
    """Read the body; None if it ends early or is too large, then the messages read so far are passed on."""
    read: list[Message] = []
    size = 0
    while True:
        message = await receive()
        read.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > MAX_BODY:
            return read, None
        if not message.get("more_body", False):
            return read, b"".join(one.get("body", b"") for one in read)


def _replay(read: list[Message], receive: Receive) -> Receive:
    rest = iter(read)

    async def replayed() -> Message:
        message = next(rest, None)
        return message if message is not None else await receive()

    return replayed


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]


def _with_hints(body: bytes, headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the body with the pool's hints; None if it stays as it is."""
    if not any(name in headers for name in (_DYNAMO, *_AGENTS)) and not any(word in body for word in _MEMBER_WORDS):
        return None
    try:
        value = json.loads(body)
        if not isinstance(value, dict):
            return None
        params = value.get("kv_transfer_params")
        if params is not None and not (isinstance(params, dict) and "kvpool" not in params):
            return None
        found = hints_of(value, headers)
        if not found:
            return None
        value["kv_transfer_params"] = {**(params or {}), "kvpool": found}
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None
    except Exception:
        _log.debug("kvpool: the session words of a request cannot be used", exc_info=True)
        return None


def hints_of(body: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the hints that a request's headers (lower-case names) and JSON body amount to; empty without a session."""
    session = _from_headers(headers, (_DYNAMO,))
    ended = bool(session) and headers.get(_DYNAMO_FINAL, b"").strip().lower() == b"true"
    session = session or _from_headers(headers, _AGENTS) or _from_body(body)
    if not session:
        return {}
    found: dict[str, Any] = {"session": session}
    if ended:
        found["after"] = "ended"
    if ttl := _retention(body):
        found["ttl"] = ttl
    return found


def _from_headers(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> str:
    for name in names:
        text = headers.get(name, b"").decode("latin-1").strip()
        if 0 < len(text) <= MAX_SESSION:
            return text
    return ""


def _from_body(body: Mapping[str, Any]) -> str:
    for name in _MEMBERS:
        text = body.get(name)
        if isinstance(text, str) and 0 < len(text) <= MAX_SESSION:
            return text
    return ""


def _retention(body: Mapping[str, Any]) -> int:
    """Return the longest retention that the body asks for, in seconds; 0: none."""
    asked = [_RETENTION_S.get(str(body.get("prompt_cache_retention")), 0)]
    asked += [_TTL_S.get(str(one.get("ttl", "5m")), 0) for one in _cache_controls(body)]
    return max(asked)


def _cache_controls(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Find `cache_control` in the body, its tools, system prompt and messages; a bounded search."""
    waiting: list[Any] = [body.get(name) for name in ("tools", "system", "messages")] + [
        {"cache_control": body.get("cache_control")}
    ]
    for _ in range(_MAX_VALUES):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value[:_MAX_VALUES]
        elif isinstance(value, dict):
            control = value.get("cache_control")
            if isinstance(control, dict) and control.get("type") == "ephemeral":
                yield control
            waiting.append(value.get("content"))


class _EndpointPlugin:
    """vLLM's EndpointPlugin (vllm/plugins/endpoint_plugins/interface.py), which adds the middleware and no route."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the middleware, inside of those that vLLM adds afterwards (authentication among them)."""
        try:
            app.add_middleware(SessionWords)
        except Exception:
            _log.exception("kvpool: the session words cannot be read; requests are served without them")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Do nothing: there is no state."""


def plugin() -> _EndpointPlugin:
    """Return the endpoint plug-in. Entry point group `vllm.endpoint_plugins`."""
    return _EndpointPlugin()
