"""`kvpool savings`: prefill that pools saved in the last hour, by model, with the figures it was computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.commands import pool_input
from kvpool_cli.errors import OK, UsageError
from kvpool_cli.output import Style, emit, table
from kvpool_cli.planner.gpus import GPUS, find_gpu
from kvpool_cli.planner.pool_status import read_status
from kvpool_cli.planner.savings import Rates, report, savings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvpool_cli.planner.pool_status import PoolStatus
    from kvpool_cli.planner.savings import ModelSavings

NAME = "savings"
HELP = "tokens, GPU time and energy that pools saved"
DESCRIPTION = """Compute what pools saved in the last hour: tokens that engines found instead of computing them, as
engine-seconds, GPU-seconds and energy. Loads take a part of that time; the seconds that engines measured, net of their
loads, are shown too. --per-tenant reads the sidecars, which report tenants if sidecar.metrics.perTenant is set."""
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pools and the rates."""
    pool_input.add_arguments(parser, required=False)
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="all pools of the cluster")
    parser.add_argument(
        "--per-tenant", action="store_true", help="by tenant and model; --from is then documents.json of a report"
    )
    parser.add_argument(
        "--prefill-rate", action="append", default=[], metavar="[MODEL=]N",
        help="tokens a second that one engine computes, of one model or of all; can be repeated",
    )  # fmt: skip
    parser.add_argument("--gpu", metavar="KIND", help=f"estimate other rates, and energy, from {', '.join(GPUS)}")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs of an engine")
    parser.add_argument("--watts", type=float, metavar="N", help="power of a GPU in prefill (default: its maximum)")


def run(args: argparse.Namespace) -> int:
    """Print the savings."""
    rates = _rates(args)
    pools = _by_tenant(args) if args.per_tenant else [read_status(pool) for pool in pool_input.read(args)]
    rows = savings(pools, rates)
    data = report(pools, rows)
    emit(args, data, lambda style: _text(rows, data["measured_engine_seconds"], style, per_tenant=args.per_tenant))
    return OK


def _by_tenant(args: argparse.Namespace) -> list[PoolStatus]:
    from kvpool_cli.cluster import source
    from kvpool_cli.commands.tenant_tokens import pools_by_tenant

    documents = source.documents_of(args)
    source.warn_of_missing_rights(documents)
    return pools_by_tenant(documents, args.pool or "", "" if args.all_namespaces else args.namespace or "")


def _rates(args: argparse.Namespace) -> Rates:
    given = {}
    for text in args.prefill_rate:
        model, _, number = text.rpartition("=")
        try:
            given[model or "*"] = float(number)
        except ValueError:
            given[model or "*"] = 0.0
        if not 0 < given[model or "*"] < float("inf"):
            raise UsageError(f"{text!r} is not a prefill rate such as 12000 or Qwen/Qwen3-8B=30000")
    if args.tp < 1:
        raise UsageError("--tp must be at least 1")
    if args.watts is not None and not 0 < args.watts < float("inf"):
        raise UsageError("--watts must be above 0")
    gpu = find_gpu(args.gpu) if args.gpu else None
    return Rates(given, gpu, args.tp, args.watts if args.watts is not None else gpu.watts if gpu is not None else None)


def _text(rows: Sequence[ModelSavings], measured: dict[str, int], style: Style, *, per_tenant: bool) -> str:
    head = ["POOL", "MODEL", "FOUND", "OF TOKENS", "PREFILL/S", "ENGINE-S", "GPU-S", "KWH"]
    cells = [
        [
            row.pool, row.model, f"{row.tokens_found:,}", f"{row.tokens_asked:,}", _number(row.prefill_rate, 0),
            _number(row.engine_seconds, 0), _number(row.gpu_seconds, 0), _number(row.kwh, 2),
        ]
        for row in rows
    ]  # fmt: skip
    if per_tenant:
        head.insert(1, "TENANT")
        cells = [[cell[0], row.tenant, *cell[1:]] for row, cell in zip(rows, cells, strict=True)]
    lines = [
        table(cells, head, right=range(2 + per_tenant, 8 + per_tenant), style=style)
        if cells
        else "No engine requested tokens in the last hour."
    ]
    lines += [
        "",
        *(
            f"{pool}: loads were {_faster(s)} than computing, since its sidecars started"
            for pool, s in measured.items()
            if s
        ),
    ]
    lines += [f"prefill rate of {row.model}: {row.prefill_source}" for row in {row.model: row for row in rows}.values()]
    return "\n".join(lines)


def _faster(seconds: int) -> str:
    return f"{abs(seconds):,} s {'slower' if seconds < 0 else 'faster'}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
