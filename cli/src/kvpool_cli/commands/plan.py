"""`kvpool plan`: sizes of a pool from a model and a workload. `kvpool_cli.planner` computes them."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from kvpool_cli.commands import plan_check, plan_from_pool, plan_text
from kvpool_cli.errors import FINDINGS, OK, UsageError
from kvpool_cli.output import FORMATS as COMMON
from kvpool_cli.output import as_yaml, emit, progress
from kvpool_cli.planner import attention, catalog, replay, units
from kvpool_cli.planner.demand import Fleet, Workload, demand, gain
from kvpool_cli.planner.gpus import GPUS, UTILIZATION, find_gpu, prefill_rate
from kvpool_cli.planner.plan import Plan, Replayed
from kvpool_cli.planner.resource import pool

NAME = "plan"
HELP = "size a pool: bytes a token, drives, network, endurance, what it saves"
DESCRIPTION = """Size a pool for a model and a workload. With a model and --tokens alone, print the sizes of its cache;
with --sessions and --every, also what the workload needs. Figures that are not given are not judged."""
FORMATS = (*COMMON, "kvcachepool")

POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")
_DRIVE_READ = 6_500_000_000.0
_STICKY = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, workload and fleet, what else can be printed, and `check`."""
    add_plan_arguments(parser)
    plan_from_pool.add_arguments(parser)
    parser.add_argument("--list-models", action="store_true", help="list the shipped models and end")
    parser.add_argument("--name", default="chat", help="name of the pool for -o kvcachepool")
    trace = parser.add_argument_group("trace")
    trace.add_argument("--trace", metavar="FILE", type=Path, help="replay prompts: JSON lines in Mooncake's form")
    trace.add_argument("--sweep", metavar="FROM:TO", help="capacities of the pool to replay, such as 1Ti:16Ti")
    trace.add_argument("--policy", default="PrefixAware", choices=POLICIES, help="cache.eviction.policy of the pool")
    plan_check.add_parser(parser, add_plan_arguments)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, workload and fleet."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME", help="a model that ships (--list-models), or that the Hugging Face cache has"
    )
    model.add_argument("--config", metavar="FILE", type=Path, help="config.json of any model, or its folder")
    model.add_argument("--kv-dtype", choices=("auto", *attention.DTYPES), default="auto", help="dtype of the KV cache")
    model.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of an engine")
    model.add_argument("--block-tokens", type=int, metavar="N", help="cache.blockTokens of the pool (default: 256)")
    load = parser.add_argument_group("workload")
    load.add_argument("--tokens", metavar="N", default="20000", help="tokens of a prompt: 20000, 20k, 128Ki")
    load.add_argument("--turn", metavar="N", default="600", help="new tokens of a turn, question and answer")
    load.add_argument("--sessions", type=float, metavar="N", help="sessions that are active at the same time")
    load.add_argument("--every", metavar="TIME", default="60s", help="time between two requests of a session")
    load.add_argument("--turns", type=int, default=0, metavar="N", help="turns of a session; 0: sessions do not end")
    load.add_argument("--retain", metavar="TIME", default="30m", help="time to keep the blocks of an ended session")
    load.add_argument("--hit-rate", type=float, default=1.0, metavar="SHARE", help="share of reusable tokens found")
    load.add_argument(
        "--window-blocks", choices=("every", "last"), default="every",
        help="blocks of sliding-window layers that engines store: every one (vLLM's default), or the session's last",
    )  # fmt: skip
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--nodes", type=int, metavar="N", help="nodes of the pool (default: 1)")
    fleet.add_argument("--gpus", metavar="NxKIND", help=f"GPUs of a node, such as 8xH100: {', '.join(GPUS)}")
    fleet.add_argument("--drives", metavar="NxSIZE", help="drives of a node, such as 2x7.68TB")
    fleet.add_argument("--drive-read", metavar="SIZE", help="bytes a second that a drive reads (default: 6.5G)")
    fleet.add_argument("--dwpd", type=float, default=1.0, metavar="N", help="rated drive writes per day")
    fleet.add_argument("--network", type=float, default=0.0, metavar="GBIT", help="network of a node in Gbit/s")
    fleet.add_argument(
        "--routing", default="random", metavar="HOW",
        help="random, sticky (a quarter of the turns moves), or the share of turns that another node serves",
    )  # fmt: skip
    fleet.add_argument("--host-memory", metavar="SIZE", default="4Gi", help="host memory of an engine above the pool")
    saved = parser.add_argument_group("gain")
    saved.add_argument("--prefill-rate", type=float, metavar="N", help="tokens a second that one engine computes")
    saved.add_argument("--gpu-hour", type=float, default=0.0, metavar="PRICE", help="price of a GPU for an hour")


