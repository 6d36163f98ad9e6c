"""`kvpool plan check POOL`: a plan held against the status of a running pool."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvpool_cli import kubectl, output
from kvpool_cli.commands import plan_text, pool_input
from kvpool_cli.errors import FINDINGS, OK
from kvpool_cli.planner.checks import check
from kvpool_cli.planner.pool_status import read_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvpool_cli.planner.plan import Plan

HELP = "compare a plan with the status of a pool"
DESCRIPTION = """Compare a plan with what preflight measured and what the running pool reports. Give the options with
which the pool was planned after POOL."""


def add_parser(parser: argparse.ArgumentParser, add_plan_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `check` below `plan`."""
    parser.set_defaults(check=False)
    entries = parser.add_subparsers(title="commands", metavar="COMMAND")
    entry = entries.add_parser("check", help=HELP, description=DESCRIPTION)
    entry.set_defaults(check=True)
    pool_input.add_arguments(entry, required=True)
    add_plan_arguments(entry)
    output.add_arguments(entry)
    kubectl.add_arguments(entry)


def run(args: argparse.Namespace, plan: Plan) -> int:
    """Print the comparison; FINDINGS if a verdict is negative."""
    (found,) = pool_input.read(args)
    pool = read_status(found)
    verdicts = check(plan, pool)
    data = {"pool": pool.name, "model": plan.model.name, "verdicts": [asdict(verdict) for verdict in verdicts]}

    def text(style: output.Style) -> str:
        head = style.paint(f"{pool.name} beside the plan for {plan.model.name}", "bold")
        return "\n".join([head, *plan_text.verdict_lines(verdicts, style)])

    output.emit(args, data, text)
    return FINDINGS if any(verdict.level == "fail" for verdict in verdicts) else OK
