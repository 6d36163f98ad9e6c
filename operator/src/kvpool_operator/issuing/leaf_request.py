"""Certificate signing requests of sidecars: what is accepted, and the leaf that is issued. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool_operator.errors import LeafRefusedError

if TYPE_CHECKING:
    from datetime import datetime

    from kvpool_operator.pki.certificates import CertificateAuthority, CertPolicy

__all__ = ["MAX_CSR_BYTES", "sign_request"]

MAX_CSR_BYTES: Final = 4096


def sign_request(pem: bytes, name: str, signer: CertificateAuthority, now: datetime, policy: CertPolicy) -> bytes:
    """Return the leaf certificate, PEM, for client and server side. It never outlives its signer.

    LeafRefusedError: the request is malformed, has another kind of key, or asks for anything but the DNS name `name`.
    """
    key = _requested_key(pem, name)
    expires = min(now + policy.leaf_life, signer.expires)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(signer.certificate.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - policy.skew)
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
    return certificate.public_bytes(serialization.Encoding.PEM)


def _requested_key(pem: bytes, name: str) -> ec.EllipticCurvePublicKey:
    if len(pem) > MAX_CSR_BYTES:
        raise LeafRefusedError("the certificate signing request is too long")
    try:
        request = x509.load_pem_x509_csr(pem)
        is_signed = request.is_signature_valid
        key = request.public_key()
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        asked = [(type(n), n.value) for n in names]
    except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension, InvalidSignature) as e:
        raise LeafRefusedError(f"the certificate signing request is malformed: {type(e).__name__}") from None
    except UnsupportedAlgorithm:
        raise LeafRefusedError("the key of the certificate signing request is of an unknown kind") from None
    if not is_signed:
        raise LeafRefusedError("the signature of the certificate signing request is invalid")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise LeafRefusedError("the key of a certificate signing request must be of the curve P-256")
    if asked != [(x509.DNSName, name)]:
        raise LeafRefusedError("the certificate signing request is for another name than that of the token's node")
    return key
