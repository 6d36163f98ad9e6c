"""Clients of other projects against two vLLM engines that share nothing but the pool, behind a round-robin proxy.

- `--client vllm` (default): `vllm bench serve` of the engine's environment, data set `prefix_repetition`
- `--client lmbenchmark --source FILE`: multi-round-qa.py of the repository LMCache/LMBenchmark, unmodified; it is no
  part of this project

Each system (none, vllm-fs, lmcache-redis, kvpool) is started, measured and ended in turn. Rows of out/bench/serve.json:
time to the first token, time of a request, failed requests, prompt tokens by source, and the ratio of the median time
to the first token to that of `none` in the same run. A system that cannot start gets one line, and the next follows.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.foreign.pair import Pair
from bench.sessions.engines import MODEL, Home, Room
from bench.sessions.processes import StartError
from bench.sessions.systems import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_ratios", "main", "of_multi_round_qa", "of_vllm"]

OUT = Path("out/bench")
CLIENTS = ("vllm", "lmbenchmark")
# the command `vllm bench serve` asks for the metadata of a distribution that the build for CPUs does not have
_VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_COLUMNS = ("system", "requests", "failed", "ttft_p50_ms", "ttft_p95_ms", "request_p50_ms", "ratio", "tokens")


def of_vllm(result: Mapping[str, Any]) -> dict[str, Any]:
    """A row from the result file of `vllm bench serve`. Milliseconds."""
    return {
        "requests": int(result["completed"]),
        "failed": int(result.get("failed", 0)),
        "ttft_p50_ms": float(result["median_ttft_ms"]),
        "ttft_p95_ms": float(result["p95_ttft_ms"]),
        "request_p50_ms": float(result["median_e2el_ms"]),
    }


def of_multi_round_qa(rows: list[Mapping[str, str]]) -> dict[str, Any]:
    """A row from the CSV of multi-round-qa.py. Milliseconds. ValueError if it has no line."""
    if not rows:
        raise ValueError("multi-round-qa.py answered no question")
    ttft = sorted(1000 * float(row["ttft"]) for row in rows)
    whole = [1000 * (float(row["ttft"]) + float(row["generation_time"])) for row in rows]
    return {
        "requests": len(rows),
        "failed": 0,
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p95_ms": ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))],
        "request_p50_ms": statistics.median(whole),
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Compare the median time to the first token with `none`, in place; None without that system."""
    none = next((row["ttft_p50_ms"] for row in rows if row["system"] == "none"), 0.0)
    for row in rows:
        row["ratio"] = round(row["ttft_p50_ms"] / none, 3) if none else None


