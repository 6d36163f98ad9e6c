"""HTTP server of a sidecar that does not serve blocks at present: /healthz, /readyz, /status, empty /metrics."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.observability.status import Phase

__all__ = ["StandbyServer"]

_MAX_THREADS = 4


class StandbyServer(BoundedHttpServer):
    """Binds in the constructor (OSError if the address is in use); serves from `start` to `stop`."""

    def __init__(self, host: str, port: int, node: str, phase: Phase, ready: Callable[[], bool]) -> None:
        self.report = {"node": node, "phase": phase.value, "ready": False}
        self.is_ready = ready
        super().__init__(host, port, _Handler, name="http", threads=_MAX_THREADS)


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: StandbyServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self.respond(200, "text/plain", b"ok\n")
        elif path == "/readyz":
            ready = self.server.is_ready()
            self.respond(200 if ready else 503, "text/plain", f"{self.server.report['phase']}\n".encode())
        elif path == "/status":
            self.respond(200, "application/json", json.dumps(self.server.report).encode() + b"\n")
        elif path == "/metrics":
            self.respond(200, "text/plain; version=0.0.4; charset=utf-8", b"# another sidecar of this node serves\n")
        else:
            self.respond(404, "text/plain", b"/healthz /readyz /metrics /status\n")
