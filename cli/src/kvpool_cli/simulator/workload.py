"""Requests of a simulation: the prompts of a trace, in copies that share the common beginning of prompts. Pure."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_cli.planner.replay import Trace

__all__ = ["SimulatedRequest", "make_requests", "reuse_bound"]

_COMMON_SHARE = 0.05
_COMMON_PROMPTS = 32
_SPREAD_S = 60.0


class SimulatedRequest(NamedTuple):
    """One prompt. `session`: the first block that few other prompts have, as routers identify a session."""

    at: float
    tokens: int
    keys: tuple[bytes, ...]
    session: bytes


def make_requests(trace: Trace, copies: int = 1, seed: int = 1) -> list[SimulatedRequest]:
    """Return the prompts of `copies` independent populations of users, in the order of their times.

    Blocks of more than a twentieth of the prompts, and of at least 32, are the same in all copies: system prompts.
    """
    counts = Counter(key for _, keys in trace.prompts for key in keys)
    least = max(_COMMON_PROMPTS, int(len(trace.prompts) * _COMMON_SHARE))
    common = {key for key, count in counts.items() if count >= least}
    first = trace.times[0] if trace.times else 0.0
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    shifts = [rng.uniform(0, _SPREAD_S) if n else 0.0 for n in range(copies)]
    streams = [_copy(trace, n, shift - first, common) for n, shift in enumerate(shifts)]
    return list(heapq.merge(*streams, key=lambda request: request.at))


def _copy(trace: Trace, number: int, shift: float, common: set[bytes]) -> Iterator[SimulatedRequest]:
    names = {key: key for key in common}
    for (tokens, keys), at in zip(trace.prompts, trace.times, strict=True):
        for key in keys:
            if key not in names:
                names[key] = _rename(key, number)
        renamed = tuple(names[key] for key in keys)
        session = next((names[key] for key in keys if key not in common), renamed[-1] if renamed else b"")
        yield SimulatedRequest(at + shift, tokens, renamed, session)


def _rename(key: bytes, copy: int) -> bytes:
    return hashlib.blake2b(key + copy.to_bytes(4, "little"), digest_size=32).digest() if copy else key


def reuse_bound(requests: list[SimulatedRequest], block_tokens: int, counted_from: int = 0) -> float:
    """Return the token hit rate of a pool that never evicts, from request `counted_from` on; 0 without tokens."""
    seen: set[bytes] = set()
    hits = tokens = 0
    for n, request in enumerate(requests):
        found = next((i for i, key in enumerate(request.keys) if key not in seen), len(request.keys))
        seen.update(request.keys)
        if n >= counted_from:
            hits += min(found * block_tokens, request.tokens)
            tokens += request.tokens
    return hits / tokens if tokens else 0.0
