"""Decides on one request for a leaf certificate: who asks, for which pool and node, and which CA signs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvpool.protocol.certificate_names import node_name
from kvpool_operator.api.annotations import LABEL_SOCKETS, SOCKETS_FROM_AGENT
from kvpool_operator.desired import labels, names
from kvpool_operator.desired.inputs import PoolSecret
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.errors import LeafRefusedError
from kvpool_operator.issuing.leaf_request import sign_request
from kvpool_operator.issuing.token_claims import SidecarClaims, read_claims, token_review
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.pki.authority_root import PoolIdentity
from kvpool_operator.pki.peer_ca import PEER_POLICY, derived_keys, peer_authorities

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.pki.authority_root import AuthorityRoot

__all__ = ["LeafIssuer"]


class LeafIssuer:
    """Works in every replica, leading or not: it reads what it needs for each request. For one event loop."""

    def __init__(
        self, api: ApiClient, root: AuthorityRoot, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._api = api
        self._root = root
        self._now = now

    async def issue(self, token: str, csr: bytes) -> bytes:
        """Return the certificate, PEM, of the node on which the token's pod runs.

        LeafRefusedError: the token or the request is not acceptable. OperatorError: the API server failed.
        """
        claims = read_claims(await self._api.create(token_review(token)))
        node = await self._node_of(claims)
        live = await self._api.get(ObjectRef("Secret", claims.namespace, names.secret(claims.pool)))
        if live is None or not labels.is_ours(live, claims.pool):
            raise LeafRefusedError("the pool of this service account does not exist")
        secret = read_secret(live, PoolSecret("", "", ""))
        keys = derived_keys(secret.peer_files, self._root, PoolIdentity(claims.namespace, claims.pool, secret.pool_id))
        authorities = peer_authorities({**secret.peer_files, **keys})
        if authorities is None:
            raise LeafRefusedError("the CA of the pool was not made by this operator; it is replaced soon")
        now = self._now()
        signer = authorities.signer(now, PEER_POLICY)
        return sign_request(csr, node_name(secret.pool_id, node), signer, now, PEER_POLICY)

    async def _node_of(self, claims: SidecarClaims) -> str:
        """Return the node of the token's pod, which must be a sidecar of the operator's DaemonSet.

        The chart's admission policies let only the DaemonSet controller create pods with LABEL_SOCKETS.
        """
        found = await self._api.list(
            "Pod", namespace=claims.namespace, fields=f"metadata.name={claims.pod}", fresh=True
        )
        pod = next((p for p in found if (p.get("metadata") or {}).get("uid") == claims.pod_uid), None)
        if pod is None:
            raise LeafRefusedError("the pod of the token does not exist")
        if (pod["metadata"].get("labels") or {}).get(LABEL_SOCKETS) != SOCKETS_FROM_AGENT:
            raise LeafRefusedError("the pod of the token is not a sidecar of the operator")
        node = str((pod.get("spec") or {}).get("nodeName") or "")
        if not node or claims.node not in ("", node):
            raise LeafRefusedError("the pod of the token runs on another node than the token names")
        return node
