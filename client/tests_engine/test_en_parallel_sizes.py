"""Engines of one and of two tensor-parallel ranks share blocks in vLLM's canonical layout: real bytes, equal tokens.

The ranks are processes of vLLM's CPU backend, and copies between an engine's KV cache and its host memory are those of
kvpool_cpu_worker, which follow vLLM's own mappings. vLLM's copies for a GPU are not run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cl_nodes import until
from en_engine import GPU_PYTHON, Engine, connector
from en_talk import BLOCK, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster

pytestmark = pytest.mark.skipif(bool(GPU_PYTHON), reason="two ranks need two GPUs; without one they run on the CPU")
PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 4000}}
BLOCKS = 9


@pytest.fixture(scope="module")
def engines(cluster: Cluster, start_engine: Callable[..., Engine]) -> dict[int, Engine]:
    """By their number of ranks: one on node a, two on node b."""
    text = [connector(cluster[name].socket, extra={"canonical_layout": True}, **PATIENT) for name in "ab"]
    return {
        1: start_engine(text[0]),
        2: start_engine(text[1], {"tensor_parallel_size": 2}, VLLM_CPU_OMP_THREADS_BIND="0|1"),
    }


def test_their_fingerprints_are_equal(engines: dict[int, Engine]) -> None:
    stats = [engine.stats() for engine in engines.values()]
    assert stats[0]["fingerprint_inputs"] == stats[1]["fingerprint_inputs"]
    assert stats[0]["fingerprint_inputs"]["sizes"] == "any"
    assert stats[0]["fingerprint_inputs"]["canonical_layout"] == "v1-hnd"


@pytest.mark.parametrize(("ranks", "others", "node"), [(1, 2, "a"), (2, 1, "b")])
def test_one_size_loads_what_the_other_has_stored_and_says_the_same(
    cluster: Cluster, engines: dict[int, Engine], ranks: int, others: int, node: str
) -> None:
    writer, reader = engines[ranks], engines[others]
    text = words(8100 + ranks, BLOCKS * BLOCK + 5)
    before = cluster[node].announced()
    first = writer.generate(text, max_tokens=24)
    writer.settle()
    assert until(lambda: cluster[node].announced() >= before + BLOCKS)
    computed = reader.generate(text, max_tokens=24, salt=f"unknown-{ranks}")
    loaded = sum(reader.stats()["tokens"].values())
    again = reader.generate(text, max_tokens=24)
    assert (first["cached"], computed["cached"], again["cached"]) == (0, 0, BLOCKS * BLOCK)
    assert sum(reader.stats()["tokens"].values()) == loaded + BLOCKS * BLOCK
    assert again["tokens"] == computed["tokens"] == first["tokens"]
