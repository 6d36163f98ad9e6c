"""`python -m kvpool_demo`, from the root of the clone. `make demo` calls it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_demo import picture, replay, with_engine
from kvpool_demo.conversation import Shape, conversations, documents
from kvpool_demo.display import Display
from kvpool_demo.engines import Environment
from kvpool_demo.pool import Pool
from kvpool_demo.processes import StartError
from kvpool_demo.report import report
from kvpool_demo.results import Results, summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

ROOT = Path(__file__).resolve().parents[3]
NEEDED_BYTES = 3 << 30


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Shape()
    parser = argparse.ArgumentParser(
        "kvpool_demo", description="Sessions that move between nodes, with and without KVPool."
    )
    parser.add_argument("--engine", choices=["vllm", "replay"], default="vllm", help="replay: no engine, random blocks")
    parser.add_argument("--environment", type=Path, help="the engine's environment, made by e2e/engine/make.sh")
    parser.add_argument("--pool", type=Path, default=ROOT / "examples" / "kvcachepool.yaml", help="the KVCachePool")
    parser.add_argument("--users", type=int, default=default.users)
    parser.add_argument("--rounds", type=int, default=default.rounds, help="at least 2")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="demo.json, demo.png, and demo/logs go here")
    options = parser.parse_args(arguments)
    if options.users < 1 or options.rounds < 2:
        parser.error("at least one user and two rounds are needed: a session cannot move otherwise")
    if options.engine == "vllm" and options.environment is None:
        parser.error("--environment is needed: make demo gives it, or e2e/engine/make.sh prints it")
    return options


def demonstrate(options: argparse.Namespace) -> Results:
    """Run it; every process that was started has ended when this returns or raises."""
    home = options.out / "demo"
    work, logs = home / "work", home / "logs"
    for old in (work, logs):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    if shutil.disk_usage(work).free < NEEDED_BYTES:
        raise StartError(f"{work} needs {NEEDED_BYTES >> 30} GiB for the nodes' blocks while it runs")
    shape = Shape(users=options.users, rounds=options.rounds)
    talks = conversations(documents(ROOT), shape)
    total = with_engine.total_requests(shape) if options.engine == "vllm" else shape.users * shape.rounds
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        display = stack.enter_context(Display(total).running())
        display.warn_if_busy()
        pool = Pool(options.pool, work, logs)
        stack.callback(pool.stop)
        if options.engine == "replay":
            return replay.run(pool, shape, talks, display)
        return with_engine.run(Environment(options.environment), pool, shape, talks, logs, display)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, _: FrameType | None) -> None:
    """Unwind once; another Ctrl-C meanwhile would only leave processes behind."""
    for later in SIGNALS:
        signal.signal(later, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done and all tokens equal that must be; 1: they are not, or something did not work; 130: interrupted."""
    options = parse(arguments)
    for number in SIGNALS:
        signal.signal(number, _end)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another demo runs in this clone", file=sys.stderr)
            return 1
        try:
            results = demonstrate(options)
        except StartError as e:
            print(f"\nthe demo cannot go on: {e}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; every process of the demo has ended", file=sys.stderr)
            return 130
    (options.out / "demo.json").write_text(json.dumps(summary(results), indent=2) + "\n")
    picture.draw(results, options.out / "demo.png")
    display = Display(0)
    display.show(report(results))
    display.show(f"{options.out / 'demo.json'} and {options.out / 'demo.png'} hold the same. {results.seconds:.0f} s.")
    return 0 if results.identical is not False and results.blocks_equal is not False else 1


if __name__ == "__main__":
    sys.exit(main())
