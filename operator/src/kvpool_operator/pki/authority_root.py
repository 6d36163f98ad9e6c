"""Root of the pools' CAs: one random value, in the operator's Secret, from which the keys of all of them are derived.

A key is derived for a namespace, a pool's name, its ID, and the time from which its CA is valid. So the CA's
certificate, which is public and stored with the pool, is enough to derive its key again, and a copy of that certificate
in another pool's Secret yields no key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric import ec

from kvpool_operator.pki.certificates import CertPolicy, new_authority

if TYPE_CHECKING:
    from kvpool_operator.pki.certificates import CertificateAuthority

__all__ = ["ISSUER_NAME", "AuthorityRoot", "PoolIdentity"]

ISSUER_NAME: Final = "issuer.kvpool"
"""DNS name in the certificate of the issuing server. It is never resolved."""
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BYTES: Final = 32


@dataclass(frozen=True)
class PoolIdentity:
    """What the key of a pool's CA is bound to."""

    namespace: str
    name: str
    pool_id: str


@dataclass(frozen=True)
class AuthorityRoot:
    """Derives the keys of CAs. Pure."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != _BYTES:
            raise ValueError(f"the root of the CAs must have {_BYTES} bytes")

    @classmethod
    def generate(cls) -> AuthorityRoot:
        """Return a new random root."""
        return cls(secrets.token_bytes(_BYTES))

    def pool_key(self, pool: PoolIdentity, valid_from: datetime) -> ec.EllipticCurvePrivateKey:
        """Return the key of the pool's CA that is valid from `valid_from` (UTC, whole seconds)."""
        return self._key("pool", pool.namespace, pool.name, pool.pool_id, str(int(valid_from.timestamp())))

    def issuer_authority(self) -> CertificateAuthority:
        """Return the CA of the issuing server. Each call makes another copy of its certificate for the same key."""
        start = datetime(2020, 1, 1, tzinfo=UTC)
        policy = CertPolicy(ca_life=timedelta(days=36525))
        return new_authority("kvpool issuer", (ISSUER_NAME,), start, policy, self._key("issuer"))

    def _key(self, *purpose: str) -> ec.EllipticCurvePrivateKey:
        # the parts cannot contain a zero byte, so that no two lists of parts are joined to the same text
        info = hashlib.sha512("\0".join(purpose).encode()).digest()
        digest = b"".join(hmac.digest(self.value, info + bytes([n]), "sha256") for n in range(2))
        return ec.derive_private_key(int.from_bytes(digest, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
