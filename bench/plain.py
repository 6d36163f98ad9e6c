"""What the machine itself can do: the same bytes by the shortest way. The limits that the pool is measured against."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import xxhash

from bench.nodes import end_with_parent
from kvpool.protocol.block import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.nodes import Network


def read_file(path: Path, view: memoryview, scratch: memoryview) -> None:
    """open + preadv + xxh3_128 of one block file."""
    descriptor = os.open(path, os.O_RDONLY)
    done, size = 0, HEADER_BYTES + len(view)
    while done < size:
        done += os.preadv(descriptor, [scratch, view] if done == 0 else [view[done - HEADER_BYTES :]], done)
    os.close(descriptor)
    xxhash.xxh3_128_digest(view)


def write_file(path: Path, view: memoryview, header: memoryview) -> None:
    """xxh3_128 and O_DIRECT write of header and payload under another name, then a rename."""
    temporary = path.with_suffix(".part")
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, HEADER_BYTES + len(view))
    xxhash.xxh3_128_digest(view)
    os.pwritev(descriptor, [header, view], 0)
    os.close(descriptor)
    os.rename(temporary, path)


class Sender:
    """A process in the network of node a that sends files on request by sendfile, and connections to it from node b."""

    def __init__(self, network: Network, files: Sequence[Path]) -> None:
        command = [*network.prefix("a"), sys.executable, "-m", "bench.plain", network.a, *map(str, files)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_parent)
        assert self.process.stdout is not None
        self._address = (network.a, int(self.process.stdout.readline()))
        self._network = network

    def connect(self) -> socket.socket:
        with self._network.inside("b"):
            return socket.create_connection(self._address, timeout=10)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def receive(
    connection: socket.socket, numbers: Sequence[int], views: Sequence[memoryview], scratch: memoryview
) -> None:
    """recv_into + xxh3_128 of blocks that were asked for in one message."""
    connection.sendall(b"".join(n.to_bytes(4, "little") for n in numbers))
    for view in views:
        for part in (scratch, view):
            done = 0
            while done < len(part):
                count = connection.recv_into(part[done:], 0, socket.MSG_WAITALL)
                if count == 0:
                    raise EOFError
                done += count
        xxhash.xxh3_128_digest(view)


def _serve(address: str, files: Sequence[str]) -> None:
    import threading

    descriptors = [os.open(f, os.O_RDONLY) for f in files]
    sizes = [os.fstat(d).st_size for d in descriptors]
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)

    def serve(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            for start in range(0, len(request), 4):
                n = int.from_bytes(request[start : start + 4], "little")
                done = 0
                while done < sizes[n]:
                    done += os.sendfile(connection.fileno(), descriptors[n], done, sizes[n] - done)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
