"""Estimate of a shared tier's usage between two counts: the last count plus what sidecars stored since. Pure.

Each sidecar reports the bytes and blocks it stored since its start, under a name that is new with each start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StoredUsage", "UsageEstimator", "UsageReport"]

_MOST_MARKS = 4096
_MOST_TENANTS = 256


class StoredUsage(NamedTuple):
    """Totals since a sidecar started."""

    bytes: int = 0
    blocks: int = 0


class UsageReport(NamedTuple):
    """Report of the lease holder. `finished`: end of the last count, mount's time; 0: none yet."""

    finished: float = 0.0
    seconds: float = 0.0
    used: StoredUsage = StoredUsage()
    tenants: dict[str, int] = {}  # noqa: RUF012 - never changed
    baselines: dict[str, StoredUsage] = {}  # noqa: RUF012
    node: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "seconds": self.seconds,
            "used": self.used,
            "tenants": dict(sorted(self.tenants.items(), key=lambda item: -item[1])[:_MOST_TENANTS]),
            "marks": dict(list(self.baselines.items())[:_MOST_MARKS]),
            "node": self.node,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> UsageReport:
        """Parse a report; an invalid one is empty."""
        try:
            return cls(
                finished=float(value["finished"]),
                seconds=float(value["seconds"]),
                used=stored(value["used"]),
                tenants={str(k): int(n) for k, n in list(value["tenants"].items())[:_MOST_TENANTS]},
                baselines={str(k): stored(n) for k, n in list(value["marks"].items())[:_MOST_MARKS]},
                node=str(value["node"])[:253],
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return cls()


def stored(value: Any) -> StoredUsage:
    """Parse from JSON. TypeError or ValueError if invalid."""
    size, blocks = value
    return StoredUsage(max(0, int(size)), max(0, int(blocks)))


class UsageEstimator:
    """Held by the lease holder. Not thread-safe."""

    def __init__(self) -> None:
        self._base = StoredUsage()
        self._baselines: dict[str, StoredUsage] = {}
        self._latest: dict[str, StoredUsage] = {}

    @property
    def latest(self) -> dict[str, StoredUsage]:
        """The last report of each sidecar."""
        return dict(self._latest)

    def update(self, reports: Mapping[str, StoredUsage]) -> None:
        """Apply current reports; the last report of a sidecar that ended stays valid."""
        self._latest.update(reports)

    def reset(
        self,
        counted: StoredUsage,
        baselines: Mapping[str, StoredUsage],
        seen: StoredUsage = StoredUsage(),  # noqa: B008 - immutable
    ) -> None:
        """Start from a count that began after the sidecars had reported `baselines` and already includes `seen`."""
        self._base = StoredUsage(counted.bytes - seen.bytes, counted.blocks - seen.blocks)
        self._baselines = dict(baselines)
        self._latest = {owner: n for owner, n in self._latest.items() if owner in baselines}

    def subtract(self, size: int) -> None:
        """Subtract a removed block of the count."""
        self._base = StoredUsage(self._base.bytes - size, self._base.blocks - 1)

    def seen_during_walk(self, marks: Mapping[str, StoredUsage]) -> StoredUsage:
        """Estimate how much of what was stored since `marks` a walk that began then has counted: one half."""
        size, blocks = self._since(marks)
        return StoredUsage(size // 2, blocks // 2)

    def used(self) -> StoredUsage:
        """Return the estimated usage now."""
        size, blocks = self._since(self._baselines)
        return StoredUsage(max(0, self._base.bytes + size), max(0, self._base.blocks + blocks))

    def _since(self, marks: Mapping[str, StoredUsage]) -> StoredUsage:
        size = blocks = 0
        for owner, now in self._latest.items():
            before = marks.get(owner, StoredUsage())
            size += max(0, now.bytes - before.bytes)
            blocks += max(0, now.blocks - before.blocks)
        return StoredUsage(size, blocks)
