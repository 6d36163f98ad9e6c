"""Engines whose blocks have parts: two ranks of a tensor-parallel engine, two cache groups of a hybrid model.

Each has an engine to itself, whose host memory holds few blocks: what it reads back comes from the pool.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import en_model
import pytest
from en_engine import GPU_PYTHON, Engine, connector
from en_model import WINDOW
from en_talk import BLOCK, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster

PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 4000}}
HOST = 2 << 20  # 64 blocks


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Engine]:
    model = en_model.write(tmp_path_factory.mktemp("hybrid"), en_model.GEMMA)
    text = {name: connector(cluster[name].socket, host_bytes=HOST, **PATIENT) for name in "ab"}
    hybrid = start_engine(text["b"], {"disable_hybrid_kv_cache_manager": False}, model=model)
    if GPU_PYTHON:
        return {"hybrid": hybrid}
    return {
        "hybrid": hybrid,
        # two ranks need to be told which processor each has where there is one NUMA node
        "ranks": start_engine(text["a"], {"tensor_parallel_size": 2}, VLLM_CPU_OMP_THREADS_BIND="0|1"),
    }


def read_back(engine: Engine, expect: int) -> dict[str, Any]:
    """Have two texts answered, push them out of the engine, ask again: the same answers. What its tier says."""
    texts = [words(seed, 8 * BLOCK + 5) for seed in (1, 2)]
    first = [engine.generate(text, max_tokens=16) for text in texts]
    assert [answer["cached"] for answer in first] == [0, 0]
    for seed in range(20, 32):
        engine.generate(words(seed, 10 * BLOCK), max_tokens=1)
    deadline = time.monotonic() + 60
    while engine.stats()["client"]["stores"].get("stored", 0) < expect and time.monotonic() < deadline:
        engine.settle()
    assert engine.ask(reset=True)["reset"]
    again = [engine.generate(text, max_tokens=16) for text in texts]
    assert [answer["cached"] for answer in again] == [8 * BLOCK] * 2
    assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in first]
    assert first[0]["tokens"] != first[1]["tokens"]
    return engine.stats()


@pytest.mark.skipif(bool(GPU_PYTHON), reason="two ranks need two GPUs; without one they run on the CPU")
def test_one_block_holds_all_ranks_of_an_engine(engines: dict[str, Engine]) -> None:
    stats = read_back(engines["ranks"], 2 * 8 + 12 * 10)
    assert stats["tokens"] == {"local": 16 * BLOCK}
    assert stats["fingerprint_inputs"]["sizes"]["tp_size"] == 2


def test_each_cache_group_of_a_hybrid_model_has_blocks_of_its_own(engines: dict[str, Engine]) -> None:
    stats = read_back(engines["hybrid"], 2 * (8 + WINDOW // BLOCK))
    assert len(stats["fingerprint_inputs"]["groups"]) == 2
    assert stats["tokens"] == {"local": 16 * BLOCK}
    # the layers that see a window need its last blocks only
    assert stats["client"]["hits"]["local"] == 2 * (8 + WINDOW // BLOCK)
