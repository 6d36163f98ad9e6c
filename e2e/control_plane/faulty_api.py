"""A proxy between an operator and the API server that answers with errors, loses watches, or goes quiet, when told to.

Plain HTTP on loopback for the operator; the operator's own credentials are passed on.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Fault:
    """What happens to requests that fit, the next `times` of them."""

    fits: Callable[[str, str], bool]
    """method, path with its query -> whether it is hit"""
    status: int
    """0: the connection ends without an answer. For a watch: the event that ends it."""
    times: int = 1_000_000
    hits: int = 0


def writes(method: str, path: str) -> bool:
    """Whether it changes something of a pool; the Lease is left alone."""
    return method != "GET" and "/leases" not in path and "/events" not in path


def watches(plural: str) -> Callable[[str, str], bool]:
    """Whether it watches objects of that kind."""
    return lambda method, path: method == "GET" and "watch=true" in path and f"/{plural}?" in path


class FaultyApi:
    """Many threads; faults may be added and removed at any time."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        upstream = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._quiet = 0
        self.deaf = False
        """New watches are quiet, too."""
        self.requests: list[tuple[str, str]] = []
        outer, context = self, ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = outer._fault(self.command, self.path)
                if fault is None:
                    with suppress(OSError, http.client.HTTPException):
                        self._forward(body)
                    return
                watch = parse_qs(urlsplit(self.path).query).get("watch") == ["true"]
                if fault.status == 0:
                    self.close_connection = True
                elif watch:
                    reported = {"type": "ERROR", "object": _status(fault.status)}
                    self._answer(200, json.dumps(reported).encode() + b"\n")
                else:
                    self._answer(fault.status, json.dumps(_status(fault.status)).encode())

            do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815  http.server's names

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                if status == 429:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(body)

            def _forward(self, body: bytes) -> None:
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                kept["Accept-Encoding"] = "identity"
                there = http.client.HTTPSConnection(upstream.hostname or "", upstream.port, context=context)
                try:
                    there.request(self.command, self.path, body or None, kept)
                    answer = there.getresponse()
                    if parse_qs(urlsplit(self.path).query).get("watch") == ["true"]:
                        self._stream(answer)
                    else:
                        self._answer(answer.status, answer.read())
                finally:
                    there.close()

            def _stream(self, answer: http.client.HTTPResponse) -> None:
                began, self.close_connection = outer._quiet, True
                self.send_response(answer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                dead = outer.deaf
                while line := answer.readline():
                    dead = dead or outer._quiet != began
                    if not dead:
                        self.wfile.write(line)
                        self.wfile.flush()
                if dead:
                    outer._stopped.wait()  # open, and nothing comes

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # who asked has gone

        self._stopped = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="faulty API")
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}
        self.kubeconfig = folder / "faulty.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def add(self, fits: Callable[[str, str], bool], status: int, times: int = 1_000_000) -> Fault:
        with self._lock:
            self._faults.append(fault := Fault(fits, status, times))
        return fault

    def heal(self) -> None:
        """No fault any more; watches that are quiet stay so."""
        with self._lock:
            self._faults.clear()
        self.deaf = False

    def quiet(self) -> None:
        """Every watch that is open now stays open and says nothing any more."""
        self._quiet += 1

    def _fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for fault in self._faults:
                if fault.hits < fault.times and fault.fits(method, path):
                    fault.hits += 1
                    return fault
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.socket.close()
        self._thread.join(10)


def _status(code: int) -> dict[str, Any]:
    reasons = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "a fault that a test wants",
        "reason": reasons[code],
        "code": code,
    }
