"""Requests of a trace in Mooncake's form, checked line by line: what comes from a file is bounded before it is kept."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BLOCK", "Request", "TraceError", "key_of", "read"]

BLOCK = 512  # tokens
_MAX_LINE = 4 << 20  # characters
_MAX_REQUESTS = 2_000_000
_MAX_BLOCKS = 1 << 16  # of one prompt
_MAX_TOTAL_BLOCKS = 50_000_000  # references to blocks, 8 bytes each
_MAX_NUMBER = 1 << 63
_MAX_TOKENS = 1 << 31


class TraceError(ValueError):
    """A trace that cannot be replayed. The message names the file, the line and the field, never the content."""


class Request(NamedTuple):
    """One prompt: its length, the keys of its blocks in order, and when it came."""

    tokens: int
    keys: list[bytes]
    at: float = 0.0  # seconds


def key_of(number: int) -> bytes:
    """Return a block key that is spread as a digest is."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def read(path: Path) -> list[Request]:
    """Read JSON lines with `timestamp` (ms), `input_length` (tokens) and `hash_ids` (of 512 tokens each). TraceError.

    Other fields are ignored. Requests are put in the order of their times.
    """
    found: list[Request] = []
    keys: dict[int, bytes] = {}
    blocks = 0
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(_MAX_LINE + 1):
                number += 1
                if len(line) > _MAX_LINE:
                    raise TraceError(f"{path}:{number}: the line is longer than {_MAX_LINE} characters")
                if not line.strip():
                    continue
                tokens, ids, at = _fields(line, f"{path}:{number}")
                blocks += len(ids)
                if len(found) >= _MAX_REQUESTS or blocks > _MAX_TOTAL_BLOCKS:
                    raise TraceError(
                        f"{path}:{number}: more than {_MAX_REQUESTS} requests or {_MAX_TOTAL_BLOCKS} blocks"
                    )
                for one in ids:
                    if one not in keys:
                        keys[one] = key_of(one)
                found.append(Request(tokens, [keys[one] for one in ids], at))
    except OSError as e:
        raise TraceError(f"{path}: cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise TraceError(f"{path}: is not UTF-8 text at byte {e.start}") from e
    if not any(request.keys for request in found):
        raise TraceError(f"{path}: has no request with blocks")
    return sorted(found, key=lambda request: request.at)


def _fields(line: str, where: str) -> tuple[int, list[int], float]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{where}: is not JSON") from e
    if not isinstance(row, dict):
        raise TraceError(f"{where}: is not a JSON object")
    tokens, ids, at = row.get("input_length"), row.get("hash_ids"), row.get("timestamp")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens <= _MAX_TOKENS:
        raise TraceError(f"{where}: input_length must be a whole number from 1 to {_MAX_TOKENS}")
    if not isinstance(ids, list) or len(ids) > _MAX_BLOCKS:
        raise TraceError(f"{where}: hash_ids must be a list of at most {_MAX_BLOCKS} numbers")
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < _MAX_NUMBER for one in ids):
        raise TraceError(f"{where}: hash_ids must be whole numbers from 0 to 2**63 - 1")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < _MAX_NUMBER or not math.isfinite(at):
        raise TraceError(f"{where}: timestamp must be milliseconds from 0 on")
    return tokens, ids, at / 1e3
