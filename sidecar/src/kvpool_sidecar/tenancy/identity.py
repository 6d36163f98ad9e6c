"""Identity of a caller: derived from the socket of its connection, never from the caller. Pure."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import keys
from kvpool.protocol.hint import session_key

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Identity", "Tenant", "is_allowed"]

_REMEMBERED = 1 << 13  # block ids: a load comes after its lookup; about 2 MB
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID = re.compile(r"[0-9a-zA-Z-]{1,64}")


class Identity(NamedTuple):
    """A pod, as the API server names it."""

    uid: str
    namespace: str
    pod: str
    service_account: str

    @classmethod
    def from_message(cls, value: dict[str, Any]) -> Identity:
        """ProtocolError unless all fields are names as Kubernetes gives them."""
        uid, *texts = (value.get(name) for name in cls._fields)
        if not isinstance(uid, str) or not _UID.fullmatch(uid):
            raise ProtocolError("not a pod's uid")
        for name, text in zip(cls._fields[1:], texts, strict=True):
            if not isinstance(text, str) or not _NAME.fullmatch(text):
                raise ProtocolError(f"not a Kubernetes name: {name}")
        return cls(uid, *(str(text) for text in texts))


class Tenant:
    """Block keys of one tenant. Holds the pool secret, which is never shown to a client.

    `name` is that of a namespace, or the id of a tenant with several (kvpool_sidecar.tenancy.mapping).
    """

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret = secret
        self.name = name
        self.tag = keys.tenant_tag(secret, name)
        self.salt_key = keys.salt_key(secret, self.tag)
        self.session_key = session_key(secret, self.tag)
        self._remembered = functools.lru_cache(_REMEMBERED)(self._key)

    def block_key(self, block_id: bytes) -> bytes:
        """The block's key in the pool."""
        return self._remembered(block_id)

    def _key(self, block_id: bytes) -> bytes:
        return keys.block_key(self._secret, self.name, block_id)


def is_allowed(identity: Identity, allowed_namespaces: Sequence[str]) -> bool:
    """Return whether the pool serves this pod's namespace."""
    return "*" in allowed_namespaces or identity.namespace in allowed_namespaces
