"""The command line of the benchmark: what is measured, where results go, and a clean end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.sessions import asked, report
from bench.sessions.display import Display
from bench.sessions.shape import PRESETS, ROUTINGS, Shape
from bench.sessions.systems import NAMES

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main", "parse_targets"]

OUT = Path("out/bench")
TRIED = ("none", "kvpool")  # starting engines takes most of the time of the preset `try`


def main(argv: list[str]) -> int:
    """0; 1 if the pool gave other tokens; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        shape = _shape(options)
        targets = parse_targets(options.targets)
        given = options.systems or ",".join(TRIED if options.preset == "try" else NAMES)
        names = [name for name in given.split(",") if name]
        if unknown := set(names) - set(NAMES):
            raise ValueError(f"no system {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    except ValueError as e:
        parser.error(str(e))
    signal.signal(signal.SIGTERM, _interrupt)
    display = Display()
    csv_folder = options.out / "sessions"
    csv_folder.mkdir(parents=True, exist_ok=True)
    for old in csv_folder.glob("*.csv"):
        old.unlink()
    from bench.sessions.measure import Measurement

    measurement = Measurement(shape, display, csv_folder)
    interrupted = False
    # a unix socket's path is short
    work = Path(tempfile.mkdtemp(prefix="kvpool-sessions-", dir=options.dir))
    load = os.getloadavg()[0]
    try:
        (work / "logs").mkdir()
        if targets:
            measurement.targets(_servers(targets, options))
        else:
            measurement.own(names, options.dtype, work)
    except KeyboardInterrupt:
        interrupted = True
        display.say("interrupted: what was measured until now follows")
    finally:
        shutil.rmtree(csv_folder / "logs", ignore_errors=True)
        shutil.copytree(work / "logs", csv_folder / "logs", dirs_exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
    found = measurement.result
    rows = asked.rows(found)
    machine = {
        "processors": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "seconds": round(display.seconds),
    }
    whole = {"machine": machine, "shape": asdict(shape), "dtype": options.dtype, **found}
    whole["asked"] = [asdict(row) for row in rows]
    (options.out / "sessions.json").write_text(json.dumps(whole, indent=1) + "\n")
    _print(whole, rows, targets=bool(targets))
    if any(system["plays"] for system in found["systems"].values()) and not options.no_picture:
        from bench.sessions.picture import draw

        draw(found["systems"], options.out / "sessions.png")
    if interrupted:
        return 130
    return 1 if any(row.met is False and row.asked.startswith("0 differing") for row in rows) else 0


def _print(whole: dict[str, Any], rows: list[asked.Row], *, targets: bool) -> None:
    machine, shape = whole["machine"], whole["shape"]
    print(
        f"{shape['users']} users x {shape['rounds']} rounds, system prompt {shape['system']}, history "
        f"{shape['history']}, question {shape['question']}, answer {shape['answer']} tokens; "
        f"{machine['processors']} processors, load {machine['load_before']} before and "
        f"{machine['load_after']} after, {machine['seconds']} s\n"
    )
    print(report.plays_table(whole["systems"]))
    if not targets:
        print("\n" + report.pairs_table(whole["systems"]))
        print("\n" + report.asked_table(rows))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def parse_targets(given: list[str]) -> dict[str, list[str]]:
    """`URL,URL` or `NAME=URL,URL`, each a system with one node for each URL. ValueError if one is no URL."""
    made: dict[str, list[str]] = {}
    for text in given:
        name, sign, urls = text.partition("=")
        if not sign or "://" in name:
            name, urls = f"target-{len(made) + 1}" if made else "target", text
        found = [url.strip() for url in urls.split(",") if url.strip()]
        if not found or not all(url.startswith(("http://", "https://")) for url in found):
            raise ValueError(f"--targets wants URLs with http:// or https://, not {text!r}")
        if name in made or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"--targets: the name {name!r} is taken or has odd characters")
        made[name] = found
    return made


def _servers(targets: dict[str, list[str]], options: argparse.Namespace) -> dict[str, Any]:
    from bench.sessions.request import Server

    key = os.environ.get("OPENAI_API_KEY", "")
    made: dict[str, Any] = {}
    for name, urls in targets.items():
        model = options.model or Server(urls[0], "", key).models()[0]
        made[name] = [Server(url, model, key, timeout_s=options.timeout) for url in urls]
    return made


def _shape(options: argparse.Namespace) -> Shape:
    preset = PRESETS[options.preset]
    given = {
        name: getattr(options, name)
        for name in ("users", "rounds", "system", "history", "question", "answer", "pairs", "prefix", "overhead")
        if getattr(options, name) is not None
    }
    if options.qps:
        given["qps"] = tuple(float(rate) for rate in options.qps.split(","))
    if options.routing:
        given["routings"] = tuple(options.routing.split(","))
    if options.limit:
        given["limit_s"] = options.limit
    return replace(preset, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench sessions", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small", help="what the options below start from")
    for name, text in {
        "users": "users at a time", "rounds": "questions of each user", "system": "tokens of the shared system prompt",
        "history": "tokens that each user brings to the first question", "question": "tokens of a question",
        "answer": "tokens of an answer", "pairs": "conversations whose second turn is asked on either node",
        "prefix": "tokens of their first turn", "overhead": "pairs of unseen prompts with and without the pool",
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--qps", help="questions a second, several by commas")
    parser.add_argument("--routing", help=f"of {','.join(ROUTINGS)}")
    parser.add_argument("--systems", help=f"of {','.join(NAMES)} (default: all; `try`: {','.join(TRIED)})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the project's engines")
    parser.add_argument(
        "--targets", action="append", default=[], metavar="[NAME=]URL,URL",
        help="OpenAI-compatible base URLs (.../v1), one a node; may be repeated. No engine is started then",
    )  # fmt: skip
    parser.add_argument("--model", help="of the targets (default: the first that they name); OPENAI_API_KEY is used")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer of a target")
    parser.add_argument("--limit", type=int, help="seconds after which nothing new is begun")
    parser.add_argument("--dir", help="where blocks are kept while it runs (a short path on the drive to measure)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of sessions.json, sessions.png and sessions/")
    parser.add_argument("--no-picture", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
