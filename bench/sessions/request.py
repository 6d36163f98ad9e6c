"""One question to an OpenAI-compatible server, streamed, with the time to its first token.

Two ways of asking: `/completions` with the prompt's tokens, where an answer's tokens are compared and asked back
exactly (the project's own engines), and `/chat/completions` with messages (any server).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_LINE", "Reply", "Server", "read_events"]

MAX_LINE = 4 << 20  # of a stream; the prompt's tokens come back in the first line
_MAX_LINES = 100_000


@dataclass(frozen=True)
class Reply:
    """Seconds from sending the request. `answer`: tokens of a completion, text of a chat."""

    ttft: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int | None
    answer_tokens: int
    answer: tuple[int, ...] | str


class Server:
    """A base URL such as http://127.0.0.1:8000/v1. One connection a question; any number of threads."""

    def __init__(self, base_url: str, model: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"no http or https URL: {base_url}")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def complete(self, prompt: list[int], max_tokens: int) -> Reply:
        """OSError, HTTPException or ValueError if there is no whole answer."""
        return self._ask("/completions", {"prompt": prompt, "return_token_ids": True, "ignore_eos": True}, max_tokens)

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Reply:
        """OSError, HTTPException or ValueError if there is no whole answer."""
        return self._ask("/chat/completions", {"messages": messages}, max_tokens)

    def models(self) -> list[str]:
        """What the server calls its models."""
        with self._request("GET", "/models") as answer:
            return [str(model["id"]) for model in json.loads(answer.read(MAX_LINE))["data"]]

    def post(self, path: str) -> bytes:
        """A request without a body to a path of the server itself, not below its base URL."""
        with self._request("POST", path, root=True) as answer:
            return bytes(answer.read(MAX_LINE))

    def healthy(self, path: str) -> bool:
        """Does the server answer this path with 200?"""
        with self._request("GET", path, root=True):
            return True

    def metrics(self) -> str:
        """What it says to Prometheus; empty where it has no such page."""
        try:
            with self._request("GET", "/metrics", root=True) as answer:
                return bytes(answer.read(16 * MAX_LINE)).decode(errors="replace")
        except (OSError, http.client.HTTPException, ValueError):
            return ""

    def _ask(self, path: str, what: dict[str, Any], max_tokens: int) -> Reply:
        body = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **what,
        }
        began = time.perf_counter()
        with self._request("POST", path, json.dumps(body).encode()) as answer:
            return read_events(answer, began)

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: bytes | None = None, *, root: bool = False) -> Any:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        try:
            base = "" if root else self._parts.path.rstrip("/")
            connection.request(method, base + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{method} {path}: {answer.status} {answer.read(500).decode(errors='replace')}")
            yield answer
        finally:
            connection.close()


def read_events(stream: Any, began: float, clock: Any = time.perf_counter) -> Reply:
    """Read server-sent events up to `[DONE]`. ValueError if an answer is cut off, too long, or has no token."""
    ttft: float | None = None
    usage: dict[str, Any] = {}
    tokens: list[int] = []
    pieces: list[str] = []
    chunks = 0
    for _ in range(_MAX_LINES):
        line = stream.readline(MAX_LINE)
        if not line or (len(line) == MAX_LINE and not line.endswith(b"\n")):
            raise ValueError("the stream ended before [DONE]" if not line else "a line of the stream is too long")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the server says: {str(event['error'])[:300]}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            text, ids = _content(choice)
            if text or ids:
                ttft = clock() - began if ttft is None else ttft
                chunks += 1
                tokens += ids
                pieces.append(text)
    else:
        raise ValueError("the stream has too many lines")
    if ttft is None:
        raise ValueError("the answer has no token")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Reply(
        ttft,
        clock() - began,
        int(usage.get("prompt_tokens") or 0),
        None if cached is None else int(cached),
        int(usage.get("completion_tokens") or len(tokens) or chunks),
        tuple(tokens) if tokens else "".join(pieces),
    )


def _content(choice: dict[str, Any]) -> tuple[str, list[int]]:
    """Text and tokens of one piece; models that think aloud before they answer count from their first thought."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    return str(text), [int(token) for token in choice.get("token_ids") or []]
