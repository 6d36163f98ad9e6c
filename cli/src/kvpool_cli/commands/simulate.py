"""`kvpool simulate`: a pool over a trace, in discrete events. `kvpool_cli.simulator` runs it."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import OK, UsageError
from kvpool_cli.output import Style, emit, progress, table
from kvpool_cli.planner import replay, units
from kvpool_cli.simulator.settings import ROUTERS, NodeHardware, NodeOutage, PoolSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

NAME = "simulate"
HELP = "simulate a pool over a trace: hit rate, bytes by path, busiest node, wear"
DESCRIPTION = """Simulate a pool over a trace in discrete events, with the eviction tables, the placement on drives, the
choice of replicas and the break-even rule of the sidecar. Devices serve in the order of arrival. Equal arguments give
equal results. All figures are simulated."""

_MAX_NODES = 100_000
_MAX_COPIES = 10_000
_MAX_DRIVES = 64
_POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add trace, pool, devices and failures."""
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--trace", metavar="FILE", type=Path, required=True, help="prompts: JSON lines in Mooncake's form"
    )
    load.add_argument(
        "--copies", type=int, default=1, metavar="N",
        help="populations of users that play the trace; they share only system prompts",
    )  # fmt: skip
    load.add_argument("--warm-up", type=float, default=0.0, metavar="SHARE", help="share of the requests not counted")
    load.add_argument("--seed", type=int, default=1, metavar="N", help="seed of routers and copies")
    pool = parser.add_argument_group("pool")
    pool.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes of the pool")
    pool.add_argument("--drives", default="1x3.84TB", metavar="NxSIZE", help="drives of a node, such as 2x7.68TB")
    pool.add_argument("--block-bytes", default="64Mi", metavar="SIZE", help="bytes of a block of 512 tokens")
    pool.add_argument("--router", choices=ROUTERS, default="sticky", help="how requests find their node")
    pool.add_argument("--policy", choices=_POLICIES, default="PrefixAware", help="cache.eviction.policy of the pool")
    pool.add_argument(
        "--watermarks", type=int, nargs=2, default=(85, 75), metavar=("HIGH", "LOW"), help="of the pool, in percent"
    )
    pool.add_argument("--break-even", action="store_true", help="breakEven of the pool: slow tiers are not promised")
    pool.add_argument("--index-delay", default="300ms", metavar="TIME", help="from a block to its entry in the index")
    devices = parser.add_argument_group("devices")
    devices.add_argument("--drive-read", default="6.5G", metavar="SIZE", help="bytes a second that a drive reads")
    devices.add_argument("--drive-write", default="4G", metavar="SIZE", help="bytes a second that a drive writes")
    devices.add_argument("--network", type=float, default=100.0, metavar="GBIT", help="network of a node in Gbit/s")
    devices.add_argument("--shared", metavar="SIZE", help="bytes a second of a shared tier; without: there is none")
    devices.add_argument(
        "--prefill-rate", type=float, default=20_000.0, metavar="N", help="tokens a second that a node computes"
    )
    devices.add_argument(
        "--fail", action="append", default=[], metavar="NODE@TIME[+TIME]",
        help="a node, from 1 on, that fails at a time and returns after another; can be repeated",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the result."""
    settings = _settings(args)
    if not 1 <= args.copies <= _MAX_COPIES:
        raise UsageError(f"--copies must be 1 to {_MAX_COPIES:,}")
    if importlib.util.find_spec("kvpool_sidecar") is None:
        raise UsageError("simulating a pool needs the sidecar's package: pip install 'kvpool-cli[trace]'")
    from kvpool_cli.simulator.pool import simulate
    from kvpool_cli.simulator.workload import make_requests

    trace = replay.read_trace(args.trace)
    try:
        requests = make_requests(trace, args.copies, args.seed)
        outcome = simulate(
            settings, requests, lambda done, total: progress(f"simulating: {done:,} of {total:,} requests")
        )
    finally:
        progress("")
    data = outcome.data()
    emit(args, data, lambda style: _text(data, style))
    return OK


def _settings(args: argparse.Namespace) -> PoolSettings:
    drives = units.several(args.drives, "2x7.68TB")
    high, low = args.watermarks
    hardware = NodeHardware(
        drives.number,
        units.size(drives.what),
        float(units.size(args.drive_read)),
        float(units.size(args.drive_write)),
        args.network * 1e9 / 8,
        args.prefill_rate,
    )
    block = units.size(args.block_bytes)
    for ok, message in (
        (1 <= args.nodes <= _MAX_NODES, f"--nodes must be 1 to {_MAX_NODES:,}"),
        (drives.number <= _MAX_DRIVES, f"--drives must be at most {_MAX_DRIVES} of a node"),
        (0 < low <= high <= 100, "--watermarks must be percentages, the first at least the second"),
        (0 <= args.warm_up < 1, "--warm-up must be from 0 to below 1"),
        (0 < args.network < math.inf, "--network must be above 0"),
        (0 < args.prefill_rate < math.inf, "--prefill-rate must be above 0"),
        (block + 8192 <= hardware.drive_bytes, "a drive must hold at least one block"),
    ):
        if not ok:
            raise UsageError(message)
    return PoolSettings(
        nodes=args.nodes,
        router=args.router,
        hardware=hardware,
        block_bytes=block,
        policy=args.policy,
        high=high,
        low=low,
        shared=float(units.size(args.shared)) if args.shared else 0.0,
        index_delay=units.seconds(args.index_delay),
        break_even=args.break_even,
        outages=tuple(_outage(text, args.nodes) for text in args.fail),
        seed=args.seed,
        warm_up=args.warm_up,
    )


def _outage(text: str, nodes: int) -> NodeOutage:
    number, mark, times = text.partition("@")
    if not mark or not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= nodes:
        raise UsageError(f"--fail {text!r} is not a node and a time such as 3@600s or 3@10m+5m")
    at, mark, length = times.partition("+")
    return NodeOutage(int(number), units.seconds(at), units.seconds(length) if mark else math.inf)


def _text(data: dict[str, Any], style: Style) -> str:
    settings, path, busiest = data["settings"], data["bytes"], data["busiest_over_mean"]
    first = data["first_token_s"]
    total = sum(path.values())
    head = f"Simulated: {settings['nodes']:,} nodes, {settings['router']} router, {data['requests']:,} requests"
    rows: list[Sequence[str]] = [
        ["tokens found", f"{data['hit_rate']:.2%}", f"of at most {data['reuse_bound']:.2%} with unlimited drives"],
    ]
    rows += [
        [label, f"{path[name] / total:.2%}" if total else "-", units.decimal(path[name])]
        for label, name in (
            ("from the node's drives", "local"),
            ("from peers", "peer"),
            ("from the shared tier", "shared"),
            ("computed", "computed"),
        )
    ]
    rows += [
        ["busiest node, bytes served", _ratio(busiest["served_bytes"]), "of the mean"],
        ["busiest node, computing", _ratio(busiest["computing"]), "of the mean"],
        ["time to first token", _seconds(first["p50"]), f"p95 {_seconds(first['p95'])}"],
        ["computing", f"{data['computing_s']:,.0f} s", "of all nodes together"],
        [
            "written", f"{data['drive_writes_per_day']:.2f} DWPD",
            f"{units.decimal(data['written_bytes_per_drive_day'])} a drive and day",
        ],
    ]  # fmt: skip
    if data["interrupted_requests"] or data["refused_requests"]:
        rows.append(["failed nodes", f"{data['interrupted_requests']:,}", "requests began again on another node"])
        rows.append(["no node", f"{data['refused_requests']:,}", "requests were refused"])
    return style.paint(head, "bold") + "\n" + table(rows, right=(1,))


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
