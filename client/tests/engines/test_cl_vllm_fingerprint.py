"""Fingerprint inputs of a vLLM engine, and the digest of a model's files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpool.engines.common import weights
from kvpool.engines.vllm import fingerprint as vllm_fingerprint
from kvpool.protocol import keys

if TYPE_CHECKING:
    from pathlib import Path


def offloading_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "groups": (SimpleNamespace(tokens_per_block=32, layer_names=("model.layers.0", "model.layers.1"), group_id=0),),
        "model": SimpleNamespace(name="org/model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=8),
        "parallel": SimpleNamespace(rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    return SimpleNamespace(**{**values, **changes})


@dataclass
class HfConfig:
    values: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 8, "_name_or_path": "/here"})

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def engine_config(**changes: Any) -> SimpleNamespace:
    model = {"revision": None, "dtype": "bfloat16", "quantization": None, "seed": 0, "hf_config": HfConfig()}
    cache = {"prefix_caching_hash_algo": "sha256_cbor"}
    load = {"load_format": "auto"}
    for part in (model, cache, load):
        part.update({k: v for k, v in changes.items() if k in part})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(**load),
    )


def fingerprint(config: Any = None, engine: Any = None, size: int = 4096, version: str = "0.33.0") -> bytes:
    inputs = vllm_fingerprint.fingerprint_inputs(
        config or offloading_config(), size, version, engine or engine_config(), "cuda"
    )
    return keys.fingerprint(inputs)


PARALLEL = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}


@pytest.mark.parametrize(
    "other",
    [
        lambda: fingerprint(size=8192),
        lambda: fingerprint(version="0.33.1"),
        lambda: fingerprint(offloading_config(kv_cache_layout="LBNHC")),
        lambda: fingerprint(offloading_config(canonical_layout=True)),
        lambda: fingerprint(offloading_config(model=SimpleNamespace(name="org/model", dtype="fp8"))),
        lambda: fingerprint(offloading_config(model=SimpleNamespace(name="org/other", dtype="bfloat16"))),
        lambda: fingerprint(offloading_config(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=8))),
        lambda: fingerprint(offloading_config(cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=4))),
        lambda: fingerprint(offloading_config(parallel=SimpleNamespace(**{**PARALLEL, "tp_size": 2}))),
        lambda: fingerprint(offloading_config(parallel=SimpleNamespace(**{**PARALLEL, "pp_size": 2}))),
        lambda: fingerprint(
            offloading_config(groups=(SimpleNamespace(tokens_per_block=32, layer_names=("a",), group_id=0),))
        ),
        lambda: fingerprint(engine=engine_config(prefix_caching_hash_algo="xxhash")),
        lambda: fingerprint(engine=engine_config(revision="abc")),
        lambda: fingerprint(engine=engine_config(quantization="awq")),
        lambda: fingerprint(engine=engine_config(hf_config=HfConfig({"hidden_size": 8, "rope_scaling": "yarn"}))),
        lambda: fingerprint(engine=engine_config(load_format="dummy")),
    ],
)
def test_whatever_changes_the_bytes_changes_the_fingerprint(other: Any) -> None:
    assert fingerprint() == fingerprint()
    assert other() != fingerprint()


def test_the_place_of_a_model_does_not_matter_but_its_files_do(tmp_path: Path) -> None:
    prints = []
    for place, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "model.safetensors").write_bytes(safetensors({"w": content * 100}))
        hf = HfConfig({"hidden_size": 8, "_name_or_path": str(tmp_path / place)})
        model = SimpleNamespace(name=str(tmp_path / place), dtype="bfloat16")
        prints.append(fingerprint(offloading_config(model=model), engine_config(hf_config=hf)))
    assert prints[0] == prints[1] != prints[2]


def test_a_hash_seed_is_part_of_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    zero = fingerprint()
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert fingerprint() != zero


def test_facts_without_the_engines_configuration_are_a_name_space_of_their_own() -> None:
    inputs = vllm_fingerprint.fingerprint_inputs(offloading_config(), 4096, "0.33.0")
    assert inputs["engine_config"] == "unknown"
    assert keys.fingerprint(inputs) != fingerprint()


def test_the_engines_configuration_is_found_in_a_caller() -> None:
    def connector(vllm_config: Any) -> Any:
        return tier()

    def tier() -> Any:
        return vllm_fingerprint.find_engine_config()

    config = engine_config()
    assert connector(config) is config
    assert connector("something else") is None


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def model_dir(path: Path, **files: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def test_weights_digest_sees_every_tensor_and_the_configuration(tmp_path: Path) -> None:
    big = {f"layer.{i}": bytes([i]) * 300_000 for i in range(10)}
    base = weights.digest(model_dir(tmp_path / "base", model__safetensors=safetensors(big)))
    assert len(base) == 32
    assert weights.digest(model_dir(tmp_path / "same", model__safetensors=safetensors(big))) == base
    for i in range(10):
        changed = safetensors({**big, f"layer.{i}": bytes([i + 100]) * 300_000})
        assert weights.digest(model_dir(tmp_path / f"changed{i}", model__safetensors=changed)) != base
    other = model_dir(tmp_path / "config", model__safetensors=safetensors(big))
    (other / "config.json").write_text('{"a": 2}')
    assert weights.digest(other) != base
    tokenizer = model_dir(tmp_path / "tok", model__safetensors=safetensors(big), tokenizer__json=b"{}")
    assert weights.digest(tokenizer) == base


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(2_000_000),
        b"\xff" * 2_000_000,
        (100).to_bytes(8, "little") + b"{" * 2_000_000,
        (8).to_bytes(8, "little") + b'{"a": 1}' + bytes(2_000_000),
    ],
)
def test_files_that_are_not_what_they_are_called_still_have_a_digest(tmp_path: Path, content: bytes) -> None:
    assert weights.digest(model_dir(tmp_path / "m", model__safetensors=content))


def test_a_directory_without_a_model_has_none(tmp_path: Path) -> None:
    assert weights.digest(tmp_path) == ""
    with pytest.raises(OSError, match="nowhere"):
        weights.digest(tmp_path / "nowhere")
