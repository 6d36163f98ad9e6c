"""Serves the page and its data on loopback, to browsers that know the token.

The token is a part of the path: a cookie would be sent to every other server on 127.0.0.1. Requests whose Host is not
this server are refused, so a name that resolves to 127.0.0.1 (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = "127.0.0.1"
_MAX_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_MAX_PATH = 256
_TEXT = "text/plain; charset=utf-8"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class DashboardServer(ThreadingHTTPServer):
    """HTTP on loopback. `state` returns the page's data as JSON values; threads of requests call it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, state: Callable[[], dict[str, Any]]) -> None:
        page = resources.files("kvpool_cli.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        self._token = secrets.token_urlsafe(32)
        self._ticket = secrets.token_urlsafe(32)
        self._ticket_lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.page = page.encode()
        self.policy = content_security_policy(page)
        self.state = state
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as e:
            raise UsageError(f"port {port} of {ADDRESS} cannot be opened: {e.strerror}") from e

    @property
    def origin(self) -> str:
        """Return scheme, address and port."""
        return f"http://{ADDRESS}:{self.server_port}"

    @property
    def url(self) -> str:
        """Return the address of the page, with the token."""
        return f"{self.origin}/{self._token}/"

    @property
    def ticket_url(self) -> str:
        """Return an address that leads to the page once: command lines of browsers are visible to other users."""
        return f"{self.origin}/{self._ticket}"

    def resource(self, path: str) -> str:
        """Return what a path names: `page`, `state`, `ticket`, or an empty text."""
        given = path.encode()
        for name, known in (("page", f"/{self._token}/"), ("state", f"/{self._token}/state")):
            if hmac.compare_digest(given, known.encode()):
                return name
        with self._ticket_lock:
            if self._ticket and hmac.compare_digest(given, f"/{self._ticket}".encode()):
                self._ticket = ""
                return "ticket"
        return ""

    def server_bind(self) -> None:
        """Bind without the reverse lookup of a name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a browser that leaves is no error of this program."""


def content_security_policy(page: str) -> str:
    """Return a policy that admits the inline script and style of the page, its own server, and nothing else."""
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digests[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    return (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    timeout = _TIMEOUT_S
    server_version = "kvpool"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_for_this_server():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"unknown host\n")
            return
        found = self.server.resource(self.path) if len(self.path) <= _MAX_PATH else ""
        if found == "page":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif found == "state":
            self._send(HTTPStatus.OK, json.dumps(self.server.state()).encode(), "application/json")
        elif found == "ticket":
            self._send(HTTPStatus.SEE_OTHER, b"", location=self.server.url)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not found\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that have no handler, such as POST."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(status, f"{status.phrase}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as http.server calls it
        """Log nothing: paths have the token."""

    def _is_for_this_server(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        port = self.server.server_port
        # a link in a terminal that runs in a browser is a navigation from another site
        is_fetch = self.headers.get("Sec-Fetch-Mode", "navigate") != "navigate"
        is_foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        return hosts in ([f"{ADDRESS}:{port}"], [f"localhost:{port}"]) and not (is_fetch and is_foreign)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", location: str = ""
    ) -> None:
        self.close_connection = True
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        headers |= {"Location": location} if location else {}
        headers |= {"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
