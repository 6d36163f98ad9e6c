"""What may be told of the facts behind a fingerprint: a short digest for each field, never a value.

Two engines whose fingerprints differ share nothing. From these digests the pool's status names the fields that differ.
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
    keys.fingerprint takes. Too short to prove anything: they only tell apart, and name, what the fingerprint proves.
    """
    found: dict[str, str] = {}
    for name, value in _flat("", inputs, _DEPTH):
        if len(found) == MAX_FIELDS:
            break
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
        found[_ODD.sub("_", name.lower())[:MAX_NAME] or "_"] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return found


def _flat(prefix: str, inputs: Mapping[str, object], depth: int) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in sorted(inputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, Mapping) and value and depth > 1:
            found += _flat(f"{prefix}{name}.", value, depth - 1)
        else:
            found.append((f"{prefix}{name}", value))
    return found
