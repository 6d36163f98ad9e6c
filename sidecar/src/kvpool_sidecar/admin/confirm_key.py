"""Operation `confirm-key-forgotten`: this node no longer has the key of a tenant whose blocks were encrypted.

Parameter: `tenant`, its id. Count: keysForgotten, 1. The kubelet brings the new file of keys within about two minutes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol.keys import tenant_tag
from kvpool_sidecar.storage.shared.encrypted import key_ring_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["ConfirmKeyForgotten"]

_LIMIT_S = 180.0
_POLL_S = 1.0
_MAX_TENANT = 512


class ConfirmKeyForgotten:
    """Operation `confirm-key-forgotten`. PoolUnavailableError if the key is still here after three minutes."""

    def __init__(self, secret: bytes, shared: SharedTier | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._shared = shared
        self._clock = clock

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        tenant = params.get("tenant")
        if params.keys() != {"tenant"} or not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_TENANT:
            raise ProtocolError("confirm-key-forgotten: set tenant only, a name")
        ring = key_ring_of(self._shared.store) if self._shared is not None else None
        tag, end = tenant_tag(self._secret, tenant), self._clock() + _LIMIT_S
        while ring is not None and ring.is_assigned(tag):
            if self._clock() >= end:
                raise PoolUnavailableError("this node still has the tenant's key: was the KVCacheTenant deleted?")
            context.cancelled.wait(_POLL_S)
            context.check()
        context.count("keysForgotten")
