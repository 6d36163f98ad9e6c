"""What a workload demands from the drives, the network, the index and the memory of a fleet, and what it saves. Pure.

Rates are averages unless they are called peak. Bytes of capacity, writes and index count every copy that engines store;
reads count what a turn loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_cli.planner.attention import CacheLayout

HEADROOM = 1.3
"""Capacity above the blocks in use: eviction starts at 85 % and stops at 75 %."""
PEAK = 2.0
"""Peak of reads above their mean, as published for multi-turn chat."""
INDEX_ENTRY_BYTES = 112
STATE_EVERY = 8192
"""Tokens of a prefill step, at whose end an engine keeps a recurrent state."""
DAY = 86_400.0


@dataclass(frozen=True)
class Workload:
    """Sessions of one model. A session sends a request `every_s` seconds, whose prompt has `tokens` tokens."""

    tokens: int
    new_tokens: int
    """Tokens of a turn that no earlier turn had: the question, and the answer to the one before."""
    sessions: float
    every_s: float
    turns: int = 0
    """Turns after which a session ends and another begins. 0: sessions do not end."""
    retain_s: float = 0.0
    """Time for which the blocks of an ended session are kept."""
    hit_rate: float = 1.0
    """Share of the tokens that could be found and are."""
    window_blocks: str = "every"
    """every: engines store every block of layers with a window (vLLM's default). last: those of the session's end."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.sessions / self.every_s

    @property
    def reusable(self) -> int:
        """Tokens of a request that an earlier turn had."""
        return max(0, self.tokens - self.new_tokens)

    @property
    def arrivals(self) -> float:
        """Sessions that begin in a second."""
        return self.rate / self.turns if self.turns else 0.0

    @property
    def kept_sessions(self) -> float:
        """Sessions whose blocks are in the pool: those that are active, and those that ended within `retain_s`."""
        return self.sessions + self.arrivals * self.retain_s


@dataclass(frozen=True)
class Fleet:
    """Machines. Zero: not given, so nothing is judged by it."""

    nodes: int = 1
    gpus: int = 0
    """GPUs of a node."""
    tensor_parallel: int = 1
    drives: int = 0
    """Drives of a node."""
    drive_bytes: int = 0
    drive_read: float = 0.0
    """Bytes a second that one drive reads."""
    drive_writes_per_day: float = 1.0
    network: float = 0.0
    """Bytes a second of a node's network."""
    moved: float = 0.0
    """Share of the turns that another node than the last one serves."""
    host_memory: int = 4 * 2**30
    """Host memory of an engine above the pool."""

    @property
    def engines(self) -> int:
        """Engines of a node; one if GPUs are not given."""
        return max(1, self.gpus // self.tensor_parallel)


@dataclass(frozen=True)
class Demand:
    """Needs of the whole pool, in bytes, bytes a second, and counts."""

    requests: float
    capacity: float
    reads: float
    network: float
    writes: float
    entries: float
    host_memory: float
    """Of one node."""

    @property
    def index_bytes(self) -> float:
        """Memory of the index."""
        return self.entries * INDEX_ENTRY_BYTES


@dataclass(frozen=True)
class Gain:
    """What reuse saves, and how fast a tier must be for it."""

    prefill_rate: float
    """Tokens a second that one engine computes."""
    break_even: float
    """Bytes a second above which an engine loads a prefix faster than it computes it."""
    compute_s: float
    """Seconds to compute the reusable tokens of one request."""
    load_bytes: float
    """Bytes to load instead."""
    engine_seconds: float = 0.0
    """Engine-seconds of prefill that are saved each second: the number of engines that reuse replaces."""
    gpu_seconds: float = 0.0
    """The same in GPUs."""
    watts: float = 0.0
    """Power of those GPUs; 0 if it is not given."""
    money_per_day: float = 0.0
    """Price of those GPUs for a day; 0 if it is not given."""


def stored_bytes(layout: CacheLayout, tokens: int, window_blocks: str = "every") -> float:
    """Return the bytes that engines store for a session of `tokens` tokens."""
    states = math.ceil(tokens / STATE_EVERY) * layout.state_bytes
    kept = layout.bytes_per_token * tokens
    return states + (kept if window_blocks == "every" else layout.session_bytes(tokens) - layout.state_bytes)


def demand(layout: CacheLayout, load: Workload, fleet: Fleet, block_tokens: int) -> Demand:
    """Return what the workload needs from the pool."""
    reads = load.rate * load.hit_rate * (layout.session_bytes(load.reusable) if load.reusable else 0)
    grown = layout.bytes_per_token if load.window_blocks == "every" else layout.bytes_per_token_growing
    first = stored_bytes(layout, load.tokens, load.window_blocks)
    turn = grown * load.new_tokens + layout.state_bytes
    blocks = math.ceil(load.tokens / block_tokens) * layout.objects_per_block
    return Demand(
        requests=load.rate,
        capacity=load.kept_sessions * first * HEADROOM,
        reads=reads,
        network=reads * fleet.moved,
        writes=(load.rate - load.arrivals) * turn + load.arrivals * first,
        entries=load.kept_sessions * blocks * HEADROOM,
        host_memory=float(fleet.engines * fleet.host_memory),
    )


def gain(
    layout: CacheLayout, load: Workload, fleet: Fleet, prefill_rate: float, watts: float = 0.0, gpu_hour: float = 0.0
) -> Gain:
    """Return what reuse saves. `watts`: of one GPU. `gpu_hour`: price of one GPU for an hour."""
    compute_s = load.reusable / prefill_rate
    load_bytes = float(layout.session_bytes(load.reusable)) if load.reusable else 0.0
    per_second = load.rate * load.hit_rate * compute_s
    gpus = per_second * fleet.tensor_parallel
    return Gain(
        prefill_rate=prefill_rate,
        break_even=load_bytes / compute_s if compute_s else layout.bytes_per_token_growing * prefill_rate,
        compute_s=compute_s,
        load_bytes=load_bytes,
        engine_seconds=per_second,
        gpu_seconds=gpus,
        watts=gpus * watts,
        money_per_day=gpus * 24 * gpu_hour,
    )
