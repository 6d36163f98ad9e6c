"""HTTP server of /healthz, /readyz, /metrics and /status: read-only, without tenant names, bounded in threads and time.

To callers with a token it serves /prefixes, if the pool publishes events (kvpool_sidecar.events.prefix_api), and /hints
(kvpool_sidecar.serving.hint_api).
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Protocol

from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer, body_length

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HealthServer", "MetricsSource", "StatusSource"]

_MAX_THREADS = 16
_MAX_BODY = 512 << 10


class StatusSource(Protocol):
    """Content of /status and /readyz."""

    @property
    def ready(self) -> Callable[[], bool]: ...

    def __call__(self) -> dict[str, Any]: ...


class MetricsSource(Protocol):
    """Content of /metrics."""

    def text(self) -> bytes: ...


class PostApi(Protocol):
    """A POST endpoint with a bearer token of its own."""

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is valid."""

    def respond(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and JSON."""


class HealthServer(BoundedHttpServer):
    """Binds in the constructor (OSError if the address is in use); serves from `start` to `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        report: StatusSource,
        metrics: MetricsSource,
        prefixes: PostApi | None = None,
        hints: PostApi | None = None,
    ) -> None:
        self.report = report
        self.metrics = metrics
        self.posts = {"/prefixes": prefixes, "/hints": hints}
        super().__init__(host, port, _Handler, name="http", threads=_MAX_THREADS)


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: HealthServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self.respond(200, "text/plain", b"ok\n")
        elif path == "/readyz":
            ready = self.server.report.ready()
            self.respond(200 if ready else 503, "text/plain", b"ready\n" if ready else b"not ready\n")
        elif path == "/metrics":
            self.respond(200, "text/plain; version=0.0.4; charset=utf-8", self.server.metrics.text())
        elif path == "/status":
            self.respond(200, "application/json", json.dumps(self.server.report()).encode() + b"\n")
        else:
            self.respond(404, "text/plain", b"/healthz /readyz /metrics /status\n")

    def do_POST(self) -> None:
        self.close_connection = True
        length = body_length(self.headers.get("Content-Length", ""), _MAX_BODY)
        if not length:
            self.respond(413, "text/plain", b"a Content-Length of at most 512 KiB is required\n")
            return
        body = self.rfile.read(length)  # always: a reply to an unread body may get lost
        path = self.path.partition("?")[0]
        api = self.server.posts.get(path)
        if api is None:
            self.respond(404, "text/plain", b"no such path\n")
            return
        if not api.is_authorized(self.headers.get("Authorization", "")):
            token = b"hints" if path == "/hints" else b"events"
            text = b"the pool's token for %s is required: Authorization: Bearer ...\n" % token
            self.respond(401, "text/plain", text)
            return
        code, reply = api.respond(body)
        self.respond(code, "application/json", json.dumps(reply).encode() + b"\n")
