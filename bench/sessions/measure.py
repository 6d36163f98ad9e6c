"""The phases of a run: which engines are up when, and what is asked of them. At most two engines at a time."""

from __future__ import annotations

import contextlib
import http.client
import os
import zlib
from typing import TYPE_CHECKING, Any

from bench.sessions import counters, lmbenchmark
from bench.sessions.engines import Engine, Home, Room
from bench.sessions.figures import by_round, differing, percentile, summary
from bench.sessions.pairs import fillers, overhead, turns_on_both, warm
from bench.sessions.plan import plan
from bench.sessions.play import Answers, ask_chat, ask_tokens, play
from bench.sessions.processes import StartError
from bench.sessions.systems import NODES, SYSTEMS, System
from bench.sessions.text import sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.sessions.display import Display
    from bench.sessions.figures import Asked
    from bench.sessions.request import Server
    from bench.sessions.shape import Shape

__all__ = ["Measurement", "share"]

_NONE, _POOL = "none", "kvpool"
_FAULTS = (StartError, OSError, RuntimeError, http.client.HTTPException, ValueError)


class Measurement:
    """Results grow in `result` as they come, so that what was measured before an interruption is there."""

    def __init__(self, shape: Shape, display: Display, csv_folder: Path) -> None:
        self.result: dict[str, Any] = {"systems": {}, "overhead": None}
        self._shape = shape
        self._display = display
        self._csv = csv_folder
        self._references: dict[str, Answers] = {}
        self._until_s = float(shape.limit_s)

    def targets(self, targets: Mapping[str, Sequence[Server]]) -> None:
        """Servers that run already: one system for each name, one node for each server."""
        for name, servers in targets.items():
            system = self._system(name, ", ".join(server.base_url for server in servers))
            self._plays(name, system, servers, lambda: True, in_bytes=False)

    def own(self, names: Sequence[str], dtype: str, work: Path) -> None:
        """The project's own engines and the named systems, one system after the other."""
        self._display.say("making the engine's environment, if it is not there (docs/project/benchmarks.md)")
        home = Home(work)
        room = Room.for_tokens(max(self._shape.longest, self._shape.longest_pair), dtype)
        order = sorted(names, key=lambda name: (name != _NONE, name != _POOL))
        with contextlib.ExitStack() as kept:
            plain: Engine | None = None
            for number, name in enumerate(order):
                self._until_s = share(self._shape.limit_s, number, len(order))
                system = self._system(name, SYSTEMS[name].what)
                if self._out_of_time():
                    system["why_not"] = "out of time"
                    continue
                try:
                    plain = self._one(name, system, home, room, work, plain, kept, keep=_POOL in names)
                except _FAULTS as e:
                    system["why_not"] = f"{type(e).__name__}: {e}"[:600]
                    self._display.say(f"{name}: {system['why_not']}")
                    plain = None
                if plain is None:
                    kept.close()

    def _one(
        self, name: str, found: dict[str, Any], home: Home, room: Room, work: Path, plain: Engine | None,
        kept: contextlib.ExitStack, *, keep: bool,
    ) -> Engine | None:  # fmt: skip
        """Everything about one system. Gives the engine without a pool that is to stay up for the next one, if any."""
        tag = f"kvpool-bench-{os.getpid()}-{name}"
        log = work / "logs"
        with contextlib.ExitStack() as stack:
            self._display.say(f"{name}: starting ({found['what']})")
            started = SYSTEMS[name](home, room, work / name, tag)
            stack.callback(started.close)
            mine: list[Engine] = []
            stack.callback(_end, mine)

            def start(node: str) -> Engine:
                engine = Engine(home, f"{name}-{node}", log / f"{name}-{node}.log", room, started.wiring(node))
                if name == _NONE and keep and node == "a":
                    kept.callback(engine.end)
                else:
                    mine.append(engine)
                return engine

            if plain is not None:  # two engines at a time: the pool's second one comes when this one is gone
                first = start("a")
                first.wait_ready()
                self._overhead(plain, first, started)
                kept.close()
                second = start("b")
                second.wait_ready()
                engines = [first, second]
            else:
                engines = [start(node) for node in NODES]
                for engine in engines:
                    engine.wait_ready()
            self._display.say(f"{name}: two engines are up")
            warm(engines, started.settle)
            self._turns(name, found, engines, started, room.host_tokens if name != _NONE else 0)
            self._plays(name, found, [engine.server for engine in engines], started.settle, in_bytes=True)
            return engines[0] if name == _NONE and keep else None

    def _system(self, name: str, what: str) -> dict[str, Any]:
        made: dict[str, Any] = {"what": what, "plays": []}
        self.result["systems"][name] = made
        return made

    def _left(self) -> float:
        return self._shape.limit_s - self._display.seconds

    def _out_of_time(self) -> bool:
        return self._left() <= 0

    def _overhead(self, plain: Engine, pool: Engine, system: System) -> None:
        if self._shape.overhead and not self._out_of_time():
            on_turn = self._counter("cold prompts, with and without the pool", 2 * self._shape.overhead)
            self.result["overhead"] = overhead(
                self._shape, plain, pool, system.settle, out_of_time=self._out_of_time, on_turn=lambda _k, a: on_turn(a)
            )

    def _turns(
        self, name: str, found: dict[str, Any], engines: Sequence[Engine], system: System, host_tokens: int
    ) -> None:
        if self._shape.pairs and not self._out_of_time():
            turns = (4 if host_tokens else 3) * self._shape.pairs + fillers(
                self._shape.pairs, self._shape.prefix, host_tokens
            )
            on_turn = self._counter(f"{name}: second turns on either node", turns)
            found["pairs"] = turns_on_both(
                self._shape, engines, system.settle, self._references.setdefault("pairs", {}), host_tokens,
                out_of_time=self._out_of_time, on_turn=lambda _k, a: on_turn(a),
            )  # fmt: skip

    def _plays(
        self, name: str, found: dict[str, Any], servers: Sequence[Server], settle: Callable[[], bool], *, in_bytes: bool
    ) -> None:
        """Every routing and rate; what one system answered first is what all are compared with."""
        shape = self._shape
        later: list[Asked] = []
        failed = 0
        for routing, qps in shape.plays():
            if routing == "migrating" and len(servers) < 2:
                continue
            if self._out_of_time():
                found["why_not"] = f"out of time before {routing} at {qps:g} QPS"
                break
            if routing != "migrating" and self._display.seconds > self._until_s:
                found["left_out"] = [*found.get("left_out", []), routing]
                continue
            run = f"{routing}-{qps:g}"
            turns = plan(shape.users, shape.rounds, len(servers), qps, routing, seed=zlib.crc32(run.encode()))
            on_turn = self._counter(f"{name}: {routing} at {qps:g} QPS", len(turns))
            before = counters.read(server.metrics() for server in servers)
            done = play(
                turns, sessions(shape, run, in_bytes=in_bytes), servers,
                ask_tokens(shape.answer) if in_bytes else ask_chat(shape.answer),
                history=self._references.get(run) if in_bytes else None,
                limit_s=min(self._left() + 30, 4 * turns[-1].at + 120), on_turn=on_turn,
            )  # fmt: skip
            grown = counters.grown(before, counters.read(server.metrics() for server in servers))
            answers: Answers = {(a.turn.user, a.turn.round): a.answer for a in done if not a.error}
            reference = self._references.setdefault(run, {})
            for place, answer in answers.items():
                reference.setdefault(place, answer)
            wrong, compared = differing(done, reference)
            if routing == "migrating":
                later += [a for a in done if a.turn.round > 0 and not a.error]
                failed += sum(1 for a in done if a.error)
            found["plays"].append(
                {
                    "routing": routing, "qps": qps, **summary(done), "tokens_from": counters.tokens_from(grown),
                    "queue_ms": counters.queueing_ms(grown), "differing_tokens": wrong, "compared_tokens": compared,
                    "missed_blocks": counters.missed(grown), "by_round_ms": by_round(done),
                    "first_errors": [a.error for a in done if a.error][:3],
                }
            )  # fmt: skip
            lmbenchmark.write(done, self._csv / f"{name}-{run}.csv")
            settle()
        if later or failed:
            times = [a.ttft * 1000 for a in later]
            found["migrating_later_ms"] = {
                "turns": len(later), "errors": failed,
                **({f"p{p}": round(percentile(times, p / 100), 1) for p in (50, 95, 99)} if times else {}),
            }  # fmt: skip

    def _counter(self, what: str, total: int) -> Callable[[Asked], None]:
        self._display.say(what)
        done = 0

        def on_turn(asked: Asked) -> None:
            nonlocal done
            done += 1
            if asked.error:
                self._display.say(f"  round {asked.turn.round + 1} of user {asked.turn.user + 1}: {asked.error}")
            self._display.count(what, done, total)

        return on_turn


def _end(engines: Sequence[Engine]) -> None:
    """All are asked to end before any is waited for."""
    for engine in engines:
        engine.ask_to_end()
    for engine in engines:
        engine.end()


def share(limit_s: float, number: int, count: int) -> float:
    """When the system of this number, from 0, should be done, so that each of `count` has its time."""
    return limit_s * (number + 1) / count
