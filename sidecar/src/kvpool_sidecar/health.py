"""/healthz, /readyz, /metrics and /status over HTTP: read-only, no names of tenants, bounded in threads and time.

Where the pool publishes events there is /prefixes, too, for who shows the token (kvpool_sidecar.server.prefixes).
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool_sidecar.metrics import Metrics
    from kvpool_sidecar.server.prefixes import Prefixes
    from kvpool_sidecar.status import StatusReport

__all__ = ["HealthServer"]

log = logging.getLogger(__name__)

_MAX_THREADS = 16
_TIMEOUT_S = 5.0  # for a whole request, however its bytes are spread over time
_ROOM_S = 0.5
_MAX_BODY = 512 << 10


class HealthServer(ThreadingHTTPServer):
    """Binds at once (OSError if the address is taken); serves from `start` to `stop`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(
        self, host: str, port: int, report: StatusReport, metrics: Metrics, prefixes: Prefixes | None = None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.report = report
        self.metrics = metrics
        self.prefixes = prefixes
        self._started = False
        self._slots = threading.Semaphore(_MAX_THREADS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        super().__init__((host, port), _Handler)

    def start(self) -> None:
        self._started = True
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True).start()

    def stop(self) -> None:
        if self._started:
            self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer would look up the host's name here, which may take seconds
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a killed sidecar must come back at once
        socket.socket.bind(self.socket, self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        # whoever holds a place for long makes room for who comes: a probe must get through
        if not self._slots.acquire(blocking=False) and not (
            self._end_oldest() and self._slots.acquire(timeout=_ROOM_S)
        ):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._over(request)

    def service_actions(self) -> None:
        """Called ten times a second: end what takes too long."""
        with self._lock:
            late = [sock for sock, since in self._open.items() if since < time.monotonic() - _TIMEOUT_S]
        for sock in late:
            _shut(sock)

    def _end_oldest(self) -> bool:
        with self._lock:
            oldest = next(iter(self._open), None)
        if oldest is not None:
            _shut(oldest)
        return oldest is not None

    def _over(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http: a request of %s ended in an error: %s", client_address, sys.exc_info()[1])


def _shut(sock: socket.socket) -> None:
    """The thread that reads from it sees the end and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    server_version = "kvpool-sidecar"
    sys_version = ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "text/plain", b"ok\n")
        elif path == "/readyz":
            ready = self.server.report.ready()
            self._answer(200 if ready else 503, "text/plain", b"ready\n" if ready else b"not ready\n")
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.server.metrics.text())
        elif path == "/status":
            self._answer(200, "application/json", json.dumps(self.server.report()).encode() + b"\n")
        else:
            self._answer(404, "text/plain", b"/healthz /readyz /metrics /status\n")

    def do_POST(self) -> None:
        prefixes = self.server.prefixes
        self.close_connection = True
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or len(length) > 9 or not 0 < int(length) <= _MAX_BODY:
            self._answer(413, "text/plain", b"give a Content-Length of at most 512 KiB\n")
            return
        body = self.rfile.read(int(length))  # in any case: an answer to a body that nobody reads may get lost
        if prefixes is None or self.path.partition("?")[0] != "/prefixes":
            self._answer(404, "text/plain", b"there is nothing to ask\n")
            return
        if not prefixes.is_allowed(self.headers.get("Authorization", "")):
            self._answer(401, "text/plain", b"show the pool's token for events: Authorization: Bearer ...\n")
            return
        code, told = prefixes.answer(body)
        self._answer(code, "application/json", json.dumps(told).encode() + b"\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug("http: %s", format % args)
