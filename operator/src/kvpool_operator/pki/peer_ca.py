"""CA of a pool's sidecars: its certificate is stored in the pool's Secret, its key is derived by the operator.

Sidecars obtain leaf certificates from the operator (kvpool_operator.issuing). The CA is valid for one year and renewed
after two thirds. A new CA signs when every node has read its certificate; the previous one is trusted until its last
leaf has expired.

Secrets of earlier builds contain the CA's key, which every sidecar could read. It signs until all sidecars of the pool
obtain their certificates from the operator; then the CA is replaced, and its key is removed from the Secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from cryptography import x509

from kvpool_operator.pki.certificates import CertificateAuthority, CertPolicy, TrustBundle, new_authority

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity

__all__ = ["ISSUER_CA", "PEER_POLICY", "PeerFiles", "derived_keys", "peer_authorities", "peer_files"]

_FILES: Final = {
    "peer-ca.crt": "ca.crt",
    "peer-ca.key": "ca.key",
    "peer-previous.crt": "previous.crt",
    "peer-previous.key": "previous.key",
}
ISSUER_CA: Final = "issuer-ca.crt"
PEER_POLICY: Final = CertPolicy(leaf_life=timedelta(days=3))
"""A leaf is renewed after two days, so that the operator may be absent for a day at any time."""


@dataclass(frozen=True)
class PeerFiles:
    """Files of a pool's CA, PEM by name."""

    published: Mapping[str, str]
    """What the pool's Secret contains: certificates, and keys of earlier builds until they are replaced."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Derived keys, which are stored nowhere."""


def peer_authorities(files: Mapping[str, str]) -> TrustBundle | None:
    """Parse the CAs, with their keys. None if they are absent or invalid."""
    return TrustBundle.from_secret({there: files[here].encode() for here, there in _FILES.items() if files.get(here)})


def derived_keys(stored: Mapping[str, str], root: AuthorityRoot, pool: PoolIdentity) -> dict[str, str]:
    """Return the keys of those stored certificates that were made from this root for this pool."""
    found = {}
    for certificate_name, key_name in (("peer-ca.crt", "peer-ca.key"), ("peer-previous.crt", "peer-previous.key")):
        certificate = _certificate(stored.get(certificate_name))
        if certificate is None:
            continue
        key = root.pool_key(pool, certificate.not_valid_before_utc)
        if key.public_key() == certificate.public_key():
            found[key_name] = CertificateAuthority(certificate, key).key_pem.decode()
    return found


def peer_files(
    stored: Mapping[str, str],
    root: AuthorityRoot,
    pool: PoolIdentity,
    now: datetime,
    *,
    is_rolled: bool = True,
    policy: CertPolicy = PEER_POLICY,
) -> PeerFiles:
    """Return the files that the pool should have; `published` equals `stored` if no change is needed.

    `is_rolled`: all sidecars obtain their certificates from the operator.
    """
    keys = derived_keys(stored, root, pool)
    known = peer_authorities({**stored, **keys})
    if known is None or known.current.expires <= now or _is_due(known, keys, now, policy, is_rolled=is_rolled):
        start = now.replace(microsecond=0)
        made = new_authority("kvpool peers", ("kvpool",), start, policy, root.pool_key(pool, start - policy.skew))
        published = {"peer-ca.crt": made.certificate_pem.decode()}
        previous = _certificate(stored.get("peer-ca.crt"))
        if previous is not None and previous.not_valid_after_utc > now:
            published["peer-previous.crt"] = stored["peer-ca.crt"]
            if known is not None and "peer-ca.key" not in keys:
                published["peer-previous.key"] = stored["peer-ca.key"]
    else:
        published = {name: text for name, text in stored.items() if name in _FILES and name not in keys}
        made_at = known.current.certificate.not_valid_before_utc + policy.skew
        if "peer-ca.key" in keys and now >= made_at + 2 * policy.settle:
            published.pop("peer-previous.key", None)
            previous = _certificate(stored.get("peer-previous.crt"))
            is_over = now >= made_at + policy.settle + policy.leaf_life
            if previous is None or is_over or previous.not_valid_after_utc <= now:
                published.pop("peer-previous.crt", None)
    published[ISSUER_CA] = stored.get(ISSUER_CA) or ""
    issuer = _certificate(published[ISSUER_CA])
    wanted = root.issuer_authority()
    if issuer is None or issuer.public_key() != wanted.certificate.public_key():
        published[ISSUER_CA] = wanted.certificate_pem.decode()
    return PeerFiles(published, derived_keys(published, root, pool))


def _is_due(known: TrustBundle, keys: Mapping[str, str], now: datetime, policy: CertPolicy, *, is_rolled: bool) -> bool:
    """Whether another CA is needed. One whose key the nodes know is needed for as long as they sign by it."""
    if "peer-ca.key" not in keys:
        return is_rolled
    start = known.current.certificate.not_valid_before_utc + policy.skew
    return now >= start + (known.current.expires - start) * 2 / 3


def _certificate(pem: str | None) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate((pem or "").encode())
    except ValueError:
        return None
