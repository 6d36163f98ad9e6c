"""Hit rate of a trace by capacity, with the eviction policies that sidecars run (`kvpool_sidecar.eviction`).

A trace is JSON lines in Mooncake's form: `timestamp` (milliseconds), `input_length` (tokens), `hash_ids` (one number
for each 512 tokens, equal for equal prefixes). The whole pool is replayed as one table, between the watermarks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

TRACE_BLOCK = 512
"""Tokens of a block of a trace."""
HIGH, LOW = 85, 75
"""Watermarks of a pool's default eviction, in percent."""
POINTS = 8

_MAX_LINE = 2**22
_MAX_BLOCKS = 20_000_000


@dataclass(frozen=True)
class Trace:
    """Prompts in the order of their times: tokens, and keys of their blocks."""

    prompts: tuple[tuple[int, tuple[bytes, ...]], ...]
    unique: int
    """Different blocks."""
    times: tuple[float, ...] = ()
    """When each prompt came, in seconds."""

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(tokens for tokens, _ in self.prompts)


@dataclass(frozen=True)
class Point:
    """Token hit rate at one capacity."""

    capacity: int
    """Bytes of the pool."""
    blocks: int
    hit_rate: float
    """From 0 to 1."""


def read_trace(path: Path) -> Trace:
    """Return the trace of a file. Raises UsageError, which names the line and never its content."""
    found: list[tuple[float, int, tuple[bytes, ...]]] = []
    keys: dict[int, bytes] = {}
    total = 0
    try:
        with path.open(encoding="utf-8") as lines:
            number = 0
            while line := lines.readline(_MAX_LINE + 1):
                number += 1
                if not line.strip():
                    continue
                at, tokens, ids = _prompt(line, f"{path}, line {number}")
                total += len(ids)
                if total > _MAX_BLOCKS:
                    raise UsageError(f"{path} has more than {_MAX_BLOCKS:,} blocks in its prompts")
                for one in ids:
                    if one not in keys:
                        keys[one] = hashlib.blake2b(one.to_bytes(8, "little"), digest_size=32).digest()
                found.append((at, tokens, tuple(keys[one] for one in ids)))
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} cannot be read as a trace: {e}") from e
    if not keys:
        raise UsageError(f"{path} has no prompt with blocks")
    found.sort(key=lambda prompt: prompt[0])
    times = tuple(at / 1000 for at, _, _ in found)
    return Trace(tuple((tokens, blocks) for _, tokens, blocks in found), len(keys), times)


def capacities(trace: Trace, block_bytes: int, sweep: tuple[int, int] | None = None) -> list[int]:
    """Return doubling capacities in bytes: those of a sweep, or the last that holds every block and those before it."""
    if sweep is not None:
        first, last = sweep
        found = [first]
        while found[-1] * 2 <= last and len(found) < 4 * POINTS:
            found.append(found[-1] * 2)
        return found
    largest = block_bytes
    while largest * HIGH // 100 < trace.unique * block_bytes:
        largest *= 2
    return [largest >> n for n in range(POINTS - 1, -1, -1) if largest >> n >= block_bytes]


def replay(trace: Trace, policy: str, size: int, block_bytes: int) -> Point:
    """Return the hit rate at a capacity in bytes. Raises UsageError where the sidecar's package is not installed."""
    try:
        from kvpool_sidecar.eviction import Entry, create_policy
    except ImportError as e:
        raise UsageError("replaying a trace needs the sidecar's package: pip install 'kvpool-cli[trace]'") from e
    blocks = max(1, size // block_bytes)
    table = create_policy(policy, blocks * TRACE_BLOCK)
    entry = Entry(TRACE_BLOCK, TRACE_BLOCK, 0.0)
    most, rest = max(1, blocks * HIGH // 100), blocks * LOW // 100
    hits = 0
    for tokens, keys in trace.prompts:
        found = next((n for n, key in enumerate(keys) if key not in table), len(keys))
        table.observe_sequence(keys)
        for key in keys:
            if not table.touch(key, 0.0) and key not in table:
                table.add(key, entry)
        if len(table) > most:
            table.pop_victims(0, len(table) - rest, at_least=len(table) - rest)
        hits += min(found * TRACE_BLOCK, tokens)
    return Point(size, blocks, hits / trace.tokens)


def ceiling(trace: Trace) -> float:
    """Return the hit rate of a pool that never evicts."""
    seen: set[bytes] = set()
    hits = 0
    for tokens, keys in trace.prompts:
        found = next((n for n, key in enumerate(keys) if key not in seen), len(keys))
        hits += min(found * TRACE_BLOCK, tokens)
        seen.update(keys)
    return hits / trace.tokens


def _prompt(line: str, where: str) -> tuple[float, int, list[int]]:
    if len(line) > _MAX_LINE:
        raise UsageError(f"{where} is longer than {_MAX_LINE} characters")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{where} is not JSON") from e
    at, tokens, ids = (
        (row.get(n) for n in ("timestamp", "input_length", "hash_ids")) if isinstance(row, dict) else (0, 0, 0)
    )
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 2**31:
        raise UsageError(f"{where} has no input_length from 1 on")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 2**63:
        raise UsageError(f"{where} has no timestamp from 0 on")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**63 for one in ids):
        raise UsageError(f"{where} has no hash_ids, a list of whole numbers from 0 on")
    return float(at), tokens, ids
