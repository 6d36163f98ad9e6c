"""`python -m bench objects`: blocks to and from an object store, beside the plainest program that does the same.

An S3-speaking server (moto's, a Python program: it is most of every figure, so only the ratios say something) and a
directory. The limit of S3 is http.client with a body from a file, and an answer read in pieces into a file, without
checks; of a directory it is a copy by the kernel. `kvpool` is what the sidecar uses, `kvpool-s3fs` the same bucket by
s3fs alone; `kvpool-store` is the whole store: read, verified by checksum, ready for a client. Prints a table and
writes out/bench/objects.json.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import Contender, compare
from bench.nodes import end_with_parent
from kvpool.protocol import block
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket
from kvpool_sidecar.storage.buckets.s3 import S3Bucket
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.measure import Row
    from kvpool_sidecar.storage.buckets.base import Bucket

MIB = 1 << 20
SIZES = (2 * MIB, 32 * MIB)
_numbers = itertools.count()
# the server wants to see a signature, and looks at none
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request, Signature=0"}


class Server:
    """moto's S3 server on loopback, with one bucket."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with (directory / "s3.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError((directory / "s3.log").read_text()[-2000:]) from None
                time.sleep(0.05)
        self.plain("PUT", "/bench")

    def plain(self, method: str, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path)
        if connection.getresponse().status != 200:
            raise RuntimeError(f"{method} {path}")
        connection.close()

    def bucket(self, kind: type[FsspecBucket]) -> FsspecBucket:
        options = {
            "key": "bench-key", "secret": "bench-secret", "endpoint_url": f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"region_name": "us-east-1"}, "config_kwargs": {"read_timeout": 60},
        }  # fmt: skip
        return kind("s3://bench", options)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)


def source(size: int) -> int:
    """A block in memory, header and payload."""
    fd = os.memfd_create("block")
    payload = secrets.token_bytes(4096) * (size // 4096)
    head = block.BlockHeader(bytes(32), bytes(32), bytes(32), bytes(16), size, block.checksum(payload), created_ms=1)
    os.pwrite(fd, block.encode_header(head), 0)
    os.pwrite(fd, payload, block.HEADER_BYTES)
    return fd


def http_put(server: Server, fd: int, length: int) -> Callable[[int], None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60, blocksize=MIB)

    def run(n: int) -> None:
        with open(os.dup(fd), "rb") as body:
            body.seek(0)
            connection.request("PUT", f"/bench/plain-{n % 4}", body, {"Content-Length": str(length), **_SIGNED})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(str(answer.status))

    return run


def http_get(server: Server, name: str, length: int) -> Callable[[int], None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    buffer = memoryview(bytearray(MIB))
    target = os.memfd_create("target")

    def run(_: int) -> None:
        connection.request("GET", f"/bench/{name}", headers=_SIGNED)
        answer = connection.getresponse()
        at = 0
        while got := answer.readinto(buffer):
            at += os.pwrite(target, buffer[:got], at)
        if at != length:
            raise RuntimeError(f"{at} bytes")

    return run


def bucket_put(bucket: Bucket, fd: int, length: int) -> Callable[[int], None]:
    def run(_: int) -> None:
        name = f"put-{next(_numbers)}"
        if not bucket.put(name, fd, length):
            raise RuntimeError("there already")
        if bucket.url.startswith("file:"):
            bucket.delete(name)

    return run


def bucket_get(bucket: Bucket, name: str, length: int) -> Callable[[int], None]:
    target = os.memfd_create("target")
    return lambda _: bucket.get_to_fd(name, target, length)


def store_get(bucket: Bucket, size: int) -> Callable[[int], None]:
    store = ObjectStore(bucket, ObjectStoreSettings("bench", size))

    def run(_: int) -> None:
        found = store.open(bytes(32))
        if found is None:
            raise RuntimeError("not there")
        os.close(found.fd)

    return run


def copy(directory: Path, fd: int, length: int) -> Callable[[int], None]:
    def run(_: int) -> None:
        path = directory / f"plain-{next(_numbers)}"
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        done = 0
        while done < length:
            done += os.sendfile(target, fd, done, length - done)
        os.close(target)
        path.unlink()

    return run


def read_plain(path: Path, length: int) -> Callable[[int], None]:
    target = os.memfd_create("target")

    def run(_: int) -> None:
        fd = os.open(path, os.O_RDONLY)
        done = 0
        while done < length:
            done += os.sendfile(target, fd, done, length - done)
        os.lseek(target, 0, os.SEEK_SET)
        os.close(fd)

    return run


def measure(server: Server, directory: Path, size: int, rounds: int) -> list[Row]:
    fd, length = source(size), block.HEADER_BYTES + size
    fast, slow = server.bucket(S3Bucket), server.bucket(FsspecBucket)
    local = FsspecBucket(f"file://{directory}/objects")
    name = f"bench/blocks/00/{'00' * 32}"
    for bucket in (fast, local):
        bucket.delete(name)
        bucket.put(name, fd, length)
    operations = max(1, 16 * MIB // size)
    rows = compare("s3-write", size, 1, 1, rounds, operations, [
        Contender("limit (http.client)", lambda _: http_put(server, fd, length)),
        Contender("kvpool", lambda _: bucket_put(fast, fd, length)),
        Contender("kvpool-s3fs", lambda _: bucket_put(slow, fd, length)),
    ])  # fmt: skip
    rows += compare("s3-read", size, 1, 1, rounds, operations, [
        Contender("limit (http.client)", lambda _: http_get(server, name, length)),
        Contender("kvpool", lambda _: bucket_get(fast, name, length)),
        Contender("kvpool-store", lambda _: store_get(fast, size)),
        Contender("kvpool-s3fs", lambda _: bucket_get(slow, name, length)),
    ])  # fmt: skip
    rows += compare("directory-write", size, 1, 1, rounds, operations, [
        Contender("limit (sendfile)", lambda _: copy(directory, fd, length)),
        Contender("kvpool", lambda _: bucket_put(local, fd, length)),
    ])  # fmt: skip
    rows += compare("directory-read", size, 1, 1, rounds, operations, [
        Contender("limit (sendfile)", lambda _: read_plain(directory / "objects" / name, length)),
        Contender("kvpool", lambda _: bucket_get(local, name, length)),
        Contender("kvpool-store", lambda _: store_get(local, size)),
    ])  # fmt: skip
    for bucket in (fast, slow, local):
        bucket.close()
    os.close(fd)
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'path':16s} {'MiB':>4s}  {'':20s} {'GB/s':>7s} {'p50 ms':>8s} {'CPU s/GB':>9s} {'of limit':>9s}"]
    lines += [
        f"{r.path:16s} {r.size // MIB:4d}  {r.system:20s} {r.gb_s:7.3f} {r.p50_ms:8.2f} {r.cpu_s_per_gb:9.2f} "
        f"{r.ratio_to_limit:9.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Returns 0; the figures are the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench/objects.json"))
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        server = Server(Path(made))
        try:
            for size in SIZES:
                rows += measure(server, Path(made), size, args.rounds)
        finally:
            server.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    print(table(rows))
    return 0
