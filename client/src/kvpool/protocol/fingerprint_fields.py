"""Short digests of a fingerprint's inputs, one per field, never a value.

Engines with different fingerprints share nothing. From these digests the pool's status names the fields that differ.
Pure and thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

__all__ = ["MAX_FIELDS", "MAX_NAME", "field_digests"]

MAX_FIELDS = 48
MAX_NAME = 48
_DEPTH = 3
_ODD = re.compile(r"[^a-z0-9_.]")


def field_digests(inputs: Mapping[str, object]) -> dict[str, str]:
    """Name of each field (`sizes.tp_size` for one inside another) -> 8 hex digits over its JSON value.

    At most MAX_FIELDS of them, names of at most MAX_NAME characters from [a-z0-9_.]. Never raises for values that
    keys.fingerprint takes. Too short as a proof: they only locate a difference that the fingerprint proves.
    """
    digests: dict[str, str] = {}
    for name, value in _flat("", inputs, _DEPTH):
        if len(digests) == MAX_FIELDS:
            break
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
        digests[_ODD.sub("_", name.lower())[:MAX_NAME] or "_"] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return digests


def _flat(prefix: str, inputs: Mapping[str, object], depth: int) -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in sorted(inputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, Mapping) and value and depth > 1:
            flat += _flat(f"{prefix}{name}.", value, depth - 1)
        else:
            flat.append((f"{prefix}{name}", value))
    return flat
