"""Client side of a connection whose data is encrypted as well (`encryption: Always`).

A client cannot read TLS from a descriptor: it would need the keys, and with them the permission to send requests. So a
thread of the sidecar decrypts into one end of a socket pair, and the client gets the other end, which looks like any
peer stream. This thread alone uses the TLS connection, which is not thread-safe. The cost is the encryption and one
more copy. At most 256 KiB are buffered; a client that does not read stops the peer.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.connection import PeerConnection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

__all__ = ["TlsConnection"]

_CHUNK_BYTES = 256 << 10
_IO_TIMEOUT_S = 15.0  # longest silence of the peer, and longest pause of the client in reading


class TlsConnection(PeerConnection):
    """Owns `tls`, on which nothing has been sent yet."""

    def __init__(self, tls: ssl.SSLSocket, deadline: float) -> None:
        session_key = secrets.token_bytes(32)
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        tls.sendall(session_key)
        tls.settimeout(_IO_TIMEOUT_S)
        near, self._far = socket.socketpair()
        tcp.set_send_timeout(self._far, _IO_TIMEOUT_S)
        super().__init__(near, session_key)
        self._tls = tls
        self._work: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="peer-tls", daemon=True).start()

    @property
    def alive(self) -> bool:
        """False once the peer has closed its end."""
        if not super().alive or self._tls.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(self._tls, select.POLLRDHUP)
        return not poller.poll(0)

    def received(self) -> int:
        """Encrypted bytes received."""
        return tcp.bytes_received(self._tls) if self._tls.fileno() >= 0 else 0

    def send_request(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag = wire.Flag.NONE) -> None:
        """Queue the requests for the thread that sends them."""
        self._work.put((self._pack_requests(op, keys, flags), 0 if op == wire.Op.RELEASE else len(keys)))

    def close(self) -> None:
        """End the connection for both holders; the thread notices and closes the rest."""
        super().close()
        self._work.put(None)
        with contextlib.suppress(OSError, ValueError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # of the socket only: TLS is used by the thread

    def _run(self) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        try:
            while (work := self._work.get()) is not None:
                packet, responses = work
                self._tls.sendall(packet)
                for _ in range(responses):
                    self._relay(buffer)
        except (KVPoolError, OSError):
            pass  # the client sees the end of its stream
        finally:
            self._far.close()
            self._tls.close()

    def _relay(self, buffer: memoryview) -> None:
        response = buffer[: peer_wire.PEER_RESPONSE.size]
        self._fill(response)
        magic, _, _, _, left = peer_wire.PEER_RESPONSE.unpack(response)
        if magic != wire.MAGIC:
            raise ProtocolError("not a peer's response")
        self._far.sendall(response)
        while left:
            chunk = buffer[: min(left, len(buffer))]
            self._fill(chunk)
            self._far.sendall(chunk)
            left -= len(chunk)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._tls.recv_into(view[done:])
            if count == 0:
                raise ProtocolError("the peer closed the connection")
            done += count