def run(args: argparse.Namespace) -> int:
    """Print the plan; FINDINGS if a verdict is negative."""
    if args.check:
        return plan_check.run(args, plan(args))
    if args.list_models:
        names = [[model.name, *aliases] for model, aliases in catalog.shipped()]
        emit(args, names, lambda _: "\n".join(name[0] for name in names))
        return OK
    made = plan(args)
    if args.trace is not None:
        made = replace(made, replayed=_replay(args, made))
    if args.output == "kvcachepool":
        sys.stdout.write(plan_text.comment(made) + as_yaml(pool(made, args.name)))
    else:
        emit(args, made.data(), lambda style: plan_text.text(made, style))
    return FINDINGS if any(verdict.level == "fail" for verdict in made.verdicts) else OK


def _replay(args: argparse.Namespace, made: Plan) -> Replayed:
    trace = replay.read_trace(args.trace)
    block = made.layout.bytes_per_token * replay.TRACE_BLOCK
    sweep = None
    if args.sweep is not None:
        first, mark, last = args.sweep.partition(":")
        sweep = (units.size(first), units.size(last if mark else first))
    points: list[replay.Point] = []
    sizes = replay.capacities(trace, block, sweep)
    for n, size in enumerate(sizes, 1):
        progress(f"replaying {len(trace.prompts):,} requests, capacity {n} of {len(sizes)}")
        points.append(replay.replay(trace, args.policy, size, block))
    progress("")
    return Replayed(args.policy, len(trace.prompts), trace.tokens, replay.ceiling(trace), tuple(points))


def plan(args: argparse.Namespace) -> Plan:
    """Return the plan of the arguments. Raises UsageError."""
    args, assumed = _with_defaults(args)
    if (args.model is None) == (args.config is None):
        raise UsageError("give either --model NAME or --config FILE (--list-models lists the shipped ones)")
    for name in ("tp", "block_tokens", "nodes"):
        if not 0 < getattr(args, name) <= 1_000_000:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    model = _model(args.model) if args.model is not None else catalog.read_config(args.config)
    layout = attention.read_layout(model.config, args.kv_dtype, args.tp)
    fleet = _fleet(args, assumed)
    tokens = units.tokens(args.tokens)
    made = Plan(model, layout, args.block_tokens, tokens, fleet)
    rate, watts = _prefill(args, model, assumed)
    if args.sessions is None:
        return replace(made, assumptions=tuple(assumed))
    load = _workload(args, tokens)
    need = demand(layout, load, fleet, args.block_tokens)
    assumed.append("capacity and index have 30 % headroom, reads peak at twice their mean")
    if load.window_blocks == "every" and any(group.window for group in layout.groups):
        assumed.append("engines store every block of sliding-window layers (--window-blocks)")
    if layout.state_bytes:
        assumed.append("engines keep one recurrent state for each 8,192 tokens of a first prompt and one for each turn")
    if fleet.moved:
        assumed.append(f"{fleet.moved:.0%} of the turns are served by another node (--routing)")
    saved = gain(layout, load, fleet, rate, watts, args.gpu_hour) if rate else None
    return replace(made, load=load, need=need, saved=saved, assumptions=tuple(assumed))


