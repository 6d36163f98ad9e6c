"""This node's identity towards its peers: TLS contexts with a leaf of the pool's CA, renewed before it expires.

TLS 1.3 only, both sides present a certificate, and no session is resumed: every handshake verifies the certificates.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.protocol.certificate_names import node_name, operator_name
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["NodeIdentity", "utc_now"]

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 30.0
_REMOTE_INTERVAL_S = 5.0
"""Pause between two looks where another process issues the leaf; the source itself spaces its requests."""


def utc_now() -> datetime:
    """Return the current time; certificates are valid by this clock."""
    return datetime.now(UTC)


class NodeIdentity:
    """Thread-safe. `read` returns the pool's CAs as they are now; the constructor raises its ConfigError."""

    def __init__(
        self,
        read: Callable[[], authority.LeafSource],
        pool_uid: str,
        node: str,
        *,
        life: timedelta = authority.LEAF_LIFE,
        clock: Callable[[], datetime] = utc_now,
        check_interval_s: float = _CHECK_INTERVAL_S,
    ) -> None:
        self._read = read
        self._uid = pool_uid
        self._name = node_name(pool_uid, node)
        self._life = life
        self._clock = clock
        self._lock = threading.Lock()
        interval_s = min(check_interval_s, life.total_seconds() / 12)
        self._source = read()
        is_remote = self._source.is_remote
        if is_remote:
            interval_s = min(interval_s, _REMOTE_INTERVAL_S)
        self._task = PeriodicTask("peer-identity", self._renew, interval_s, run_at_once=is_remote)
        self._leaf: authority.LeafCertificate | None = None
        self._trusted = ""
        self.problem = ""
        if is_remote:
            self._use(None, self._source.trusted(clock()))  # the first request must not delay the start
        else:
            self.refresh()

    def start(self) -> None:
        """Start renewing the certificate."""
        self._task.start()

    def stop(self) -> None:
        """Stop renewing; the contexts remain usable."""
        self._task.stop()

    @property
    def server(self) -> ssl.SSLContext:
        """TLS context of the serving side."""
        with self._lock:
            return self._server

    @property
    def client(self) -> ssl.SSLContext:
        """TLS context of the client side."""
        with self._lock:
            return self._client

    @property
    def seconds_left(self) -> float:
        """Seconds until the leaf certificate expires; negative afterwards."""
        with self._lock:
            return (self._leaf.expires - self._clock()).total_seconds() if self._leaf else 0.0

    @property
    def expiry(self) -> float:
        """Unix time at which the leaf certificate expires; 0 without one."""
        with self._lock:
            return self._leaf.expires.timestamp() if self._leaf else 0.0

    def name_of(self, node: str) -> str:
        """Return the DNS name that the certificate of another node of this pool must have."""
        return node_name(self._uid, node)

    def is_operator(self, certificate: dict[str, Any] | None) -> bool:
        """Return whether this verified certificate (SSLSocket.getpeercert) is that of the pool's operator."""
        return _dns_names(certificate) == [operator_name(self._uid)]

    def refresh(self) -> None:
        """Read the CAs and renew the leaf certificate if it is due. May wait for the operator, for a bounded time."""
        now = self._clock()
        try:
            self._source = self._read()
        except (ConfigError, OSError) as e:
            self.problem = str(e)
            log.warning("the pool's CA cannot be read: %s; the previous one is used", e)
        else:
            self.problem = ""
        leaf = self._source.renew(self._leaf, self._name, now, self._life)
        self.problem = self.problem or self._source.problem
        trusted = self._source.trusted(now)
        if leaf is not self._leaf or trusted != self._trusted:
            self._use(leaf, trusted)

    def _use(self, leaf: authority.LeafCertificate | None, trusted: str) -> None:
        """Make contexts of both sides. Without a leaf every handshake fails, and blocks of peers are misses."""
        server, client = (_context(side, leaf, trusted) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        with self._lock:
            self._leaf, self._trusted, self._server, self._client = leaf, trusted, server, client

    def _renew(self) -> None:
        try:
            self.refresh()
        except Exception as e:
            self.problem = f"{type(e).__name__}: the certificate cannot be renewed"
            raise


def _dns_names(certificate: dict[str, Any] | None) -> list[str]:
    return [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]


def _context(side: int, leaf: authority.LeafCertificate | None, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=trusted)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    if leaf is None:
        return context
    memory = os.memfd_create("leaf", os.MFD_CLOEXEC)  # the library reads keys from files only; this file is on no disk
    try:
        os.write(memory, leaf.pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context
