"""When the soak stopped a client on purpose: written by the soak, read by the clients.

A stopped process measures its own stop as the latency of its calls, which says nothing about the pool.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

from kvpool_testing.stalls import overlap_s

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Stops", "record"]

_MARGIN_S = 0.05  # between the record and the signal


def record(directory: Path, client: str, since: float, until: float = math.inf) -> None:
    """Record that `client` is stopped from `since` on, until `until`. Times of time.monotonic()."""
    path = _path(directory, client)
    spans = [span for span in _read(path) if span[0] != since]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([*spans, [since, min(until + _MARGIN_S, time.monotonic() + 3600)]]))
    fresh.replace(path)


class Stops:
    """Stops of one client. Thread-safe: each call reads the file."""

    def __init__(self, directory: Path, client: str) -> None:
        self._path = _path(directory, client)

    def between(self, started: float, ended: float) -> float:
        """Seconds between two times for which the client was stopped."""
        return overlap_s(_read(self._path), started, ended)


def _path(directory: Path, client: str) -> Path:
    return directory / f"stops-{client}.json"


def _read(path: Path) -> list[tuple[float, float]]:
    try:
        return [(float(since), float(until)) for since, until in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
