"""The authority that a pool's sidecars prove themselves by: its files in the pool's Secret. Pure.

Sidecars sign their own leaves with it (kvpool_sidecar.peers.ca). The life of an authority and the overlap of
two are those of kvpool_operator.pki.certificates: a year, a new one at two thirds, which signs once every node has
read it.
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
    """Those in the Secret; None when there is none, or none that can be used."""
    return TrustBundle.from_secret({there: stored[here].encode() for here, there in _FILES.items() if stored.get(here)})


def peer_files(stored: Mapping[str, str], now: datetime, policy: CertPolicy = _POLICY) -> dict[str, str]:
    """What the Secret should hold now, PEM by name; `stored` itself when nothing is to be done."""
    known = peer_authorities(stored)
    wanted = next_authorities(known, "kvpool peers", ("kvpool",), now, policy)
    if wanted is known:
        return dict(stored)
    data = wanted.to_secret()
    return {here: data[there].decode() for here, there in _FILES.items() if there in data}
