"""Leaf certificates that the operator issues, against the token that the kubelet gave this pod.

The private key is made here and never leaves this process. While the operator does not answer, the last leaf stays in
use; without any, handshakes with peers fail, which are misses, and the node's own blocks are served as ever.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvpool.errors import ConfigError
from kvpool_sidecar.peers.ca import SETTLE, SKEW, LeafCertificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

__all__ = ["IssuedLeaves", "IssuerClient", "IssuerError"]

log = logging.getLogger(__name__)

ISSUER_NAME = "issuer.kvpool"
ISSUER_CA = "issuer-ca.crt"
_TIMEOUT_S = 10.0
_MAX_RESPONSE = 64 * 1024
_MAX_TOKEN = 8192
_MIN_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0


class IssuerError(Exception):
    """No certificate now: the operator does not answer, or refuses; the message has its sentence."""


class IssuerClient:
    """Requests certificates. `url`: https://host:port; `token_file`: the projected token, which the kubelet renews."""

    def __init__(self, url: str, token_file: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            raise ConfigError(f"--issuer-url: expected https://HOST:PORT, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 443
        self._token_file = token_file
        self._next_try, self._pause_s = 0.0, _MIN_PAUSE_S
        self.problem = ""

    def may_try(self) -> bool:
        """Whether the pause after the last failure is over."""
        return time.monotonic() >= self._next_try

    def request(self, csr: bytes, trusted: str) -> bytes:
        """Return the certificate, PEM. IssuerError; then the next request comes after a growing, random pause."""
        try:
            certificate = self._request(csr, trusted)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as e:
            self._fail()
            raise IssuerError(f"the operator cannot be asked for a certificate: {type(e).__name__}") from None
        except IssuerError:
            self._fail()
            raise
        self._next_try, self._pause_s = 0.0, _MIN_PAUSE_S
        return certificate

    def _fail(self) -> None:
        self._next_try = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads the nodes
        self._pause_s = min(self._pause_s * 2, _MAX_PAUSE_S)

    def _request(self, csr: bytes, trusted: str) -> bytes:
        with open(self._token_file, encoding="ascii") as file:
            token = file.read(_MAX_TOKEN).strip()
        connection = _IssuerConnection(self._host, self._port, trusted)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/leaf", json.dumps({"csr": csr.decode("ascii")}), headers)
            response = connection.getresponse()
            data = response.read(_MAX_RESPONSE + 1)
        finally:
            connection.close()
        if len(data) > _MAX_RESPONSE:
            raise IssuerError("the operator's answer is too long")
        answer = json.loads(data)
        if response.status != 200:
            raise IssuerError(f"the operator issues no certificate: {str(answer.get('error'))[:200]!r}")
        certificate: bytes = answer["certificate"].encode("ascii")
        return certificate


class _IssuerConnection(http.client.HTTPSConnection):
    """Verifies the operator by its name in the certificate, whatever the Service is called."""

    def __init__(self, host: str, port: int, trusted: str) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=trusted)
        super().__init__(host, port, timeout=_TIMEOUT_S, context=context)
        self._tls = context

    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), timeout=_TIMEOUT_S)
        try:
            self.sock = self._tls.wrap_socket(raw, server_hostname=ISSUER_NAME)
        except BaseException:
            raw.close()
            raise


class IssuedLeaves:
    """Trust in the CA of the secret directory, and leaves from the operator. See ca.LeafSource. ConfigError if the
    files are damaged."""

    def __init__(self, file: Callable[[str], bytes], client: IssuerClient) -> None:
        self._current = _certificate(file("peer-ca.crt"), "peer-ca.crt")
        previous = file("peer-previous.crt")
        self._previous = _certificate(previous, "peer-previous.crt") if previous else None
        self._issuer_ca = file(ISSUER_CA).decode("ascii", "replace")
        self._client = client

    @property
    def problem(self) -> str:
        """Why the last request failed; empty after a success."""
        return self._client.problem

    @property
    def is_remote(self) -> bool:
        """True: `renew` asks the operator."""
        return True

    def trusted(self, now: datetime) -> str:
        """PEM of the CA and, while they overlap, of the one before it."""
        return "".join(
            c.public_bytes(serialization.Encoding.PEM).decode()
            for c in (self._current, self._previous)
            if c is not None and c.not_valid_after_utc > now
        )

    def renew(self, leaf: LeafCertificate | None, name: str, now: datetime, life: timedelta) -> LeafCertificate | None:
        """Request a leaf if one is due. The operator decides how long it lives; `life` is not used."""
        if leaf is not None and not self._is_due(leaf, now):
            return leaf
        if not self._client.may_try():
            return leaf
        try:
            found = self._requested(name, now)
            self._client.problem = ""
            return found
        except IssuerError as e:
            self._client.problem = str(e)
            log.warning("%s; %s", e, "the previous certificate is used" if leaf else "blocks of peers are misses")
            return leaf

    def _is_due(self, leaf: LeafCertificate, now: datetime) -> bool:
        if leaf.is_old(now):
            return True
        settled = self._current.not_valid_before_utc + SKEW + SETTLE
        return leaf.issuer != self._current and (now >= settled or leaf.issuer != self._previous)

    def _requested(self, name: str, now: datetime) -> LeafCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        csr = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = self._client.request(csr.public_bytes(serialization.Encoding.PEM), self._issuer_ca)
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError:
            raise IssuerError("the operator's certificate cannot be read") from None
        issuer = next((c for c in (self._current, self._previous) if c and _is_signed_by(certificate, c)), None)
        if issuer is None or certificate.public_key() != key.public_key():
            raise IssuerError("the operator's certificate is not of a CA that this node knows yet")
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return LeafCertificate(pem + private, now, certificate.not_valid_after_utc, issuer)


def _is_signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _certificate(pem: bytes, name: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise ConfigError(f"{name}: cannot be read") from None
