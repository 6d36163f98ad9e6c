"""Parts of JSON requests to the sidecar's HTTP port: the object, names, hexadecimal values, the bearer token. Pure."""

from __future__ import annotations

import hmac
import json
import re
from typing import Any, Final

from kvpool.errors import ProtocolError

__all__ = ["MAX_BODY", "MAX_PART", "decode_request", "is_bearer", "read_hex", "read_tenant"]

MAX_BODY: Final = 512 << 10
"""Bytes of a request's body."""
MAX_PART: Final = 1024
"""Bytes of a block id's part in a request; more than a block header holds, for engines without block names there."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def decode_request(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. ProtocolError if it is none, or too large."""
    try:
        value = json.loads(body) if len(body) <= MAX_BODY else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ProtocolError("the body is a JSON object of at most 512 KiB")
    return value


def read_tenant(value: object) -> str:
    """Return the name of a namespace. ProtocolError if it is none."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ProtocolError("tenant is the name of a namespace")
    return value


def read_hex(text: object, what: str, least: int, most: int) -> bytes:
    """Return `least` to `most` bytes of hexadecimal text. ProtocolError, which names `what`, if it is none."""
    try:
        data = bytes.fromhex(text) if isinstance(text, str) and len(text) <= 2 * most else None
    except ValueError:
        data = None
    if data is None or not least <= len(data) <= most:
        raise ProtocolError(f"{what} is {least} to {most} bytes in hex")
    return data


def is_bearer(authorization: str, token: str) -> bool:
    """Return whether an Authorization header has this bearer token, in constant time."""
    scheme, _, shown = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())
