"""Shared helpers for messages and for values parsed from JSON. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_COUNT", "one_line", "parse_count", "ratio_text", "summarize", "summarize_clauses"]

MAX_COUNT: Final = 2**53
"""Exact in JSON, and the sum over a thousand sidecars still fits int64."""
MAX_ITEMS: Final = 3


def summarize(items: Sequence[object], limit: int = MAX_ITEMS, total: int = 0) -> str:
    """Join the first `limit` items and count the rest: `a, b, c and 4 more`.

    `total` is the number of items if `items` holds only some of them.
    """
    more = max(total, len(items)) - limit
    return ", ".join(str(item) for item in items[:limit]) + (f" and {more} more" if more > 0 else "")


def summarize_clauses(clauses: Sequence[str], limit: int = MAX_ITEMS, total: int = 0) -> str:
    """The same for items that are sentences: `node-1: full; node-2: full; and 4 more`."""
    more = max(total, len(clauses)) - limit
    return "; ".join(clauses[:limit]) + (f"; and {more} more" if more > 0 else "")


def ratio_text(part: int, whole: int) -> str:
    """Return `part / whole` from 0.00 to 1.00; 1.00 only if they are equal, and empty if `whole` is 0."""
    if whole <= 0:
        return ""
    return f"{min(part / whole, 0.99) if part < whole else 1.0:.2f}"


def one_line(text: str) -> str:
    """Untrusted text for a message: printable characters in one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def parse_count(value: Any) -> int:
    """A non-negative integer smaller than `MAX_COUNT`; 0 for anything else, also for a bool."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT else 0
