"""Timestamps as the Kubernetes API writes them (RFC 3339, UTC, whole seconds). Pure."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["elapsed_s", "rfc3339"]


def rfc3339(at: datetime) -> str:
    """`at` as metav1.Time: `2026-11-22T10:00:00Z`."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def elapsed_s(since: str, now: datetime | str) -> float:
    """Seconds from `since` to `now`; 0 if either cannot be parsed."""
    try:
        until = datetime.fromisoformat(now) if isinstance(now, str) else now
        return (until - datetime.fromisoformat(since)).total_seconds() if since else 0.0
    except (ValueError, TypeError):
        return 0.0
