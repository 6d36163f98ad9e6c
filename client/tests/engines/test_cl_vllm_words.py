"""Session words of clients, read by an ASGI middleware: what it adds, and all that it leaves alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engines.vllm_words import MAX_BODY, SessionWords, hints_of, plugin


def serve(
    body: bytes, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions", pieces: int = 1
) -> tuple[bytes, dict[bytes, bytes], list[dict[str, Any]]]:
    """Send a request through the middleware; return body and headers as the application reads them, and the reply."""
    size = -(-len(body) // pieces) or 1
    parts = [body[n : n + size] for n in range(0, len(body), size)] or [b""]
    waiting = [{"type": "http.request", "body": p, "more_body": n < len(parts) - 1} for n, p in enumerate(parts)]
    read: dict[str, Any] = {}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        read.update(body=data, headers=dict(scope["headers"]), after=await receive())
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    lines = [(b"content-length", str(len(body)).encode())]
    lines += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": lines}
    asyncio.run(SessionWords(app)(scope, receive, send))
    assert read["after"] == {"type": "http.disconnect"}
    return read["body"], read["headers"], sent


def hints(body: dict[str, Any], headers: dict[str, str] | None = None, **kw: Any) -> Any:
    data, lines, _ = serve(json.dumps(body).encode(), headers, **kw)
    assert int(lines[b"content-length"]) == len(data)
    return (json.loads(data).get("kv_transfer_params") or {}).get("kvpool")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_words_of_each_family_are_read_at_each_endpoint(path):
    dynamo = {"X-Dynamo-Session-ID": "run-42"}
    assert hints({"prompt": "x"}, dynamo, path=path) == {"session": "run-42"}
    assert hints({}, {**dynamo, "X-Dynamo-Session-Final": "true"}, path=path) == {"session": "run-42", "after": "ended"}
    assert hints({}, {"X-Claude-Code-Session-Id": "cc-7"}, path=path) == {"session": "cc-7"}
    openai = {"prompt_cache_key": "pk", "prompt_cache_retention": "24h"}
    assert hints(openai, path=path) == {"session": "pk", "ttl": 86_400}
    assert hints({"session_id": "s-3"}, path=path) == {"session": "s-3"}


def test_the_nearest_word_wins():
    headers = {"X-Dynamo-Session-ID": "dynamo", "session-id": "agent"}
    body = {"session_id": "member", "prompt_cache_key": "key"}
    assert hints(body, headers)["session"] == "dynamo"
    assert hints(body, {"session-id": "agent"})["session"] == "agent"
    assert hints(body)["session"] == "member"
    own = {**body, "kv_transfer_params": {"kvpool": {"session": "own"}}}
    assert hints(own, headers) == {"session": "own"}


def test_final_is_dynamos_and_ends_only_dynamos_session():
    assert hints({"session_id": "s"}, {"X-Dynamo-Session-Final": "true"}) == {"session": "s"}


def test_the_longest_cache_control_is_the_retention():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
    ]
    assert hints({"session_id": "s", "messages": messages}) == {"session": "s", "ttl": 3600}
    assert hints({"session_id": "s", "messages": messages[:1]}) == {"session": "s", "ttl": 300}
    assert hints({"session_id": "s", "system": [{"cache_control": {"type": "other", "ttl": "1h"}}]}) == {"session": "s"}


def test_other_parameters_of_the_request_stay():
    body = {"prompt_cache_key": "k", "messages": [{"content": "\u00e4\u4f60"}], "kv_transfer_params": {"do": True}}
    data, _, _ = serve(json.dumps(body).encode())
    assert json.loads(data) == {**body, "kv_transfer_params": {"do": True, "kvpool": {"session": "k"}}}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{ "model" : "m" }', {}),
        (b"not json", {"session-id": "s"}),
        (b'["session_id"]', {"session-id": "s"}),
        (b'{"session_id": ""}', {}),
        (b'{"session_id": {"a": 1}}', {"session-id": "s" * 257}),
        (b'{"session_id": "s", "kv_transfer_params": [1]}', {}),
        (b'{"session_id": "s", "kv_transfer_params": {"kvpool": null}}', {}),
        (b"[" * 100_000 + b'"session_id"', {}),
        (b'{"session_id": "s", "x": "' + b"a" * MAX_BODY + b'"}', {}),
    ],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_request_without_usable_words_passes_unchanged(body, headers, pieces):
    assert serve(body, headers, pieces=pieces)[0] == body


def test_other_paths_and_every_response_pass_unchanged():
    body = b'{"session_id": "s"}'
    assert serve(body, path="/tokenize")[0] == body
    _, _, reply = serve(body)
    assert [one["body"] for one in reply] == [b"data: 1\n\n", b"data: 2\n\n"]


def test_a_body_in_pieces_is_read_whole():
    assert hints({"session_id": "s", "prompt": "x" * 999}, pieces=9) == {"session": "s"}


@given(
    st.dictionaries(
        st.sampled_from(["session_id", "prompt_cache_key", "prompt_cache_retention", "messages", "tools", "system"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["cache_control", "content", "ttl", "type"]), inner, max_size=3)
            ),
            max_leaves=20,
        ),
    )
)
def test_no_body_raises(body):
    assert isinstance(hints_of(body, {}), dict)


def test_the_endpoint_plugin_adds_the_middleware_and_nothing_else():
    added: list[Any] = []

    class App:
        def add_middleware(self, kind: Any) -> None:
            added.append(kind)

    one = plugin()
    one.attach_router(App())
    one.attach_router(object())  # an application without middleware: served without the words
    asyncio.run(one.init_state(None, None, None))
    assert (added, one.name, one.required_tasks) == ([SessionWords], "kvpool_words", ("generate",))
