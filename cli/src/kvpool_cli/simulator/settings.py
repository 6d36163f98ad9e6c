"""Settings of a simulated pool. Bytes, seconds, bytes a second."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ROUTERS", "NodeHardware", "NodeOutage", "PoolSettings"]

ROUTERS = ("sticky", "random", "round-robin", "kv-aware")


@dataclass(frozen=True)
class NodeHardware:
    """What each node has. `drive_read`, `drive_write`: of one drive; `network`: in each direction."""

    drives: int = 1
    drive_bytes: int = 3_840_000_000_000
    drive_read: float = 6.5e9
    drive_write: float = 4e9
    network: float = 12.5e9
    prefill_rate: float = 20_000.0
    """Tokens a second that the engines of a node compute."""


@dataclass(frozen=True)
class NodeOutage:
    """A node, from 1 on, that fails `at` seconds after the first request and returns with its blocks."""

    node: int
    at: float
    seconds: float = float("inf")


@dataclass(frozen=True)
class PoolSettings:
    """The pool. `high`, `low`: watermarks in percent. `shared`: bandwidth of the shared tier; 0: there is none."""

    nodes: int = 3
    router: str = "sticky"
    hardware: NodeHardware = field(default_factory=NodeHardware)
    block_bytes: int = 64 << 20
    """Payload of a block."""
    policy: str = "PrefixAware"
    high: int = 85
    low: int = 75
    shared: float = 0.0
    index_delay: float = 0.3
    """From a stored or removed block to its entry in the index."""
    break_even: bool = False
    outages: tuple[NodeOutage, ...] = ()
    seed: int = 1
    warm_up: float = 0.0
    """Share of the requests that are played first and not counted."""