def _with_defaults(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments with what a running pool reports, and the defaults of what nothing specifies."""
    full, notes = plan_from_pool.filled(args) if args.from_pool is not None else (argparse.Namespace(**vars(args)), [])
    full.nodes = 1 if full.nodes is None else full.nodes
    full.block_tokens = 256 if full.block_tokens is None else full.block_tokens
    return full, notes


def _model(name: str) -> catalog.Model:
    """Return a shipped model, or one that the Hugging Face cache of this machine has."""
    try:
        return catalog.find(name)
    except UsageError:
        home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        cached = catalog.find_cached(name, Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"))
        if cached is None:
            raise
        return cached


def _workload(args: argparse.Namespace, tokens: int) -> Workload:
    every = units.seconds(args.every)
    if not args.sessions > 0 or not every > 0 or args.turns < 0:
        raise UsageError("--sessions and --every must be above 0, and --turns at least 0")
    if not 0 <= args.hit_rate <= 1:
        raise UsageError("--hit-rate is a share from 0 to 1")
    return Workload(
        tokens=tokens,
        new_tokens=min(tokens, units.tokens(args.turn)),
        sessions=args.sessions,
        every_s=every,
        turns=args.turns,
        retain_s=units.seconds(args.retain),
        hit_rate=args.hit_rate,
        window_blocks=args.window_blocks,
    )


def _fleet(args: argparse.Namespace, assumed: list[str]) -> Fleet:
    drives = units.several(args.drives, "2x7.68TB") if args.drives else None
    gpus = units.several(args.gpus, "8xH100") if args.gpus else None
    if gpus is not None and gpus.number < args.tp:
        raise UsageError("--tp is above the GPUs of a node")
    if drives is not None and args.drive_read is None:
        assumed.append("a drive reads 6.5 GB/s (--drive-read)")
    return Fleet(
        nodes=args.nodes,
        gpus=gpus.number if gpus is not None else 0,
        tensor_parallel=args.tp,
        drives=drives.number if drives is not None else 0,
        drive_bytes=units.size(drives.what) if drives is not None else 0,
        drive_read=0.0 if drives is None else _DRIVE_READ if args.drive_read is None else units.size(args.drive_read),
        drive_writes_per_day=args.dwpd,
        network=args.network * 1e9 / 8,
        moved=_moved(args.routing, args.nodes),
        host_memory=units.size(args.host_memory),
    )


def _moved(routing: str, nodes: int) -> float:
    if routing == "random":
        return 1 - 1 / nodes
    if routing == "sticky":
        return _STICKY if nodes > 1 else 0.0
    try:
        share = float(routing)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError("--routing is random, sticky, or a share from 0 to 1")
    return share


def _prefill(args: argparse.Namespace, model: catalog.Model, assumed: list[str]) -> tuple[float, float]:
    """Return tokens a second of an engine, 0 if unknown, and watts of a GPU, 0 if unknown."""
    kind = units.several(args.gpus, "8xH100").what if args.gpus else ""
    if args.prefill_rate is not None:
        if not args.prefill_rate > 0:
            raise UsageError("--prefill-rate must be above 0")
        return args.prefill_rate, GPUS[kind.upper()].watts if kind.upper() in GPUS else 0.0
    if not kind:
        return 0.0, 0.0
    gpu = find_gpu(kind)
    if model.active_parameters is None:
        assumed.append("nothing is computed about gains: give --prefill-rate")
        return 0.0, 0.0
    rate = prefill_rate(gpu, model.active_parameters, args.tp)
    assumed.append(
        f"an engine computes {rate:,.0f} tokens/s: {UTILIZATION:.0%} of {gpu.tflops:g} TFLOP/s a GPU and "
        f"{model.active_parameters:g}e9 parameters a token (--prefill-rate)"
    )
    return rate, gpu.watts
