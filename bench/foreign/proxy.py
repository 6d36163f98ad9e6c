"""A proxy on the loopback interface that sends requests to several servers in turn, like a router without affinity."""

from __future__ import annotations

import http.client
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RoundRobin"]

_MAX_BODY = 64 << 20
_CHUNK = 64 << 10
_TIMEOUT_S = 600.0
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


class RoundRobin:
    """Listens until `close`; `url` is its base. Each POST goes to the next server, each GET to the first."""

    def __init__(self, servers: Sequence[str]) -> None:
        """`servers`: base URLs without a path, such as http://127.0.0.1:8000."""
        turn = itertools.cycle([urlsplit(server).netloc for server in servers])
        first = urlsplit(servers[0]).netloc
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._forward(first, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if not 0 <= length <= _MAX_BODY:
                    self.send_error(413)
                    return
                body = self.rfile.read(length)
                with lock:
                    server = next(turn)
                self._forward(server, body)

            def _forward(self, server: str, body: bytes | None) -> None:
                connection = http.client.HTTPConnection(server, timeout=_TIMEOUT_S)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in _HOP:
                            self.send_header(name, value)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    # read1 gives what has come, so that a streamed answer is streamed
                    while chunk := answer.read1(_CHUNK):
                        self.wfile.write(chunk)
                        self.wfile.flush()
                except (OSError, http.client.HTTPException):
                    self.close_connection = True
                finally:
                    connection.close()
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
