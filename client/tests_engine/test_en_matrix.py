"""Each kind of model on two nodes: what one engine has stored the other loads, and says what it says without the pool.

Two processes serve all kinds, one after the other: a start of vLLM costs more than a tiny model.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import en_matrix
import pytest
from cl_nodes import until
from en_engine import GPU_PYTHON, Engine, connector
from en_model import LLAMA
from en_talk import BLOCK, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster

PATIENT = {"deadlines": {"lookup_ms": 2000, "load_min_ms": 8000}}
TOKENS = 16
SOURCES = Path(__file__).parent


@pytest.fixture(scope="module")
def engines(cluster: Cluster, start_engine: Callable[..., Engine]) -> dict[str, Engine]:
    if GPU_PYTHON:
        pytest.skip(
            "these sizes and types are those that vLLM's CPU backend has; `make test-gpu` runs the tests for GPUs"
        )
    return {name: start_engine("", model=None) for name in "ab"}


@pytest.mark.parametrize("name", en_matrix.KINDS)
def test_what_one_node_has_stored_another_loads_and_answers_as_without_the_pool(
    name: str, cluster: Cluster, engines: dict[str, Engine], tmp_path: Path
) -> None:
    kind = en_matrix.KINDS[name]
    options = en_matrix.write(tmp_path / "model", kind)
    for node, engine in engines.items():
        text = connector(cluster[node].socket, host_bytes=64 << 20, trust_lora_names=kind.uses_adapter, **PATIENT)
        assert engine.open(tmp_path / "model", text, options) == ""
    a, b = engines["a"], engines["b"]
    assert a.stats()["fingerprint"] == b.stats()["fingerprint"]
    blocks = 9
    prompt = words(9100, blocks * BLOCK + 9)
    other = [*prompt[: 7 * BLOCK], *words(9101, BLOCK), *prompt[8 * BLOCK :]]
    adapter = {"adapter": str(en_matrix.write_adapter(tmp_path / "adapter"))} if kind.uses_adapter else {}
    assert until(lambda: a.stats()["connected"] and b.stats()["connected"])
    before = cluster["a"].announced()
    first = a.generate(prompt, max_tokens=TOKENS, **adapter)
    a.settle()
    assert until(lambda: cluster["a"].announced() >= before + (kind.stored or blocks))
    computed = b.generate(prompt, max_tokens=TOKENS, salt="unknown to all", **adapter)
    changed = b.generate(other, max_tokens=TOKENS, salt="unknown to all, too", **adapter)
    again = b.generate(prompt, max_tokens=TOKENS, **adapter)
    assert (first["cached"], computed["cached"], again["cached"]) == (0, 0, blocks * BLOCK)
    loaded = b.stats()["tokens"]
    assert set(loaded) == {"peer"}
    assert (kind.stored or blocks) * BLOCK <= loaded["peer"] <= blocks * BLOCK
    assert again["tokens"] == computed["tokens"] == first["tokens"]
    assert changed["tokens"] != computed["tokens"], "this model does not show a wrong block"
    if adapter:
        plain = b.generate(prompt, max_tokens=TOKENS)
        assert (plain["cached"], plain["tokens"] != first["tokens"]) == (0, True)


def test_a_prompt_of_20000_tokens_is_stored_and_loaded_whole(
    cluster: Cluster, engines: dict[str, Engine], tmp_path: Path
) -> None:
    kind = en_matrix.Kind({**LLAMA, "max_position_embeddings": 32_768}, {"max_model_len": 20_480})
    options = en_matrix.write(tmp_path / "model", kind)
    for node, engine in engines.items():
        text = connector(cluster[node].socket, host_bytes=64 << 20, **PATIENT)
        assert engine.open(tmp_path / "model", text, options) == ""
    a, b = engines["a"], engines["b"]
    blocks = 20_000 // BLOCK
    prompt = words(9200, blocks * BLOCK + 9)
    assert until(lambda: a.stats()["connected"] and b.stats()["connected"])
    before = cluster["a"].announced()
    first = a.generate(prompt, max_tokens=TOKENS)
    a.settle()
    assert until(lambda: cluster["a"].announced() >= before + blocks, 120), a.stats()
    again = b.generate(prompt, max_tokens=TOKENS)
    assert (first["cached"], again["cached"], again["tokens"]) == (0, blocks * BLOCK, first["tokens"])
    assert b.stats()["tokens"] == {"peer": blocks * BLOCK}


def test_an_image_is_part_of_the_names_of_its_block_and_of_all_that_follow(engine_home: Path) -> None:
    """vLLM's own hashes; a model with media is not run here."""
    path = [str(engine_home / "site-packages")]
    done = subprocess.run(
        [(engine_home / "interpreter").read_text().strip(), str(SOURCES / "block_hash_process.py"), "x", "x", "y"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    one, same, other = json.loads(done.stdout.splitlines()[-1])
    assert one == same
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False, False]
