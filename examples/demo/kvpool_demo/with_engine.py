"""The demonstration with a real engine on each node."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool_demo.engines import MAX_MODEL_LEN, Engine, EngineHost, EngineSpec, Environment
from kvpool_demo.play import Answer, Ask, play
from kvpool_demo.pool import NODE_NAMES
from kvpool_demo.processes import StartError
from kvpool_demo.results import Comparison, Results
from kvpool_demo.routing import schedule
from kvpool_demo.statistics import agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool_demo.conversation import Conversation, Shape
    from kvpool_demo.display import Display
    from kvpool_demo.pool import Pool
    from kvpool_demo.routing import Visit
    from kvpool_demo.statistics import Turn

__all__ = ["run", "smaller", "total_requests"]

MIB = 1 << 20
# room for the blocks of one request on their way, not for a second session: as on a busy node
HOST_MEMORY = {"bfloat16": 128 * MIB, "float32": 256 * MIB}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM keeps the region; the name is ours


def smaller(shape: Shape) -> Shape:
    """What is played in float32, which takes twice the time."""
    return replace(shape, users=min(2, shape.users), rounds=min(3, shape.rounds))


def total_requests(shape: Shape) -> int:
    """For the progress bar."""
    small = smaller(shape)
    return 3 * shape.users * shape.rounds + 2 * small.users * small.rounds


@dataclass
class Stage:
    """What all phases share."""

    display: Display
    pool: Pool
    host: EngineHost
    shape: Shape
    conversations: Sequence[Conversation]

    def engine_id(self, name: str) -> str:
        return f"kvpool-demo-{os.getpid()}-{name}"

    @contextlib.contextmanager
    def engines(self, specs: Sequence[EngineSpec]) -> Iterator[list[Engine]]:
        began = self.display.seconds
        started = self.host.start(specs)
        self.display.say(
            f"  {len(specs)} engine{'s' if len(specs) > 1 else ''} up after {self.display.seconds - began:.1f} s"
        )
        try:
            yield started
        except BaseException:
            for engine in started:
                engine.kill()  # it may be in the middle of a prefill, and somebody waits for the prompt
            raise
        for engine in started:
            engine.ask_to_stop()
        for engine in started:
            engine.end()

    def on_nodes(self, phase: str, dtype: str, *, pool: bool) -> list[EngineSpec]:
        """One engine per node; they differ in nothing but the connector."""
        specs = [EngineSpec(f"{phase}-{node}", self.pool.block_tokens, dtype) for node in NODE_NAMES]
        if not pool:
            return specs
        return [
            replace(
                spec,
                connector=self.pool.connector(self.engine_id(spec.name), HOST_MEMORY[dtype]),
                environment=self.pool.environment(node),
            )
            for spec, node in zip(specs, NODE_NAMES, strict=True)
        ]

    def one(self, phase: str, dtype: str, shape: Shape, *, caching: bool) -> EngineSpec:
        """An engine with room for everybody."""
        room = shape.users * -(-shape.longest // self.pool.block_tokens) * self.pool.block_tokens
        return EngineSpec(phase, self.pool.block_tokens, dtype, caching, max(room, MAX_MODEL_LEN))

    def on_turn(self, where: str = "") -> Callable[[Turn], None]:
        return lambda turn: self.display.turn(turn, where or NODE_NAMES[turn.visit.node])


def asking(
    engines: Sequence[Engine], max_tokens: int, pool: Pool | None = None, stats: dict[str, dict[str, Any]] | None = None
) -> Ask:
    """Asks the visit's engine, or the only one, and waits until everything is stored, as between two questions.

    Keeps the last counters of each engine's plug-in in `stats`.
    """

    def ask(visit: Visit, prompt: list[int]) -> Answer:
        engine = engines[visit.node if len(engines) > 1 else 0]
        made = engine.generate(prompt, max_tokens)
        counted = engine.idle()
        if stats is not None:
            stats[engine.name] = counted
        if pool is not None:
            pool.settle()
        return Answer(made.ttft_ms, made.cached, made.tiers, tuple(made.tokens))

    return ask


def run(
    environment: Environment,
    pool: Pool,
    shape: Shape,
    conversations: Sequence[Conversation],
    logs: Path,
    display: Display,
) -> Results:
    """All phases, one after the other: the cores of one machine are busy with one engine at a time."""
    if shape.longest > MAX_MODEL_LEN:
        raise StartError(
            f"prompts grow to {shape.longest} tokens; the model takes {MAX_MODEL_LEN}: fewer rounds, please"
        )
    free = os.statvfs(SHARED_MEMORY)
    if free.f_bavail * free.f_frsize < 4 * HOST_MEMORY["float32"]:
        raise StartError(f"{SHARED_MEMORY} has less than 1 GiB free: the engines' host memory lies there")
    with contextlib.ExitStack() as stack:
        display.phase("Starting: a pool on three nodes; meanwhile vLLM is imported (10 to 20 s)")
        host = EngineHost(environment, pool.install_client(), logs)
        stack.callback(host.stop)
        stack.callback(_drop_shared_memory)
        pool.start()
        display.say("  three sidecars, the index and the shared directory are there")
        display.say(f"  vLLM imported in {host.wait_ready():.0f} s")
        return _phases(Stage(display, pool, host, shape, conversations))


def _phases(stage: Stage) -> Results:
    display, shape = stage.display, stage.shape
    visits, gone = schedule(shape.users, shape.rounds, len(NODE_NAMES), lost=True)
    lost = NODE_NAMES[gone] if gone is not None else ""
    stats: dict[str, dict[str, Any]] = {}

    display.phase("1 of 5: each round on another node, with the pool")
    with stage.engines(stage.on_nodes("pool", "bfloat16", pool=True)) as engines:

        def lose(turn: int) -> None:
            if turn == shape.rounds - 1 and gone is not None:
                engines[gone].ask_to_stop()
                engines[gone].end()
                stage.pool.stop_node(lost)
                display.say(f"  {lost} is stopped, engine and sidecar: what only it had, the shared tier has")

        ask = asking(engines, shape.answer, stage.pool, stats)
        pool = play(visits, stage.conversations, ask, before_round=lose, on_turn=stage.on_turn())
    bytes_shared = stage.pool.bytes_copied()
    stage.pool.start_node(lost)

    display.phase("2 of 5: the same conversation on one engine that keeps everything (its own prefix cache)")
    with stage.engines([stage.one("stayed", "bfloat16", shape, caching=True)]) as engines:
        ask = asking(engines, shape.answer)
        stayed = play(visits, stage.conversations, ask, on_turn=stage.on_turn("one engine"))

    display.phase("3 of 5: each round on another node, with the same prompts, without the pool")
    with stage.engines(stage.on_nodes("none", "bfloat16", pool=False)) as engines:
        ask = asking(engines, shape.answer)
        none = play(visits, stage.conversations, ask, history=stayed, on_turn=stage.on_turn())

    small = smaller(shape)
    visits, _ = schedule(small.users, small.rounds, len(NODE_NAMES))
    display.phase("4 of 5: float32, each round on another node, with the pool")
    with stage.engines(stage.on_nodes("pool-f32", "float32", pool=True)) as engines:
        exact = play(visits, stage.conversations, asking(engines, small.answer, stage.pool), on_turn=stage.on_turn())

    display.phase("5 of 5: float32, one engine without any cache")
    with stage.engines([stage.one("none-f32", "float32", small, caching=False)]) as engines:
        plain = play(visits, stage.conversations, asking(engines, small.answer), on_turn=stage.on_turn("one engine"))

    read: Counter[str] = Counter()
    for counted in stats.values():
        read.update(counted.get("client", {}).get("bytes", {}))
    return Results(
        engine="vllm",
        nodes=len(NODE_NAMES),
        shape=shape,
        pool=pool,
        none=none,
        stayed=stayed,
        comparisons=_compare(pool, none, stayed, exact, plain),
        bytes_read=dict(read),
        bytes_stored=sum(s.get("client", {}).get("stored_bytes", {}).get("stored", 0) for s in stats.values()),
        bytes_shared=bytes_shared,
        lost=lost,
        seconds=display.seconds,
    )


def _compare(
    pool: Sequence[Turn], none: Sequence[Turn], stayed: Sequence[Turn], exact: Sequence[Turn], plain: Sequence[Turn]
) -> list[Comparison]:
    return [
        Comparison("bf16: moved, with the pool = never moved", True, agreement(pool, stayed), _late(pool, stayed)),
        Comparison("float32: moved, with the pool = no cache at all", True, agreement(exact, plain)),
        Comparison(
            "bf16, no pool in either: moved = never moved",
            False,
            agreement(none, stayed),
            "an engine that gets a session without its KV computes\n"
            "the prompt anew, in other pieces than the conversation did. In bf16 that rounds differently, and a\n"
            "random model turns on the last digit: tokens may differ without any pool. With the pool they do\n"
            "not, because the KV is the same bytes; and float32 shows that nothing but rounding is behind it.",
        ),
    ]


def _late(pool: Sequence[Turn], stayed: Sequence[Turn]) -> str:
    """Says so where the pool did not have a block in time: then more was computed, in other pieces."""
    kept = {(t.visit.user, t.visit.round): t.cached for t in stayed}
    late = [t for t in pool if t.cached != kept[t.visit.user, t.visit.round]]
    if not late:
        return ""
    where = ", ".join(f"round {t.visit.round + 1} of user {t.visit.user}" for t in late)
    return (
        f"in {where}\nother blocks were found than the engine that never moved had, so the prompt was cut differently."
    )


def _drop_shared_memory() -> None:
    """An engine that was killed while it started may have left the name of its host memory behind."""
    for file in SHARED_MEMORY.glob(f"vllm_offload_kvpool-demo-{os.getpid()}-*"):
        file.unlink(missing_ok=True)
