"""The Secret in the operator's namespace with the root of all pools' CAs. The first replica creates it."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final

from kvpool_operator.desired.labels import MANAGED_BY
from kvpool_operator.errors import ApiUnavailableError, ConflictError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.pki.authority_root import AuthorityRoot

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import ApiClient

__all__ = ["load_root"]

_KEY: Final = "root"


async def load_root(api: ApiClient, namespace: str, name: str) -> AuthorityRoot:
    """Read the root, or create it. ApiUnavailableError if the Secret is damaged: it is never replaced silently."""
    target = ObjectRef("Secret", namespace, name)
    for _ in range(2):
        live = await api.get(target)
        if live is not None:
            return _parse(live, target)
        made = AuthorityRoot.generate()
        try:
            await api.create(
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {
                        "name": name,
                        "namespace": namespace,
                        "labels": {
                            "app.kubernetes.io/name": "kvpool",
                            "app.kubernetes.io/component": "authority",
                            "app.kubernetes.io/managed-by": MANAGED_BY,
                        },
                    },
                    "type": "Opaque",
                    "data": {_KEY: base64.b64encode(made.value).decode()},
                }
            )
        except ConflictError:
            continue  # another replica was first
        return made
    raise ApiUnavailableError(f"{target} can be neither read nor created")


def _parse(live: dict[str, object], target: ObjectRef) -> AuthorityRoot:
    data = live.get("data")
    try:
        return AuthorityRoot(base64.b64decode(data[_KEY], validate=True))  # type: ignore[index]
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise ApiUnavailableError(
            f"{target} does not contain the root of the CAs: restore it, or delete it, which replaces every CA"
        ) from None
