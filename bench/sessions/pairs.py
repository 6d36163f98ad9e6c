"""Comparisons of single turns, one request at a time: a moved turn beside the same turn that stayed, or computed anew;
and prompts that nobody has seen, with the pool and without it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench.sessions.counters import Counters, grown, read, tokens_from
from bench.sessions.engines import BLOCK_TOKENS
from bench.sessions.figures import Asked, differing, percentile, ratio
from bench.sessions.plan import Turn
from bench.sessions.play import Answers, timed
from bench.sessions.text import Session, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.sessions.engines import Engine
    from bench.sessions.shape import Shape

__all__ = ["conversation", "fillers", "overhead", "turns_on_both", "warm"]

A, B = 0, 1
_OVERHEAD_ANSWER = 100  # tokens: as short as the published answers get
_OVERHEAD_PROMPT = 2048


def conversation(shape: Shape, name: str) -> Session:
    """Two turns; the first is `shape.prefix` tokens long."""
    opening = words(f"pairs/{name}/opening", shape.prefix, in_bytes=True)
    return Session("", (opening, words(f"pairs/{name}/question", shape.question, in_bytes=True)))


def fillers(pairs: int, prefix: int, host_tokens: int) -> int:
    """Further conversations that push each of `pairs` out of a host memory that forgets the least recently used."""
    others = (pairs - 1) * prefix  # between the two turns of a conversation, all others have passed
    return max(0, -(-(host_tokens - others) // prefix)) if pairs else 0


def turns_on_both(
    shape: Shape,
    engines: Sequence[Engine],
    settle: Callable[[], bool],
    reference: Answers,
    host_tokens: int,
    *,
    out_of_time: Callable[[], bool] = lambda: False,
    on_turn: Callable[[str, Asked], None] = lambda _kind, _asked: None,
) -> dict[str, Any]:
    """`shape.pairs` conversations open on node a. Then the same second turn is asked

    - on b, which has never seen the conversation (`migrated`);
    - on a, whose own prefix cache has been emptied, and whose host memory, of `host_tokens`, has seen so much else
      since that the tier below it must serve (`sticky`);
    - and another conversation of the same length, which nobody has seen, on b (`recompute`).

    Where nothing is below the engine (`host_tokens` 0) there is no `sticky`: it would be another `recompute`.
    The first and the second change places from one conversation to the next. `reference`: answers of the first system
    that was asked this; they are in the prompts and are what answers are compared with.
    """
    samples: dict[str, list[Asked]] = {"migrated": [], "sticky": [], "recompute": []}
    sources: dict[str, Counters] = {kind: Counters() for kind in samples}

    def ask(node: int, number: int, turn: int, session: Session, answers: list[tuple[int, ...] | str]) -> Asked:
        prompt = session.tokens([a for a in answers if isinstance(a, tuple)])
        return timed(Turn(number, turn, node, 0.0), 0.0, lambda: engines[node].server.complete(prompt, shape.answer))

    opened = []
    for number in range(shape.pairs):
        if out_of_time():
            break
        session = conversation(shape, str(number))
        asked = ask(A, number, 0, session, [])
        on_turn("opening", asked)
        if asked.error:
            continue
        reference.setdefault((number, 0), asked.answer)
        opened.append((number, session))
    for number in range(fillers(len(opened), shape.prefix, host_tokens)):
        on_turn("filler", ask(A, number, 0, conversation(shape, f"filler/{number}"), []))
    settled = settle()
    for number, session in opened:
        if out_of_time():
            break
        fresh = conversation(shape, f"fresh/{number}")
        places = [("migrated", B, session), ("sticky", A, session)][: 2 if host_tokens else 1]
        for kind, node, talk in [*(places if number % 2 == 0 else reversed(places)), ("recompute", B, fresh)]:
            settled = engines[node].forget() and settled
            before = read([engines[node].server.metrics()])
            asked = ask(node, number, 1, talk, [reference[number, 0]])
            sources[kind].update(grown(before, read([engines[node].server.metrics()])))
            samples[kind].append(asked)
            on_turn(kind, asked)
            settled = settle() and settled
        if not samples["migrated"][-1].error:
            reference.setdefault((number, 1), samples["migrated"][-1].answer)
    wrong = [differing(samples[kind], reference) for kind in ("migrated", "sticky")]
    return {
        **{kind: _shown(samples[kind], sources[kind]) for kind in samples},
        "settled": settled,
        "migrated_over_sticky": _paired(samples["migrated"], samples["sticky"]),
        "migrated_over_recompute": _paired(samples["migrated"], samples["recompute"]),
        "differing_tokens": sum(w for w, _ in wrong),
        "compared_tokens": sum(n for _, n in wrong),
    }


def warm(engines: Sequence[Engine], settle: Callable[[], bool]) -> None:
    """One short conversation moves each way, so that connections between the nodes are there."""
    for start in (A, B):
        prompt = Session("", (words(f"warm/{start}", 2 * BLOCK_TOKENS + 16, in_bytes=True),)).tokens([])
        engines[start].server.complete(prompt, 2)
        settle()
        engines[1 - start].server.complete(prompt, 2)
    settle()


def overhead(
    shape: Shape,
    without: Engine,
    having: Engine,
    settle: Callable[[], bool],
    *,
    out_of_time: Callable[[], bool] = lambda: False,
    on_turn: Callable[[str, Asked], None] = lambda _kind, _asked: None,
) -> dict[str, Any]:
    """Prompts that nobody has seen, each asked of both engines, who take turns in being first."""
    plain: list[Asked] = []
    pool: list[Asked] = []
    length = min(_OVERHEAD_PROMPT, shape.prefix or shape.longest)
    for number in range(shape.overhead):
        if out_of_time():
            break
        prompt = Session("", (words(f"overhead/{number}", length, in_bytes=True),)).tokens([])
        both = [("without", without, plain), ("with", having, pool)]
        for kind, engine, samples in both if number % 2 == 0 else reversed(both):
            turn = Turn(number, 0, 0, 0.0)
            asked = timed(turn, 0.0, lambda e=engine, p=prompt: e.server.complete(p, _OVERHEAD_ANSWER))  # type: ignore[misc]
            samples.append(asked)
            on_turn(kind, asked)
            time.sleep(0.05)
            settle()  # else the next one pays for this one's stores
    well = [(o, w) for o, w in zip(plain, pool, strict=True) if not o.error and not w.error]
    answers: Answers = {(o.turn.user, 0): o.answer for o, _ in well}
    wrong, compared = differing([w for _, w in well], answers)
    return {
        "pairs": len(well),
        "errors": len(plain) - len(well),
        "ttft_ratio": round(ratio([w.ttft for _, w in well], [o.ttft for o, _ in well]), 4) if well else None,
        "tokens_per_s_ratio": (
            round(ratio([w.tokens_per_s for _, w in well], [o.tokens_per_s for o, _ in well]), 4) if well else None
        ),
        "prompt_tokens": length,
        "answer_tokens": _OVERHEAD_ANSWER,
        "ttft_ratios": [round(w.ttft / o.ttft, 4) for o, w in well],
        "tokens_per_s_ratios": [round(w.tokens_per_s / o.tokens_per_s, 4) for o, w in well],
        "differing_tokens": wrong,
        "compared_tokens": compared,
    }


def _shown(samples: Sequence[Asked], counted: Counters) -> dict[str, Any]:
    well = [s.ttft * 1000 for s in samples if not s.error]
    return {
        "turns": len(samples),
        "errors": len(samples) - len(well),
        "ttft_ms": [round(t, 1) for t in well],
        "p50_ms": round(percentile(well, 0.5), 1) if well else None,
        "tokens_from": tokens_from(counted),
    }


def _paired(ones: Sequence[Asked], others: Sequence[Asked]) -> float | None:
    well = [(a.ttft, b.ttft) for a, b in zip(ones, others, strict=False) if not a.error and not b.error]
    return round(ratio([a for a, _ in well], [b for _, b in well]), 4) if well else None
