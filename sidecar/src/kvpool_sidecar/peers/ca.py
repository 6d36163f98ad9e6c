"""The pool's own certificate authority, and the short-lived leaf of one node. Pure: every function takes the time.

In Kubernetes the operator holds the authority's key and issues the leaves (kvpool_sidecar.peers.issued). Where the
secret directory has no authority (one machine without Kubernetes) all sidecars derive the same one from the pool's
secret, and where it has the key they use it: then each sidecar signs a leaf for itself in memory and never writes it.

A new authority is trusted before it signs: for `SETTLE` after it was made the one before it still does, so that every
node has read the new one by the time the first leaf of it appears. The shape is that of
kvpool_operator.pki.certificates.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SETTLE",
    "SKEW",
    "CertificateAuthority",
    "LeafCertificate",
    "LeafSource",
    "TrustBundle",
    "derived",
    "issue",
    "read",
]

LEAF_LIFE = timedelta(days=1)
SETTLE = timedelta(minutes=10)
SKEW = timedelta(minutes=5)
_SUBJECT = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpool peers")])
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True)
class CertificateAuthority:
    """A CA certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True)
class TrustBundle:
    """The one in use and, while they overlap, the one before it."""

    current: CertificateAuthority
    previous: CertificateAuthority | None = None

    @property
    def is_remote(self) -> bool:
        """False: it signs in this process."""
        return False

    @property
    def problem(self) -> str:
        """Empty: signing here does not fail."""
        return ""

    def trusted(self, now: datetime) -> str:
        """PEM of all trusted CAs."""
        return "".join(a.pem for a in (self.current, self.previous) if a and a.certificate.not_valid_after_utc > now)

    def renew(self, leaf: LeafCertificate | None, name: str, now: datetime, life: timedelta) -> LeafCertificate | None:
        """Return a leaf signed here, or `leaf` itself while it is not due."""
        signer = self.signer(now)
        return issue(signer, name, now, life) if leaf is None or leaf.is_due(signer, now) else leaf

    def signer(self, now: datetime) -> CertificateAuthority:
        """Who signs now: the new one once every node knows it, or when the old one can no longer."""
        old = self.previous
        settled = self.current.certificate.not_valid_before_utc + SKEW + SETTLE
        if old is not None and now < settled and old.certificate.not_valid_after_utc > now + SETTLE:
            return old
        return self.current


@dataclass(frozen=True)
class LeafCertificate:
    """What a node shows of itself: certificate and key, PEM."""

    pem: bytes
    made: datetime
    expires: datetime
    issuer: x509.Certificate

    def is_due(self, signer: CertificateAuthority, now: datetime) -> bool:
        """Renew it: it is old, or another authority signs."""
        return signer.certificate != self.issuer or self.is_old(now)

    def is_old(self, now: datetime) -> bool:
        """Whether two thirds of its life are over, or the clock went back before it."""
        return now >= self.made + (self.expires - self.made) * 2 / 3 or now < self.made - SKEW


class LeafSource(Protocol):
    """The CAs that this node trusts, and the source of its leaf."""

    @property
    def is_remote(self) -> bool:
        """Whether `renew` waits for another process."""
        ...

    @property
    def problem(self) -> str:
        """Why the last `renew` returned no new leaf; empty if nothing is wrong."""
        ...

    def trusted(self, now: datetime) -> str:
        """PEM of all trusted CAs."""
        ...

    def renew(self, leaf: LeafCertificate | None, name: str, now: datetime, life: timedelta) -> LeafCertificate | None:
        """Return the leaf to use now: `leaf` itself while none is due or no other is available."""
        ...


def derived(secret: bytes) -> CertificateAuthority:
    """The authority that all who have the pool's secret can make: the same key, each a copy of the certificate."""
    digest = b"".join(hmac.digest(secret, b"peer authority" + bytes([n]), "sha256") for n in range(2))
    key = ec.derive_private_key(int.from_bytes(digest, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
    start = datetime(2020, 1, 1, tzinfo=UTC)
    return CertificateAuthority(_self_signed(key, start, start + timedelta(days=36525)), key)


def read(file: Callable[[str], bytes], secret: bytes) -> TrustBundle:
    """The authorities in the pool's Secret; `file(name)` is empty for what is not there. ConfigError if damaged."""
    current = _authority(file("peer-ca.crt"), file("peer-ca.key"))
    if current is None:
        return TrustBundle(derived(secret))
    return TrustBundle(current, _authority(file("peer-previous.crt"), file("peer-previous.key")))


def issue(signer: CertificateAuthority, name: str, now: datetime, life: timedelta = LEAF_LIFE) -> LeafCertificate:
    """A leaf for client and server side; it never outlives its signer."""
    key = ec.generate_private_key(ec.SECP256R1())
    expires = min(now + life, signer.certificate.not_valid_after_utc).replace(microsecond=0)  # as certificates have it
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(expires)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.certificate.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
        .sign(signer.key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return LeafCertificate(
        certificate.public_bytes(serialization.Encoding.PEM) + private, now, expires, signer.certificate
    )


def _self_signed(key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(_SUBJECT)
        .issuer_name(_SUBJECT)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _authority(certificate_pem: bytes, key_pem: bytes) -> CertificateAuthority | None:
    if not certificate_pem or not key_pem:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as e:
        raise ConfigError(f"peer-ca: cannot be read: {type(e).__name__}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError("peer-ca: certificate and key do not belong together")
    return CertificateAuthority(certificate, key)
