"""The URL of a user's own index, from their Secret, taken apart so that the password stays in a Secret. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from kvpool_operator.desired.env import ExternalUrl

if TYPE_CHECKING:
    from kvpool_operator.cluster import Manifest

__all__ = ["read_external"]

_FORM = "redis://user:password@host:port/db or rediss://..."


def read_external(secret: Manifest | None, name: str, key: str) -> ExternalUrl | str:
    """The URL, or a sentence that says what is wrong without repeating any of it."""
    if secret is None:
        return f"Secret {name} does not exist: create it with the key {key} holding {_FORM}"
    try:
        text = base64.b64decode((secret.get("data") or {})[key], validate=True).decode().strip()
    except KeyError:
        return f"Secret {name} has no key {key}: add it, holding {_FORM}"
    except (ValueError, TypeError, binascii.Error):
        return f"key {key} of Secret {name} is not text: it should hold {_FORM}"
    try:
        parts = urlsplit(text)
        port = parts.port or 6379
    except ValueError:
        return f"key {key} of Secret {name} is not a URL: it should hold {_FORM}"
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or len(text) > 2048:
        return f"key {key} of Secret {name} should hold {_FORM}"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return ExternalUrl(
        url=urlunsplit((parts.scheme, f"{host}:{port}", parts.path or "/0", "", "")),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )
