"""A plan held against a running pool: what was assumed, what was measured, and what to change. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvpool_cli.planner import units
from kvpool_cli.planner.verdicts import DEFAULT_MAX_BLOCK, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_cli.planner.plan import Plan
    from kvpool_cli.planner.pool_status import PoolStatus

_CLOSE = 0.9
"""Share of a planned figure that a measured one may miss without a warning."""
_BLOCK_DIFFERS = 0.15


def check(plan: Plan, pool: PoolStatus) -> list[Verdict]:
    """Return a verdict for each figure of the plan that the pool reports. What it does not report is left out."""
    return [*_blocks(plan, pool), *_room(plan, pool), *_drives(plan, pool), *_results(plan, pool)]


def _blocks(plan: Plan, pool: PoolStatus) -> Iterator[Verdict]:
    if pool.block_tokens != plan.block_tokens:
        text = f"blocks have {pool.block_tokens} tokens, planned are {plan.block_tokens}"
        yield Verdict(
            "block tokens", "warn", text, f"plan with --block-tokens {pool.block_tokens}: it cannot be changed"
        )
    largest, most = plan.layout.largest_object(pool.block_tokens), pool.max_block or DEFAULT_MAX_BLOCK
    if largest > most:
        text = f"a block has {units.binary(largest)}, and cache.maxBlockSize is {units.binary(most)}"
        yield Verdict(
            "block size", "fail", text, f"set cache.maxBlockSize to {-(-largest // 2**20)}Mi: none is stored now"
        )
    # several groups, and several ranks, store pieces of different sizes
    if pool.blocks and len(plan.layout.groups) == plan.fleet.tensor_parallel == 1:
        mean, planned = pool.used / pool.blocks, plan.layout.block_bytes(pool.block_tokens)
        differs = abs(mean / planned - 1) > _BLOCK_DIFFERS
        text = f"a stored block has {units.binary(mean)} on average, planned are {units.binary(planned)}"
        advice = "another model, dtype, or tensor-parallel size than planned writes to this pool"
        yield Verdict("bytes of a block", "warn" if differs else "ok", text, advice if differs else "")


def _room(plan: Plan, pool: PoolStatus) -> Iterator[Verdict]:
    if pool.nodes and plan.fleet.nodes > 1:
        level: Literal["ok", "warn"] = "ok" if pool.nodes >= plan.fleet.nodes else "warn"
        yield Verdict("nodes", level, f"{pool.nodes} nodes serve, planned are {plan.fleet.nodes}")
    if plan.need is None:
        return
    if pool.capacity:
        enough = pool.capacity >= plan.need.capacity
        text = f"the pool has {units.binary(pool.capacity)}, planned are {units.binary(plan.need.capacity)}"
        advice = "raise tiers[].local.capacity or add nodes; replay a trace for the hit rate at this capacity"
        yield Verdict("capacity", "ok" if enough else "fail", text, "" if enough else advice)
    if pool.index_memory:
        enough = pool.index_memory >= plan.need.index_bytes
        text = f"the index has {units.binary(pool.index_memory)}, planned are {units.binary(plan.need.index_bytes)}"
        yield Verdict("index", "ok" if enough else "fail", text, "" if enough else "raise index.managed.maxMemory")


def _drives(plan: Plan, pool: PoolStatus) -> Iterator[Verdict]:
    for tier, rate in sorted(pool.read_rates.items()):
        text = f"preflight read {units.decimal(rate, 'B/s')} by one stream on the slowest node"
        if plan.saved is not None and rate * max(1, len(pool.read_rates)) < plan.saved.break_even:
            text += f", below the break-even of {units.decimal(plan.saved.break_even, 'B/s')}"
            yield Verdict(
                f"tier {tier}", "fail", text, "several streams may read faster: run kvpool bench, or use faster drives"
            )
        elif plan.fleet.drive_read and rate < _CLOSE * plan.fleet.drive_read:
            text += f", planned are {units.decimal(plan.fleet.drive_read, 'B/s')}"
            yield Verdict(f"tier {tier}", "warn", text, f"plan with --drive-read {rate / 1e9:.2g}G")
        else:
            yield Verdict(f"tier {tier}", "ok", text)


def _results(plan: Plan, pool: PoolStatus) -> Iterator[Verdict]:
    if pool.hit_rate is not None and plan.load is not None:
        planned = plan.load.hit_rate * plan.load.reusable / plan.load.tokens
        text = f"{pool.hit_rate:.0%} of the tokens were found in the last hour, planned are {planned:.0%}"
        low = pool.hit_rate < _CLOSE * planned
        advice = "status.cache.misses has the reasons; sessions may be shorter than planned, or evicted too early"
        yield Verdict("hit rate", "warn" if low else "ok", text, advice if low else "")
    if pool.load_success is not None:
        low = pool.load_success < _CLOSE
        text = f"{pool.load_success:.0%} of the loads succeeded"
        yield Verdict(
            "loads", "warn" if low else "ok", text, "status.cache.loadFailures has the reasons" if low else ""
        )
    if pool.seconds_saved:
        slower = pool.seconds_saved < 0
        text = f"loads were {abs(pool.seconds_saved):,} s {'slower' if slower else 'faster'} than computing"
        advice = "the tiers are below the break-even: use faster drives or network, or sticky routing"
        yield Verdict("time saved", "fail" if slower else "ok", text, advice if slower else "")
