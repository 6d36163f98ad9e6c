"""python sc_flood.py SOCKET CONNECTIONS IDS: send lookups on many connections until standard input ends."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading

from sc_raw import Raw

from kvpool.protocol import wire


def _run(path: str, ids: int, begun: threading.Barrier) -> None:
    raw = Raw(path, timeout=60)
    names = b"".join(os.urandom(32) for _ in range(ids))
    packet = wire.pack(wire.Op.LOOKUP, struct.pack("<I", 16) + names, count=ids, request=1)
    answer = bytearray(wire.MAX_PACKET)
    begun.wait(60)
    with contextlib.suppress(OSError):
        while True:
            raw.socket.sendall(packet)
            raw.socket.recv_into(answer)


if __name__ == "__main__":
    os.nice(19)
    socket.setdefaulttimeout(60)
    barrier = threading.Barrier(int(sys.argv[2]) + 1)
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=_run, args=(sys.argv[1], int(sys.argv[3]), barrier), daemon=True).start()
    barrier.wait(60)
    print("begun", flush=True)
    sys.stdin.read()
    os._exit(0)
