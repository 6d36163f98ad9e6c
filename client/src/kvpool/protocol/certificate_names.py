"""The DNS names in the certificates of a pool's parts. Pure.

Digests, because a node may be called anything; below `kvpool`, for nothing else may be vouched for by the pool's
authority (kvpool_operator.pki.peer_ca).
"""

from __future__ import annotations

import hashlib

__all__ = ["node_name", "operator_name"]


def node_name(pool_uid: str, node: str) -> str:
    """In the certificate of the sidecar on `node`."""
    return f"n{_digest(node)}.p{_digest(pool_uid)}.kvpool"


def operator_name(pool_uid: str) -> str:
    """In the certificate by which the operator gives orders to the pool's sidecars; no node is called so."""
    return f"operator.p{_digest(pool_uid)}.kvpool"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
