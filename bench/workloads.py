"""Generated traces of workloads of different kinds, the same for the same seed. No policy was tuned on them."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import TYPE_CHECKING

from bench.trace_file import BLOCK, Request, key_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WORKLOADS", "agents", "api"]

_SPAN_S = 3600.0


def api(seed: int = 1, requests: int = 9000) -> list[Request]:
    """API traffic: shared system prompts of uneven popularity, some with examples; few turns; now and then a batch
    that asks one document many things.
    """
    rng = random.Random(seed)
    fresh = itertools.count()
    systems = [_new(fresh, rng.randint(3, 24)) for _ in range(60)]
    weights = [1 / (n + 1) for n in range(len(systems))]
    examples = [[_new(fresh, rng.randint(2, 12)) for _ in range(4)] for _ in systems]
    found: list[Request] = []
    while len(found) < requests:
        at = rng.uniform(0, _SPAN_S)
        system = rng.choices(range(len(systems)), weights)[0]
        prompt = systems[system] + (rng.choice(examples[system]) if rng.random() < 0.4 else [])
        if rng.random() < 0.04:
            prompt = prompt + _new(fresh, rng.randint(10, 120))
            for _ in range(rng.randint(2, 12)):
                found.append(_request(rng, prompt + _new(fresh, 1), at))
                at += rng.expovariate(1 / 20)
            continue
        for _ in range(rng.choices((1, 2, 3, 4), (80, 13, 5, 2))[0]):
            prompt = prompt + _new(fresh, max(1, round(rng.lognormvariate(1.3, 0.8))))
            found.append(_request(rng, prompt, at))
            at += rng.lognormvariate(3.5, 1.0)
    return sorted((one for one in found if one.at < _SPAN_S), key=lambda one: one.at)


def agents(seed: int = 1, runs: int = 1200) -> list[Request]:
    """Loops of agents: a few base prompts, many steps that each append a tool's answer, pauses of seconds and, for
    slow tools, of minutes; some steps fork a sub-agent, some cut the history.
    """
    rng = random.Random(seed)
    fresh = itertools.count()
    bases = [_new(fresh, rng.randint(6, 20)) for _ in range(8)]
    number = itertools.count()
    due: list[tuple[float, int, int, list[int]]] = []
    for _ in range(runs):
        prompt = rng.choice(bases) + _new(fresh, rng.randint(1, 6))
        heapq.heappush(due, (rng.uniform(0, _SPAN_S), next(number), len(prompt), prompt))
    found: list[Request] = []
    while due:
        at, _, kept, prompt = heapq.heappop(due)
        found.append(_request(rng, prompt, at))
        pause = rng.uniform(90, 900) if rng.random() < 0.12 else rng.lognormvariate(2.3, 0.8)
        if rng.random() < 0.06:
            child = prompt[:kept] + _new(fresh, rng.randint(2, 10))
            heapq.heappush(due, (at + rng.uniform(1, 5), next(number), kept, child))
        if rng.random() < 0.11 or at + pause > _SPAN_S:
            continue
        if len(prompt) > 150:
            prompt = prompt[:kept] + _new(fresh, 10)
        following = prompt + _new(fresh, max(1, round(rng.lognormvariate(0.9, 0.9))))
        heapq.heappush(due, (at + pause, next(number), kept, following))
    return found


WORKLOADS: dict[str, Callable[[int], list[Request]]] = {"api": api, "agents": agents}


def _new(fresh: itertools.count[int], count: int) -> list[int]:
    return list(itertools.islice(fresh, count))


def _request(rng: random.Random, ids: list[int], at: float) -> Request:
    return Request(len(ids) * BLOCK - rng.randrange(BLOCK), [key_of(one) for one in ids], at)
