"""The KV cache benchmark of MLPerf Storage, over its own files and over the pool.

`--source` is a folder of that benchmark (`kv_cache_benchmark` of the repository mlcommons/storage, with kv_cache/ in
it): none of it is part of this project. Its NVMe tier is the only one in use. The systems take turns in each round:

- `files`: its own .npy files, with fsync, and the page cache dropped before each read
- `kvpool-local`: the pool, written and read on the same node
- `kvpool-peer`: the pool, each entry read on the other node

Rows of out/bench/mlperf.json: read and write rate, 95th percentiles, requests done, entries missed, and the ratio of
each to `files` in the same run (`reads_ratio`: rate, above 1 is faster; `p95_ratio`: time, below 1 is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.nodes import Network, Nodes, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["main", "row_of"]

SYSTEMS = ("files", "kvpool-local", "kvpool-peer")
OUT = Path("out/bench")
GIB = 1 << 30
_WORKER = Path(__file__).parent / "foreign" / "mlperf_worker.py"


def row_of(system: str, result: Mapping[str, Any], counts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One row from the benchmark's own JSON. Rates in GiB per second, times in milliseconds."""
    summary = result["summary"]
    stats = summary["cache_stats"]
    missed = sum(sum(client.get("misses", {}).values()) for client in counts)
    return {
        "system": system,
        "requests": summary["total_requests"],
        "read_gib_per_s": stats["tier_storage_read_bandwidth_gbps"],
        "write_gib_per_s": stats["tier_storage_write_bandwidth_gbps"],
        "read_p95_ms": stats.get("storage_read_p95_ms", 0.0),
        "write_p95_ms": stats.get("storage_write_p95_ms", 0.0),
        "reads": stats["read_iops"],
        "missed_blocks": missed,
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Compare each row with the row of `files` of the same round, in place. 0 where nothing was read."""
    for row in rows:
        files = next(r for r in rows if r["system"] == "files" and r["round"] == row["round"])
        for name, of in (("reads_ratio", "read_gib_per_s"), ("p95_ratio", "read_p95_ms")):
            row[name] = round(row[of] / files[of], 3) if files[of] else 0.0


def main(argv: list[str]) -> int:
    """0; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("python -m bench mlperf", description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder kv_cache_benchmark of mlcommons/storage")
    parser.add_argument("--seconds", type=int, default=30, help="of each system in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--model", default="tiny-1b", help="one that the benchmark knows")
    parser.add_argument("--capacity", type=float, default=8.0, help="GiB of each system")
    parser.add_argument("--block-mib", type=int, default=6, help="size of the pool's blocks")
    parser.add_argument("--dir", help="where the bytes are kept while it runs (a short path on the drive to measure)")
    options = parser.parse_args(argv)
    if not (options.source / "kv_cache" / "backends.py").is_file():
        parser.error(f"--source: {options.source} has no kv_cache/backends.py; give the folder kv_cache_benchmark")
    work = Path(tempfile.mkdtemp(prefix="kvpool-mlperf-", dir=options.dir))
    network = Network("cubic")
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        capacity = int(options.capacity * GIB)
        nodes = Nodes(work, network, capacity)
        try:
            for number in range(options.rounds):
                for system in SYSTEMS:
                    print(f"bench: round {number + 1} of {options.rounds}: {system}", file=sys.stderr, flush=True)
                    rows.append({"round": number, **_run(system, nodes, work, options, seed=number)})
        except KeyboardInterrupt:
            interrupted = True
        finally:
            nodes.close()
    finally:
        network.close()
        shutil.rmtree(work, ignore_errors=True)
    complete = [row for row in rows if any(r["system"] == "files" and r["round"] == row["round"] for r in rows)]
    add_ratios(complete)
    OUT.mkdir(parents=True, exist_ok=True)
    whole = {"network": network.kind, "load": round(os.getloadavg()[0], 1), "rows": complete}
    (OUT / "mlperf.json").write_text(json.dumps(whole, indent=1) + "\n")
    _print(complete)
    return 130 if interrupted else 0


def _run(system: str, nodes: Nodes, work: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run. SystemExit with the end of its output if the benchmark fails."""
    result, counts, files = work / "result.json", work / "counts.json", work / "files"
    for file in (result, counts):
        file.unlink(missing_ok=True)
    arguments = [
        "--model", options.model, "--num-users", str(options.users), "--duration", str(options.seconds),
        "--gpu-mem-gb", "0", "--cpu-mem-gb", "0", "--generation-mode", "none", "--seed", str(seed),
        "--cache-dir", str(files), "--storage-capacity-gb", str(options.capacity), "--output", str(result),
    ]  # fmt: skip
    source = str(options.source.resolve())
    if system == "files":
        command = [sys.executable, str(options.source.resolve() / "kv-cache.py"), *arguments]
    else:
        settings = {
            "source": source,
            "write": nodes.socket_of("a"),
            "read": nodes.socket_of("a" if system == "kvpool-local" else "b"),
            "block_bytes": options.block_mib << 20,
            "counts": str(counts),
        }
        command = [sys.executable, str(_WORKER), json.dumps(settings), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, preexec_fn=end_with_parent
    )
    shutil.rmtree(files, ignore_errors=True)
    if done.returncode != 0 or not result.is_file():
        raise SystemExit(f"bench: {system} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return row_of(system, json.loads(result.read_text()), json.loads(counts.read_text()) if counts.is_file() else [])


def _print(rows: list[dict[str, Any]]) -> None:
    columns = (
        "round", "system", "requests", "reads", "read_gib_per_s", "write_gib_per_s", "read_p95_ms", "write_p95_ms",
        "missed_blocks", "reads_ratio", "p95_ratio",
    )  # fmt: skip
    print(" ".join(f"{name:>15}" for name in columns))
    for row in rows:
        shown = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in (row[n] for n in columns)]
        print(" ".join(f"{text:>15}" for text in shown))
