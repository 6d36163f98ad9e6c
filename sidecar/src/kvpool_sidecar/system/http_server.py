"""An HTTP server whose threads and times are bounded: a slow client makes room for a new one."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["TIMEOUT_S", "BoundedHandler", "BoundedHttpServer", "body_length"]

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # for a whole request, however its bytes are spread over time
_ROOM_S = 0.5


class BoundedHttpServer(ThreadingHTTPServer):
    """Binds immediately (OSError if the address is taken); serves from `start` to `stop`, in at most `threads`
    threads."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, host: str, port: int, handler: type[BoundedHandler], *, name: str, threads: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._name = name
        self._started = False
        self._slots = threading.Semaphore(threads)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        super().__init__((host, port), handler)

    def start(self) -> None:
        self._started = True
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name=self._name, daemon=True).start()

    def stop(self) -> None:
        if self._started:
            self.shutdown()
        self.server_close()

    @property
    def port(self) -> int:
        """As it is bound."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        # HTTPServer would look up the host's name here, which may take seconds
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a killed sidecar must come back immediately
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        # a client that holds a place for long makes room for a new one: a probe must get through
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
            late = [sock for sock, since in self._open.items() if since < time.monotonic() - TIMEOUT_S]
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
        log.debug("%s: a request of %s ended in an error: %s", self._name, client_address, sys.exc_info()[1])


class BoundedHandler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server_version = "kvpool-sidecar"
    sys_version = ""
    timeout = TIMEOUT_S

    def respond(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug("http: %s", format % args)


def body_length(header: str, most: int) -> int:
    """What a Content-Length says; 0 for none, for no number and for more than `most`."""
    if not header.isascii() or not header.isdigit() or len(header) > 9 or int(header) > most:
        return 0
    return int(header)


def _shut(sock: socket.socket) -> None:
    """The thread that reads from it sees the end and closes it."""
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of the socket: TLS belongs to the thread
