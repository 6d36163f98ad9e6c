"""Authentication of the event stream's subscribers: CURVE of ZeroMQ (RFC 26), keys checked by ZAP (RFC 27)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from kvpool_sidecar.counters import Stats

__all__ = ["CurveAuthenticator"]

_ZAP: Final = "inproc://zeromq.zap.01"
_HANDSHAKE_MS: Final = 5000
_AT_ONCE: Final = 64


class CurveAuthenticator:
    """Admits subscribers that hold the routers' key. Not thread-safe: `serve` belongs to the sockets' thread.

    `server_key`, `router_key`: Curve25519 secret keys, 32 bytes each. ZeroMQ waits for `serve` before it admits anyone.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], server_key: bytes, router_key: bytes, stats: Stats
    ) -> None:
        self._server_key = z85.encode(server_key)
        self._admitted = z85.decode(zmq.curve_public(z85.encode(router_key)))
        self._stats = stats
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def protect(self, sock: zmq.Socket[bytes]) -> None:
        """Require the key on this socket; before it binds."""
        sock.setsockopt(zmq.ZAP_DOMAIN, b"kvpool")
        sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._server_key)

    def serve(self) -> None:
        """Answer the waiting questions of ZeroMQ; does not block."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                version, request_id, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
                    zmq.DONTWAIT
                )
                is_admitted = mechanism == b"CURVE" and credentials == [self._admitted]
                if not is_admitted:
                    self._stats.add("kv_events_lost", "refused")
                status = (b"200", b"OK") if is_admitted else (b"400", b"unknown key")
                self.socket.send_multipart([version, request_id, *status, b"", b""], zmq.DONTWAIT)
