"""CA and server certificate of a pool's managed index, stored as files in the pool's Secret.

The CA may sign for the Service of the index only (name constraint). It is renewed like the CA of the sidecars: a new
one is trusted before it signs. The server certificate is valid for 90 days and is renewed after two thirds of them, so
the operator may be away for a month.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from kvpool_operator.pki.certificates import (
    CertPolicy,
    LeafCertificate,
    TrustBundle,
    issue_leaf,
    leaf_due,
    next_authorities,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from kvpool_operator.pki.certificates import CertificateAuthority

__all__ = ["INDEX_CA", "INDEX_FILES", "INDEX_SERVER_CERT", "INDEX_SERVER_KEY", "index_files"]

INDEX_CA: Final = "managed-index-ca.crt"
"""All CAs that sidecars trust for the index."""
INDEX_SERVER_CERT: Final = "managed-index-server.crt"
INDEX_SERVER_KEY: Final = "managed-index-server.key"
_AUTHORITIES: Final = {
    "managed-index-current.crt": "ca.crt",
    "managed-index-current.key": "ca.key",
    "managed-index-previous.crt": "previous.crt",
    "managed-index-previous.key": "previous.key",
}
INDEX_FILES: Final = (INDEX_CA, INDEX_SERVER_CERT, INDEX_SERVER_KEY, *_AUTHORITIES)
"""All names of files in the Secret."""
_POLICY: Final = CertPolicy(leaf_life=timedelta(days=90))


def index_files(
    stored: Mapping[str, str], dns_names: tuple[str, ...], now: datetime, policy: CertPolicy = _POLICY
) -> dict[str, str]:
    """Return the files that the Secret should contain, PEM by name. They equal `stored` if no change is needed."""
    known = TrustBundle.from_secret(
        {there: stored[here].encode() for here, there in _AUTHORITIES.items() if stored.get(here)}
    )
    bundle = next_authorities(known, "kvpool index", dns_names, now, policy)
    signer = bundle.signer(now, policy)
    leaf = _stored_leaf(stored, signer, dns_names)
    if leaf is None or leaf_due(leaf, signer, now, policy):
        leaf = issue_leaf(signer, dns_names, now, policy)
    data = bundle.to_secret()
    return {
        INDEX_CA: bundle.bundle(now).decode(),
        INDEX_SERVER_CERT: leaf.certificate_pem.decode(),
        INDEX_SERVER_KEY: leaf.key_pem.decode(),
        **{here: data[there].decode() for here, there in _AUTHORITIES.items() if there in data},
    }


def _stored_leaf(
    stored: Mapping[str, str], signer: CertificateAuthority, dns_names: tuple[str, ...]
) -> LeafCertificate | None:
    """Return the stored certificate if this CA signed it for these names."""
    pem, key = stored.get(INDEX_SERVER_CERT, "").encode(), stored.get(INDEX_SERVER_KEY, "").encode()
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.verify_directly_issued_by(signer.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature):
        return None
    if not key or tuple(names.get_values_for_type(x509.DNSName)) != dns_names:
        return None
    return LeafCertificate(pem, key, certificate.not_valid_before_utc, certificate.not_valid_after_utc, signer)
