"""A real engine, real sidecars. Run by `make test-engines`, which makes the engine's environment first."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from en_engine import ROOT, Engine  # isort: skip - it makes the next one importable
from cl_nodes import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="session")
def engine_home() -> Path:
    """The engine's environment; made on first use (about 6 GB, outside of this clone)."""
    script = ROOT / "e2e/engine/make.sh"
    made = subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers; vLLM makes its weights up, the same in each process (load_format dummy)."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


@pytest.fixture(scope="module")
def start_engine(
    engine_home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("engines")

    def start(text: str, options: dict[str, Any] | None = None, model: Path = tiny_model, **env: str) -> Engine:
        engine = Engine(engine_home, model, logs / f"{len(engines)}.log", text, options, **env)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.quit()
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), ("a", "b"))
    yield cluster
    cluster.close()
