"""Files of keys for encrypted tiers."""

from __future__ import annotations

import json

from kvpool.protocol.keys import shared_key_id

ONE, OTHER = b"1" * 32, b"2" * 32


def ring_text(default: bytes | None, *known: bytes, tenants: dict[str, bytes] | None = None) -> bytes:
    return json.dumps(
        {
            "version": 1,
            "default": shared_key_id(default).hex() if default else "",
            "tenants": {tenant: shared_key_id(one).hex() for tenant, one in (tenants or {}).items()},
            "keys": {shared_key_id(one).hex(): one.hex() for one in known},
        }
    ).encode()