def main(argv: list[str]) -> int:
    """0; 1 if no system could be measured; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = [name for name in options.systems.split(",") if name]
    if unknown := set(names) - set(NAMES):
        parser.error(f"no system {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    if options.client == "lmbenchmark" and (options.source is None or not options.source.is_file()):
        parser.error("--client lmbenchmark wants --source FILE: multi-round-qa.py of LMCache/LMBenchmark")
    work = Path(tempfile.mkdtemp(prefix="kvpool-serve-", dir=options.dir))
    rows: list[dict[str, Any]] = []
    code = 0
    try:
        home = Home(work)
        for name in names:
            _say(name)
            try:
                rows.append({"system": name, **_measure(name, home, work, options)})
            except (StartError, RuntimeError, ValueError) as e:
                _say(f"{name} could not be measured: {' '.join(str(e).split())[-300:]}")
    except KeyboardInterrupt:
        code = 130
    finally:
        shutil.rmtree(work, ignore_errors=True)
    add_ratios(rows)
    OUT.mkdir(parents=True, exist_ok=True)
    whole = {"client": options.client, "load": round(os.getloadavg()[0], 1), "rows": rows}
    (OUT / "serve.json").write_text(json.dumps(whole, indent=1) + "\n")
    _print(rows)
    return code or (0 if rows else 1)


def _measure(name: str, home: Home, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    pair = Pair(name, home, Room.for_tokens(options.prefix + options.suffix + options.answer, "float32"), work)
    try:
        run = _vllm if options.client == "vllm" else _multi_round_qa
        row = run(pair, home, work, options)
        return {**row, "tokens": pair.tokens_from()}
    finally:
        pair.close()


def _vllm(pair: Pair, home: Home, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    result = work / "result.json"
    result.unlink(missing_ok=True)
    command = [
        home.python, "-c", _VLLM_BENCH_SERVE,
        "--backend", "openai", "--base-url", pair.url, "--endpoint", "/v1/completions",
        "--model", MODEL, "--tokenizer", str(home.engine / "model"),
        "--dataset-name", "prefix_repetition", "--num-prompts", str(options.prefixes * options.prompts),
        "--prefix-repetition-prefix-len", str(options.prefix), "--prefix-repetition-suffix-len", str(options.suffix),
        "--prefix-repetition-num-prefixes", str(options.prefixes),
        "--prefix-repetition-output-len", str(options.answer), "--max-concurrency", str(options.concurrency),
        "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "95", "--seed", "1", "--ignore-eos",
        "--disable-tqdm", "--save-result", "--result-filename", str(result),
    ]  # fmt: skip
    _run(command, home.env(), work)
    return of_vllm(json.loads(result.read_text()))


def _multi_round_qa(pair: Pair, home: Home, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    result = work / "summary.csv"
    result.unlink(missing_ok=True)
    command = [
        home.python, str(options.source.resolve()), "--base-url", f"{pair.url}/v1", "--model", MODEL,
        "--num-users", str(options.users), "--num-rounds", str(options.rounds), "--qps", str(options.qps),
        "--shared-system-prompt", str(options.prefix // 2), "--user-history-prompt", str(options.prefix // 2),
        "--answer-len", str(options.answer), "--time", str(options.seconds), "--output", str(result),
    ]  # fmt: skip
    _run(command, home.env(), work)
    with result.open(newline="") as lines:
        return of_multi_round_qa(list(csv.DictReader(lines)))


def _run(command: list[str], env: Mapping[str, str], work: Path) -> None:
    """RuntimeError with the end of its output if the client fails."""
    done = subprocess.run(
        command, env=dict(env), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stdout[-2000:]}")


def _print(rows: list[dict[str, Any]]) -> None:
    print(" ".join(f"{name:>15}" for name in _COLUMNS[:-1]))
    for row in rows:
        shown = [f"{row[n]:.1f}" if isinstance(row[n], float) and n != "ratio" else str(row[n]) for n in _COLUMNS[:-1]]
        print(" ".join(f"{text:>15}" for text in shown), row["tokens"])


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--client", choices=CLIENTS, default="vllm")
    parser.add_argument("--source", type=Path, help="lmbenchmark: the file multi-round-qa.py")
    parser.add_argument("--systems", default="none,vllm-fs,kvpool", help=f"of {','.join(NAMES)}")
    parser.add_argument("--prefixes", type=int, default=6, help="different prefixes")
    parser.add_argument("--prompts", type=int, default=4, help="prompts with each prefix")
    parser.add_argument("--prefix", type=int, default=3072, help="tokens of a prefix")
    parser.add_argument("--suffix", type=int, default=64, help="tokens of a prompt after its prefix")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--users", type=int, default=4, help="lmbenchmark: users at a time")
    parser.add_argument("--rounds", type=int, default=5, help="lmbenchmark: questions of each user")
    parser.add_argument("--qps", type=float, default=0.25, help="lmbenchmark: questions a second")
    parser.add_argument("--seconds", type=int, default=120, help="lmbenchmark: length of the run")
    parser.add_argument("--dir", help="where blocks are kept while it runs (a short path on the drive to measure)")
    return parser
