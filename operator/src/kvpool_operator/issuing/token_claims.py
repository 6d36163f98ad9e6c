"""What a reviewed token says about its bearer: the service account, and the pod and node that it is bound to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.desired.daemonset import ISSUER_AUDIENCE
from kvpool_operator.errors import LeafRefusedError

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

__all__ = ["AUDIENCE", "SidecarClaims", "read_claims", "token_review"]

AUDIENCE: Final = ISSUER_AUDIENCE
_ACCOUNT: Final = "system:serviceaccount:"
_SIDECAR: Final = "-sidecar"
_EXTRA: Final = "authentication.kubernetes.io/"


@dataclass(frozen=True)
class SidecarClaims:
    """The sidecar pod that presented a token."""

    namespace: str
    pool: str
    pod: str
    pod_uid: str
    node: str
    """Empty on Kubernetes 1.29, whose tokens do not name the node; the pod says it."""


def token_review(token: str) -> Manifest:
    """Return the TokenReview to create."""
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "metadata": {"name": ""},
        "spec": {"token": token, "audiences": [AUDIENCE]},
    }


def read_claims(review: Manifest) -> SidecarClaims:
    """Return the claims. LeafRefusedError unless the token is valid, for AUDIENCE, and bound to a sidecar's pod."""
    status: dict[str, Any] = review.get("status") or {}
    if status.get("authenticated") is not True or AUDIENCE not in (status.get("audiences") or []):
        raise LeafRefusedError("the token is not valid for this audience")
    user: dict[str, Any] = status.get("user") or {}
    username = str(user.get("username") or "")
    namespace, _, account = username.removeprefix(_ACCOUNT).partition(":")
    if not username.startswith(_ACCOUNT) or not account.endswith(_SIDECAR) or not account.removesuffix(_SIDECAR):
        raise LeafRefusedError("the token is not that of a sidecar's service account")
    extra: dict[str, Any] = user.get("extra") or {}
    pod, uid = _one(extra, "pod-name"), _one(extra, "pod-uid")
    if not pod or not uid:
        raise LeafRefusedError("the token is not bound to a pod")
    return SidecarClaims(namespace, account.removesuffix(_SIDECAR), pod, uid, _one(extra, "node-name"))


def _one(extra: dict[str, Any], name: str) -> str:
    values = extra.get(_EXTRA + name)
    return values[0] if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) else ""
