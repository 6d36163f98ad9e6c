"""Certificates and connections between sidecars, for the tests of TLS."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sc_nodes import fresh_address

from kvpool.protocol import block
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_testing.blocks import header, key
from kvpool_testing.blocks import payload as block_payload

if TYPE_CHECKING:
    from kvpool_sidecar.peers.security import PeerSecurity

SECRET = b"secret of the pool"
UID = "pool-uid"
DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(UTC)


def fresh_authority(start: datetime | None = None, life: timedelta = 365 * DAY) -> authority.CertificateAuthority:
    """As the operator makes them: not derived from anything."""
    start = start or now()
    made = authority.derived(secrets.token_bytes(32))
    return authority.CertificateAuthority(
        authority._self_signed(made.key, start - authority.SKEW, start + life), made.key
    )


def identity(node: str, authorities=None, uid: str = UID, **kw) -> NodeIdentity:
    known = authorities or authority.TrustBundle(authority.derived(SECRET))
    return NodeIdentity(known if callable(known) else lambda: known, uid, node, **kw)


class Far:
    """A serving node named `b`, and how to ask it."""

    def __init__(self, store, security: PeerSecurity) -> None:
        self.security = security
        self.stats = Stats()
        self.server = PeerServer(fresh_address(), 0, store, self.stats, PeerServerOptions(security=security))
        self.server.start()
        host, port = self.server._listener.getsockname()
        self.info = NodeInfo("b", host, port, 1)

    def close(self) -> None:
        self.server.stop()
        self.security.close()


def fetched(security: PeerSecurity, peer: NodeInfo, n: int = 1, timeout_s: float = 10.0) -> bytes | None:
    link = security.dial(peer, timeout_s)
    try:
        link.request([key(n)])
        size = link.response_size(time.monotonic() + 10)
        return tcp.receive(link._socket, size, time.monotonic() + 10) if size else None
    finally:
        link.close()


def file_of(n: int, size: int) -> bytes:
    return block.encode_header(header(n, block_payload(n, size))) + block_payload(n, size)


def key_pem(one: authority.CertificateAuthority) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return one.key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
