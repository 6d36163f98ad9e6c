"""Self-signed CA of the webhook, rotated with overlap, and short-lived leaf certificates.

Pure: every function takes the time. All replicas share the CA in one Secret; each replica holds its leaf in memory and
never writes it. The design follows cert-manager's dynamic authority: the CA is valid for one year, a leaf for seven
days,
and both are renewed after two thirds of their validity.

Rotation: a new CA is published next to the old one (the webhook configuration trusts both). It signs only after
`settle`,
when every API server has read it. The old CA is trusted until it expires.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = [
    "CertPolicy",
    "CertificateAuthority",
    "LeafCertificate",
    "TrustBundle",
    "issue_leaf",
    "leaf_due",
    "new_authority",
    "next_authorities",
    "utc_now",
]

_CA_CERT: Final = "ca.crt"
_CA_KEY: Final = "ca.key"
_OLD_CERT: Final = "previous.crt"
_OLD_KEY: Final = "previous.key"


@dataclass(frozen=True)
class CertPolicy:
    """Validity periods and margins."""

    ca_life: timedelta = timedelta(days=365)
    leaf_life: timedelta = timedelta(days=7)
    settle: timedelta = timedelta(minutes=10)
    """Time that a new CA is trusted before it signs."""
    skew: timedelta = timedelta(minutes=5)
    """Time before its creation from which a certificate is valid, for clocks that differ."""


@dataclass(frozen=True)
class CertificateAuthority:
    """CA certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """Return the certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Return the private key as unencrypted PKCS 8 PEM."""
        return _key_pem(self.key)

    @property
    def expires(self) -> datetime:
        """Expiry of the certificate, UTC."""
        return self.certificate.not_valid_after_utc


@dataclass(frozen=True)
class TrustBundle:
    """Current CA and, while they overlap, the previous one. The Secret stores them."""

    current: CertificateAuthority
    previous: CertificateAuthority | None = None

    def bundle(self, now: datetime) -> bytes:
        """Return the PEM of all trusted CAs: the caBundle of the webhook configuration."""
        return b"".join(a.certificate_pem for a in (self.current, self.previous) if a and a.expires > now)

    def signer(self, now: datetime, policy: CertPolicy) -> CertificateAuthority:
        """Return the CA that signs now: the current one after `settle`, or if the previous one expires before."""
        old = self.previous
        created = self.current.certificate.not_valid_before_utc + policy.skew
        if old and old.expires > now + policy.settle and now < created + policy.settle:
            return old
        return self.current

    def to_secret(self) -> dict[str, bytes]:
        """Return the data of the Secret."""
        data = {_CA_CERT: self.current.certificate_pem, _CA_KEY: self.current.key_pem}
        if self.previous:
            data |= {_OLD_CERT: self.previous.certificate_pem, _OLD_KEY: self.previous.key_pem}
        return data

    @classmethod
    def from_secret(cls, data: dict[str, bytes]) -> TrustBundle | None:
        """Parse the data of the Secret. None if the CA is absent or invalid."""
        current = _authority(data.get(_CA_CERT), data.get(_CA_KEY))
        return cls(current, _authority(data.get(_OLD_CERT), data.get(_OLD_KEY))) if current else None


@dataclass(frozen=True)
class LeafCertificate:
    """Server certificate and key, both PEM, with its signer."""

    certificate_pem: bytes
    key_pem: bytes
    not_before: datetime
    expires: datetime
    issuer: CertificateAuthority


def new_authority(
    name: str,
    dns_names: tuple[str, ...],
    now: datetime,
    policy: CertPolicy,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> CertificateAuthority:
    """Create a self-signed CA whose critical name constraint allows only `dns_names`. `key`: None for a random one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - policy.skew)
        .not_valid_after(now + policy.ca_life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(
            x509.NameConstraints(permitted_subtrees=[x509.DNSName(d) for d in dns_names], excluded_subtrees=None),
            critical=True,
        )
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(certificate, key)


def next_authorities(
    stored: TrustBundle | None, name: str, dns_names: tuple[str, ...], now: datetime, policy: CertPolicy
) -> TrustBundle:
    """Return the CAs that the Secret should contain; `stored` itself if no change is needed."""
    if stored is None or stored.current.expires <= now:
        return TrustBundle(new_authority(name, dns_names, now, policy))
    life = stored.current.certificate
    if now >= _renewal(life.not_valid_before_utc + policy.skew, life.not_valid_after_utc):
        return TrustBundle(new_authority(name, dns_names, now, policy), previous=stored.current)
    if stored.previous and stored.previous.expires <= now:
        return TrustBundle(stored.current)
    return stored


def issue_leaf(
    signer: CertificateAuthority,
    dns_names: tuple[str, ...],
    now: datetime,
    policy: CertPolicy,
    *,
    for_client: bool = False,
) -> LeafCertificate:
    """Issue a server or client certificate for `dns_names`. It never outlives its signer."""
    usage = ExtendedKeyUsageOID.CLIENT_AUTH if for_client else ExtendedKeyUsageOID.SERVER_AUTH
    key = ec.generate_private_key(ec.SECP256R1())
    not_before, expires = now - policy.skew, min(now + policy.leaf_life, signer.expires)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])]))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(expires)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(d) for d in dns_names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.certificate.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
        .sign(signer.key, hashes.SHA256())
    )
    return LeafCertificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        _key_pem(key),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        signer,
    )


def leaf_due(leaf: LeafCertificate | None, signer: CertificateAuthority, now: datetime, policy: CertPolicy) -> bool:
    """Whether a new leaf is needed: none yet, another signer, or two thirds of its validity have passed."""
    if leaf is None or leaf.issuer.certificate != signer.certificate:
        return True
    return now >= _renewal(leaf.not_before + policy.skew, leaf.expires)


def _renewal(start: datetime, end: datetime) -> datetime:
    return start + (end - start) * 2 / 3


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _authority(certificate_pem: bytes | None, key_pem: bytes | None) -> CertificateAuthority | None:
    """Return None if certificate or key is missing, damaged, of another kind, or they do not match."""
    if not certificate_pem or not key_pem:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        return None
    return CertificateAuthority(certificate, key)


def utc_now() -> datetime:
    """Return the current time, UTC."""
    return datetime.now(UTC)
