"""Types of metric families."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Counter", "EventGauge", "Gauge", "Histogram", "StatusCounter"]


@dataclass(frozen=True)
class Counter:
    """Counter family. With `label`, the counts of `source` by label value; without, the single count `item`."""

    name: str  # without _total
    source: str
    help: str
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)  # meaning by label value
    item: str = ""
    is_closed: bool = False  # exports the listed values only; others belong to other families of the same source


@dataclass(frozen=True)
class StatusCounter:
    """Counter family whose counts by label value come from a status report."""

    name: str  # without _total
    help: str
    label: str
    counts: Callable[[dict[str, Any]], Mapping[str, float]]
    values: Mapping[str, str] = field(default_factory=dict)  # meaning by label value, where the code sets them


@dataclass(frozen=True)
class Gauge:
    """Gauge `kvpool_sidecar_NAME` with its value in a status report."""

    name: str
    help: str
    value: Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class EventGauge:
    """Gauge `kvpool_events_NAME`, present where the pool publishes events; `key` is its field of /status."""

    name: str
    help: str
    key: str


@dataclass(frozen=True)
class Histogram:
    """Histogram in seconds."""

    name: str
    help: str
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
