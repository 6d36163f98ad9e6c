"""Verdicts on a plan: each compares a need with what the fleet has, and advises. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvpool_cli.planner import units
from kvpool_cli.planner.demand import DAY, PEAK

if TYPE_CHECKING:
    from kvpool_cli.planner.attention import CacheLayout
    from kvpool_cli.planner.demand import Demand, Fleet, Gain, Workload

DEFAULT_MAX_BLOCK = 256 * 2**20
"""`cache.maxBlockSize` of a pool that does not set it."""
LARGEST_MAX_BLOCK = 2**30


@dataclass(frozen=True)
class Verdict:
    """A judgment of one need."""

    subject: str
    level: Literal["ok", "warn", "fail"]
    finding: str
    advice: str = ""


def judge(
    layout: CacheLayout, load: Workload, fleet: Fleet, need: Demand, saved: Gain | None, block_tokens: int
) -> list[Verdict]:
    """Return the verdicts on all needs that can be judged with what is known of the fleet."""
    found = [*_capacity(need, fleet), *_reads(need, fleet), *_network(need, fleet), *_wear(need, fleet)]
    if saved is not None:
        found += _break_even(saved, fleet)
        if fleet.gpus and saved.engine_seconds > fleet.engines * fleet.nodes:
            needs = f"{saved.engine_seconds:.1f} engines would compute what the pool saves; the fleet has"
            found.append(
                Verdict("compute", "ok", f"{needs} {fleet.engines * fleet.nodes}: only reuse makes it possible")
            )
    found += block_size(layout, block_tokens)
    if layout.dtype in ("bfloat16", "float16") and any(v.level == "fail" for v in found):
        found.append(Verdict("dtype", "warn", "the KV cache has 2 bytes a number", "an FP8 KV cache halves every row"))
    if not load.reusable:
        found.append(Verdict("reuse", "fail", "no token of a request was there before", "a pool saves nothing then"))
    return found


def block_size(layout: CacheLayout, block_tokens: int) -> list[Verdict]:
    """Return the verdict on the largest block."""
    largest = layout.largest_object(block_tokens)
    if largest > LARGEST_MAX_BLOCK:
        advice = "choose a smaller --block-tokens" if not layout.state_bytes else "this model's state cannot be stored"
        return [
            Verdict("block size", "fail", f"a block of {units.binary(largest)} is above the limit of 1 GiB", advice)
        ]
    if largest > DEFAULT_MAX_BLOCK:
        advice = f"set cache.maxBlockSize to at least {-(-largest // 2**20)}Mi"
        return [Verdict("block size", "warn", f"the largest block has {units.binary(largest)}", advice)]
    return []


def _capacity(need: Demand, fleet: Fleet) -> list[Verdict]:
    have = fleet.nodes * fleet.drives * fleet.drive_bytes
    if not have:
        return []
    text = f"{units.decimal(need.capacity)} of {units.decimal(have)} are needed"
    if need.capacity <= have:
        return [Verdict("capacity", "ok", text)]
    advice = (
        f"the oldest blocks are evicted: {have / need.capacity:.0%} of the sessions stay; replay a trace for the rate"
    )
    return [Verdict("capacity", "fail", text, advice)]


def _reads(need: Demand, fleet: Fleet) -> list[Verdict]:
    have = fleet.nodes * fleet.drives * fleet.drive_read
    if not have:
        return []
    text = f"{units.decimal(need.reads, 'B/s')} on average, {units.decimal(PEAK * need.reads, 'B/s')} at peak"
    text += f", of {units.decimal(have, 'B/s')} that the drives read"
    drives = -(-PEAK * need.reads // (fleet.nodes * fleet.drive_read))
    advice = f"{drives:.0f} drives a node at peak, or host memory for what is read again soon"
    level: Literal["ok", "warn", "fail"] = "fail" if need.reads > have else "warn" if PEAK * need.reads > have else "ok"
    return [Verdict("reads", level, text, "" if level == "ok" else advice)]


def _network(need: Demand, fleet: Fleet) -> list[Verdict]:
    have = fleet.nodes * fleet.network
    if not have or not need.network:
        return []
    text = f"{units.decimal(8 * need.network / fleet.nodes, 'bit/s')} a node on average"
    text += f", of {units.decimal(8 * fleet.network, 'bit/s')}"
    level: Literal["ok", "warn", "fail"] = (
        "fail" if need.network > have else "warn" if PEAK * need.network > have else "ok"
    )
    advice = "route turns of a session to the same node (--routing sticky), or use a faster network"
    return [Verdict("network", level, text, "" if level == "ok" else advice)]


def _wear(need: Demand, fleet: Fleet) -> list[Verdict]:
    size = fleet.nodes * fleet.drives * fleet.drive_bytes
    if not size:
        return []
    writes = need.writes * DAY / size
    text = f"{writes:.1f} drive writes per day, rated {fleet.drive_writes_per_day:g}"
    if writes <= fleet.drive_writes_per_day:
        return [Verdict("endurance", "ok", text)]
    advice = "set cache.admission (SecondUse or Budget), or buy larger drives or drives rated higher"
    return [Verdict("endurance", "fail", text, advice)]


def _break_even(saved: Gain, fleet: Fleet) -> list[Verdict]:
    found = []
    needed = f"{units.decimal(saved.break_even, 'B/s')} an engine are the break-even"
    drives = fleet.drives * fleet.drive_read
    for subject, rate in (("local drives", drives), ("network", fleet.network if fleet.moved else 0.0)):
        if not rate:
            continue
        text = f"{units.decimal(rate, 'B/s')} of the {subject}; {needed}"
        if rate < saved.break_even:
            advice = "an engine computes faster than it loads from there: the pool does not pay off on this tier"
            found.append(Verdict(f"break-even, {subject}", "fail", text, advice))
        else:
            found.append(Verdict(f"break-even, {subject}", "ok", text))
    return found
