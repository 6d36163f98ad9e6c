"""A real S3-speaking server (moto's) as a process on loopback, and a proxy before it that breaks things."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from sc_nodes import fresh_address, wait_for

from kvpool_sidecar.storage.buckets.s3 import S3Bucket

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket

PORT = 15555
KEY, SECRET = "AKIAKVPOOLTESTKEY000", "a-secret-key-that-no-message-may-carry"


class S3Server:
    """`start`, `stop`, SIGSTOP by `send`; it keeps objects in memory, so a stopped one comes back empty."""

    def __init__(self, log: Path) -> None:
        self.address = fresh_address()
        self.url = f"http://{self.address}:{PORT}"
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self):
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", self.address, "-p", str(PORT)],
                stdout=log,
                stderr=log,
                env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": self.url},
            )
        wait_for(lambda: self.answers, f"the S3 server answers: {self._log}", timeout=60)
        return self

    @property
    def answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        with contextlib.suppress(OSError), socket.create_connection((self.address, PORT), timeout=1):
            return True
        return False

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def call(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        """By hand, behind everybody's back: moto takes unsigned requests. Status and body."""
        request = urllib.request.Request(f"{self.url}/{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read()

    def make_bucket(self, name: str) -> None:
        assert self.call("PUT", name)[0] == 200


def storage_options(endpoint: str, read_timeout_s: float = 8) -> dict:
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {
            "connect_timeout": read_timeout_s,
            "read_timeout": read_timeout_s,
            "max_pool_connections": 16,
            "retries": {"total_max_attempts": 1},
        },
    }


def s3_bucket(endpoint: str, url: str = "s3://kvpool/pools", kind=S3Bucket, **kw) -> FsspecBucket:
    return kind(url, storage_options(endpoint, **kw), hidden=(SECRET,))


class Proxy:
    """Passes bytes on to the S3 server until it is told otherwise, connection by connection."""

    def __init__(self, target: str) -> None:
        self._target = (target, PORT)
        self._listener = socket.create_server((fresh_address(), 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self.answer: bytes | None = None  # instead of the server's
        self.cut_after: int | None = None  # bytes of the server's answers, then the connection ends
        self.stall_after: int | None = None  # then nothing more comes
        self.flip_at: int | None = None  # a bit of that byte of each answer's body that is large
        self.refuse = b""  # requests that begin so
        self.tls: ssl.SSLContext | None = None
        self.drip = False  # a few bytes now and then
        self._clients: list[socket.socket] = []
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        self.answer = self.cut_after = self.stall_after = self.flip_at = None

    def drop(self) -> None:
        """End all connections."""
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.tls is not None:
                try:
                    client = self.tls.wrap_socket(client, server_side=True)
                except OSError:
                    client.close()
                    continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            client.settimeout(30)
            self._clients.append(client)
            server.settimeout(30)
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if self.refuse and data.startswith(self.refuse):
                    client.sendall(error_answer(403, "AccessDenied"))
                    return
                if self.answer is not None:
                    client.sendall(self.answer)
                    return
                server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        try:
            while data := server.recv(1 << 16):
                if self.flip_at is not None and passed <= self.flip_at < passed + len(data):
                    data = bytearray(data)
                    data[self.flip_at - passed] ^= 1
                if self.stall_after is not None and passed + len(data) > self.stall_after:
                    self._ended.wait(20)
                    return
                if self.cut_after is not None and passed + len(data) > self.cut_after:
                    client.sendall(data[: max(0, self.cut_after - passed)])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                while self.drip and data and not self._ended.wait(0.1):
                    client.sendall(data[:200])
                    data, passed = data[200:], passed + 200
                client.sendall(data)
                passed += len(data)
        except OSError:
            pass


def error_answer(code: int, name: str) -> bytes:
    body = f'<?xml version="1.0"?><Error><Code>{name}</Code><Message>{name}</Message></Error>'.encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (code, len(body), body)
