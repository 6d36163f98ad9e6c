"""Checked fields of the JSON in HELLO and its reply. ProtocolError for anything of a wrong type or size; all pure."""

from __future__ import annotations

import re
from typing import Any

from kvpool.config import MAX_READS_FROM
from kvpool.errors import ProtocolError
from kvpool.protocol.fingerprint_fields import MAX_FIELDS, MAX_NAME

__all__ = ["digests", "hex_field", "int_field", "tags", "text_field"]

_FIELD_NAME = re.compile(rf"[a-z0-9_.]{{1,{MAX_NAME}}}")
_FIELD_DIGEST = re.compile(r"[0-9a-f]{8}")


def tags(value: Any) -> tuple[bytes, ...]:
    """Return the tenant tags in a list."""
    if not isinstance(value, list) or len(value) > MAX_READS_FROM:
        raise ProtocolError(f"readable_tags is not a list of at most {MAX_READS_FROM}")
    return tuple(hex_field({"a readable tag": tag}, "a readable tag", 16) for tag in value)


def hex_field(value: dict[str, Any], name: str, size: int) -> bytes:
    """Return the bytes of a field in hex, exactly `size`."""
    text = value.get(name)
    try:
        data = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * size else b""
    except ValueError:
        data = b""
    if len(data) != size:  # also for white space, which fromhex skips
        raise ProtocolError(f"{name} is not {size} bytes in hex")
    return data


def text_field(value: dict[str, Any], name: str, limit: int) -> str:
    """Return a text; empty if it is absent."""
    text = value.get(name, "")
    if not isinstance(text, str) or len(text) > limit:
        raise ProtocolError(f"{name} is not a text of at most {limit} characters")
    return text


def digests(value: Any) -> dict[str, str]:
    """Return the digests of a fingerprint's fields."""
    if not isinstance(value, dict) or len(value) > MAX_FIELDS:
        raise ProtocolError(f"fields are not an object of at most {MAX_FIELDS} members")
    for name, text in value.items():
        if not _FIELD_NAME.fullmatch(name) or not isinstance(text, str) or not _FIELD_DIGEST.fullmatch(text):
            raise ProtocolError("fields are not names and digests")
    return value


def int_field(value: dict[str, Any], name: str, limit: int) -> int:
    """Return a number from 0 to `limit`."""
    number = value.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= limit:
        raise ProtocolError(f"{name} is not a number from 0 to {limit}")
    return number
