"""The text of a plan for a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.output import Style, table
from kvpool_cli.planner.demand import DAY, PEAK
from kvpool_cli.planner.units import binary, decimal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_cli.planner.plan import Plan, Replayed
    from kvpool_cli.planner.verdicts import Verdict

_WIDTH = 40
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
_KINDS = {
    "full": "full attention",
    "latent": "latent attention",
    "window": "sliding window",
    "chunk": "attention chunks",
    "state": "recurrent state",
}


def text(plan: Plan, style: Style) -> str:
    """Return the plan as sections: sizes, needs, gains, verdicts, assumptions."""
    parts = [_sizes(plan, style)]
    if plan.need is not None:
        parts.append(_needs(plan, style))
    if plan.saved is not None:
        parts.append(_gains(plan, style))
    if plan.replayed is not None:
        parts.append(_trace(plan.replayed, style))
    if plan.verdicts:
        parts.append("\n".join([style.paint("Verdicts", "bold"), *verdict_lines(plan.verdicts, style)]))
    if plan.assumptions:
        parts.append("\n".join([style.paint("Assumed", "bold"), *(f"  {line}" for line in plan.assumptions)]))
    return "\n\n".join(parts)


def comment(plan: Plan) -> str:
    """Return the head of `-o kvcachepool`: what the resource was computed from, and the verdicts against it."""
    lines = [f"Planned for {plan.model.name}, {plan.tokens:,} tokens a session; adapt name and paths."]
    lines += plan.assumptions
    lines += [f"{v.level}: {v.subject}: {v.finding}. {v.advice}".rstrip() for v in plan.verdicts if v.level != "ok"]
    return "".join(f"# {line}\n" for line in lines)


def _sizes(plan: Plan, style: Style) -> str:
    layout = plan.layout
    rows = [
        ["a token", binary(layout.bytes_per_token), ""],
        [f"a block of {plan.block_tokens} tokens", binary(layout.block_bytes(plan.block_tokens)), ""],
        [f"a session of {plan.tokens:,} tokens", binary(layout.session_bytes(plan.tokens)), ""],
        ["sessions in a petabyte", f"{plan.data()['sessions_per_petabyte']:,}", ""],
    ]
    if layout.bytes_per_token_growing != layout.bytes_per_token:
        rows.insert(1, ["of it in layers that grow", binary(layout.bytes_per_token_growing), ""])
    if layout.state_bytes:
        rows.insert(2, ["a recurrent state", binary(layout.state_bytes), ""])
    groups = ", ".join(
        f"{g.layers} layers {_KINDS[g.kind]}{f' of {g.window:,} tokens' if g.window else ''}" for g in layout.groups
    )
    head = f"{style.paint(plan.model.name, 'bold')}  {layout.dtype}  {groups}"
    return f"{head}\n{_indent(table(rows, right=[1]))}"


def _needs(plan: Plan, style: Style) -> str:
    need, fleet, load = plan.need, plan.fleet, plan.load
    assert need is not None  # noqa: S101  the caller checked
    assert load is not None  # noqa: S101
    n = fleet.nodes
    rows = [
        ["requests", f"{need.requests:.3g}/s", f"{need.requests / n:.3g}/s"],
        ["NVMe capacity", decimal(need.capacity), decimal(need.capacity / n)],
        ["reads, average", decimal(need.reads, "B/s"), decimal(need.reads / n, "B/s")],
        ["reads, peak", decimal(PEAK * need.reads, "B/s"), decimal(PEAK * need.reads / n, "B/s")],
        ["network, average", decimal(8 * need.network, "bit/s"), decimal(8 * need.network / n, "bit/s")],
        ["writes", decimal(need.writes, "B/s"), decimal(need.writes / n, "B/s")],
        ["writes a day", decimal(need.writes * DAY), decimal(need.writes * DAY / n)],
        ["index", f"{need.entries:,.0f} entries", binary(need.index_bytes)],
        ["host memory", binary(need.host_memory * n), binary(need.host_memory)],
    ]
    title = f"Needs of {load.sessions:,.0f} sessions, {load.reusable:,} of {load.tokens:,} tokens reusable"
    return "\n".join(
        [style.paint(title, "bold"), _indent(table(rows, ["", "pool", "each node" if n > 1 else "node"], right=[1, 2]))]
    )


def _gains(plan: Plan, style: Style) -> str:
    saved = plan.saved
    assert saved is not None  # noqa: S101  the caller checked
    fleet = plan.fleet
    lines = [f"computing the reusable tokens of a request takes {saved.compute_s:.2f} s"]
    for tier, rate in (("local drives", fleet.drives * fleet.drive_read), ("network", fleet.network)):
        if rate:
            lines.append(f"loading them by the {tier} at {decimal(rate, 'B/s')} takes {saved.load_bytes / rate:.2f} s")
    lines.append(f"break-even at {decimal(saved.break_even, 'B/s')} an engine")
    lines.append(f"without reuse, prefill needs {saved.engine_seconds:.1f} engines more ({saved.gpu_seconds:.1f} GPUs)")
    if saved.watts:
        lines.append(f"which take {saved.watts / 1000:.1f} kW")
    if saved.money_per_day:
        lines.append(f"and cost {saved.money_per_day:,.0f} a day")
    return "\n".join([style.paint("Gain", "bold"), *(f"  {line}" for line in lines)])


def _trace(found: Replayed, style: Style) -> str:
    rows = [
        [
            binary(p.capacity),
            f"{p.hit_rate:.1%}",
            "#" * round(_WIDTH * p.hit_rate / found.ceiling) if found.ceiling else "",
        ]
        for p in found.points
    ]
    rows.append(["unlimited", f"{found.ceiling:.1%}", "#" * _WIDTH if found.ceiling else ""])
    title = f"Token hit rate of {found.requests:,} requests by capacity of the pool, {found.policy}"
    return "\n".join([style.paint(title, "bold"), _indent(table(rows, right=[0, 1]))])


def verdict_lines(verdicts: Sequence[Verdict], style: Style) -> list[str]:
    """Return one line for each verdict, and one for its advice."""
    lines = []
    for verdict in verdicts:
        lines.append(
            f"  {style.paint(verdict.level.ljust(4), _COLORS[verdict.level])}  {verdict.subject}: {verdict.finding}"
        )
        if verdict.advice:
            lines.append(f"        {verdict.advice}")
    return lines


def _indent(block: str) -> str:
    return "\n".join(f"  {line}" for line in block.splitlines())
