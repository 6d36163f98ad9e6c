"""Keys of the encrypted shared tier, as the pool's Secret contains them. Pure, but for the random keys it is given.

One default key for namespaces without a KVCacheTenant, and one for each KVCacheTenant. A KVCacheTenant that no longer
exists loses its key: its blocks can never be decrypted again, wherever a copy of them is. The format is that of
kvpool_sidecar.storage.shared.key_ring.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvpool.protocol.keys import shared_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["next_keys"]

_VERSION = 1


def next_keys(text: str, tenants: Iterable[str], generate: Callable[[], bytes]) -> str:
    """Return the keys for these tenants (ids): known ones stay, missing ones are generated, others are dropped.

    `text`: the present content of the file; malformed: all keys are new. `generate` returns 32 random bytes.
    """
    keys, assigned, default = _parse(text)
    kept: dict[str, str] = {}

    def keep(name: str) -> str:
        key = bytes.fromhex(keys[name]) if name in keys else generate()
        name = shared_key_id(key).hex()
        kept[name] = key.hex()
        return name

    value = {
        "version": _VERSION,
        "default": keep(default),
        "tenants": {tenant: keep(assigned.get(tenant, "")) for tenant in sorted(tenants)},
        "keys": kept,
    }
    return json.dumps(value, sort_keys=True)


def _parse(text: str) -> tuple[dict[str, str], dict[str, str], str]:
    try:
        value: dict[str, Any] = json.loads(text)
        keys = {str(name): str(key) for name, key in value["keys"].items()}
        assigned = {str(tenant): str(name) for tenant, name in value["tenants"].items()}
        if any(shared_key_id(bytes.fromhex(key)).hex() != name for name, key in keys.items()):
            return {}, {}, ""
        return keys, assigned, str(value["default"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, {}, ""
