"""A real S3-speaking server (moto's) as a process on loopback, and a proxy before it that breaks things."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from sc_nodes import fresh_address, wait_for

from kvpool_sidecar.store.s3_bucket import S3Bucket

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool_sidecar.store.fsspec_bucket import FsspecBucket

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
