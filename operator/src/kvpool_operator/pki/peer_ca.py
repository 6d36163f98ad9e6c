"""CA of a pool's sidecars, stored as files in the pool's Secret.

Sidecars sign their own leaf certificates with it (kvpool_sidecar.peers.ca). Validity and overlap are those of
kvpool_operator.pki.certificates: one year, renewed after two thirds; the new CA signs when every node has read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.pki.certificates import CertPolicy, TrustBundle, next_authorities

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

__all__ = ["peer_authorities", "peer_files"]

_FILES: Final = {
    "peer-ca.crt": "ca.crt",
    "peer-ca.key": "ca.key",
    "peer-previous.crt": "previous.crt",
    "peer-previous.key": "previous.key",
}
_POLICY: Final = CertPolicy()


def peer_authorities(stored: Mapping[str, str]) -> TrustBundle | None:
    """Parse the CAs in the Secret. None if they are absent or invalid."""
    return TrustBundle.from_secret({there: stored[here].encode() for here, there in _FILES.items() if stored.get(here)})


def peer_files(stored: Mapping[str, str], now: datetime, policy: CertPolicy = _POLICY) -> dict[str, str]:
    """Return the files that the Secret should contain, PEM by name. They equal `stored` if no change is needed."""
    known = peer_authorities(stored)
    wanted = next_authorities(known, "kvpool peers", ("kvpool",), now, policy)
    if wanted is known:
        return dict(stored)
    data = wanted.to_secret()
    return {here: data[there].decode() for here, there in _FILES.items() if there in data}
