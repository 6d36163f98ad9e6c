"""Admin API for the operator: HTTPS on the pod's own address, restricted to the operator's certificate.

::

    POST   /v1/operations      {"id", "kind", "params"}     start an operation, or return the one with this id
    GET    /v1/operations/ID                                return its state
    DELETE /v1/operations/ID                                cancel it

The answer is {"id", "kind", "state", "message", "progress": {"done", "total", "unit"}, "counts": {...}} with the state
Running, Succeeded or Failed, or {"error"}: 400 invalid request, 404 unknown id, 409 the id belongs to another
operation, 413 too large, 429 two operations are running. TLS 1.3 with certificates of the pool's CA on both sides; a
caller with another name than the operator's is rejected before any HTTP is read.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from kvpool.errors import BusyError, ProtocolError, RefusedError
from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer, body_length

if TYPE_CHECKING:
    import socket

    from kvpool_sidecar.admin.operations import Operations
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.peers.certificate import NodeIdentity

__all__ = ["MAX_BODY", "AdminServer"]

MAX_BODY = 64 << 10
_MAX_THREADS = 8
_PATH = "/v1/operations"


class AdminServer(BoundedHttpServer):
    """Binds in the constructor (OSError if the address is in use); serves from `start` to `stop`."""

    def __init__(self, host: str, port: int, identity: NodeIdentity, operations: Operations, stats: Stats) -> None:
        self.identity = identity
        self.operations = operations
        self.stats = stats
        super().__init__(host, port, _Handler, name="admin", threads=_MAX_THREADS)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection with the current certificates; its own thread does the handshake."""
        sock, address = super().get_request()
        try:
            return self.identity.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), address
        except BaseException:
            sock.close()
            raise


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: AdminServer

    def setup(self) -> None:
        self.request.settimeout(self.timeout)
        try:
            self._authenticate()
        except BaseException:
            self.server.stats.add("refused", "admin-certificate")
            raise
        super().setup()

    def _authenticate(self) -> None:
        self.request.do_handshake()
        if not self.server.identity.is_operator(self.request.getpeercert()):
            raise RefusedError("the certificate is not the operator's")

    def do_GET(self) -> None:
        self._reply_state(self.server.operations.get(self._name()))

    def do_DELETE(self) -> None:
        self._reply_state(self.server.operations.cancel(self._name()))

    def do_POST(self) -> None:
        self.close_connection = True
        length = body_length(self.headers.get("Content-Length", ""), MAX_BODY)
        if not length:
            self._json(413, {"error": f"a Content-Length of at most {MAX_BODY} is required"})
            return
        body = self.rfile.read(length)
        if self.path != _PATH:
            self._json(404, {"error": "no such path"})
            return
        code, reply = self._start(body)
        self._json(code, reply)

    def _start(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return 400, {"error": "not JSON"}
        if not isinstance(request, dict):
            return 400, {"error": "expected an object"}
        try:
            return 200, self.server.operations.start(request.get("id"), request.get("kind"), request.get("params", {}))
        except ProtocolError as e:
            return 400, {"error": str(e)}
        except RefusedError as e:
            return 409, {"error": str(e)}
        except BusyError as e:
            return 429, {"error": str(e)}

    def _name(self) -> str:
        folder, _, name = self.path.rpartition("/")
        return name if folder == _PATH else ""

    def _reply_state(self, report: dict[str, Any] | None) -> None:
        if report is None:
            self._json(404, {"error": "unknown operation"})
        else:
            self._json(200, report)

    def _json(self, code: int, value: dict[str, Any]) -> None:
        self.respond(code, "application/json", json.dumps(value).encode() + b"\n")
