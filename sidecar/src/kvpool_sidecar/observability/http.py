"""/healthz, /readyz, /metrics and /status over HTTP: read-only, no names of tenants, bounded in threads and time.

Where the pool publishes events there is /prefixes, too, for who shows the token (kvpool_sidecar.events.prefix_api).
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Protocol

from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer, body_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.events.prefix_api import PrefixApi

__all__ = ["HealthServer"]

_MAX_THREADS = 16
_MAX_BODY = 512 << 10


class _Reporting(Protocol):
    """What /status and /readyz tell."""

    @property
    def ready(self) -> Callable[[], bool]: ...

    def __call__(self) -> dict[str, Any]: ...


class _Text(Protocol):
    """What /metrics tells."""

    def text(self) -> bytes: ...


class HealthServer(BoundedHttpServer):
    """Binds at once (OSError if the address is taken); serves from `start` to `stop`."""

    def __init__(
        self, host: str, port: int, report: _Reporting, metrics: _Text, prefixes: PrefixApi | None = None
    ) -> None:
        self.report = report
        self.metrics = metrics
        self.prefixes = prefixes
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
        prefixes = self.server.prefixes
        self.close_connection = True
        length = body_length(self.headers.get("Content-Length", ""), _MAX_BODY)
        if not length:
            self.respond(413, "text/plain", b"give a Content-Length of at most 512 KiB\n")
            return
        body = self.rfile.read(length)  # in any case: an answer to a body that nobody reads may get lost
        if prefixes is None or self.path.partition("?")[0] != "/prefixes":
            self.respond(404, "text/plain", b"there is nothing to ask\n")
            return
        if not prefixes.is_authorized(self.headers.get("Authorization", "")):
            self.respond(401, "text/plain", b"show the pool's token for events: Authorization: Bearer ...\n")
            return
        code, told = prefixes.respond(body)
        self.respond(code, "application/json", json.dumps(told).encode() + b"\n")
