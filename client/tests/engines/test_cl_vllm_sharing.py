"""Pairs of engines that must not share a block, each by one difference, and pairs that must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpool.engines.vllm import fingerprint as vllm_fingerprint
from kvpool.engines.vllm.fingerprint import sharing_blocker
from kvpool.protocol import keys

if TYPE_CHECKING:
    from pathlib import Path


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = {"hidden_size": 64, "num_hidden_layers": 2, "_name_or_path": "x", **values}

    def to_dict(self) -> dict[str, Any]:
        return self.values


def engine(directory: Path, **changes: Any) -> bytes:
    """The fingerprint of a vLLM that differs from the others of this file by `changes`."""
    give = changes.pop
    weight = give("weight", b"w")
    home = directory / (give("path", "model") + weight.hex())
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weight)
    name = give("name", str(home))
    sizes = {s: give(s, 1) for s in ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    group = SimpleNamespace(
        tokens_per_block=give("tokens_per_block", 16), layer_names=give("layers", ("l0", "l1")), group_id=0
    )
    offloading = SimpleNamespace(
        groups=(group,) * give("groups", 1),
        model=SimpleNamespace(name=name, dtype=give("kv_dtype", "bfloat16"), max_model_len=4096),
        cache=SimpleNamespace(
            tokens_per_hash=give("tokens_per_hash", 16), blocks_per_chunk=give("blocks_per_chunk", 1)
        ),
        parallel=SimpleNamespace(**sizes),
        kv_cache_layout=give("layout", "LBHNC"),
        canonical_layout=give("canonical", False),
        replicated_layout=give("replicated", False),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            revision=give("revision", None),
            dtype=give("dtype", "bfloat16"),
            quantization=give("quantization", None),
            seed=0,
            hf_config=HfConfig(**give("overrides", {})),
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=give("hash_algo", "sha256_cbor")),
        load_config=SimpleNamespace(load_format=give("load_format", "auto")),
    )
    inputs = vllm_fingerprint.fingerprint_inputs(
        offloading, give("block_bytes", 4096), give("version", "0.33.0"), config, give("device", "cuda")
    )
    assert not changes, "a difference that this table does not know"
    return keys.fingerprint(inputs)


@pytest.mark.parametrize(
    "difference",
    [
        {"weight": b"v"},
        {"name": "org/model"},
        {"overrides": {"rope_scaling": {"type": "yarn"}}},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"load_format": "dummy"},
        {"kv_dtype": "fp8"},
        {"layout": "LBNHC"},
        {"canonical": True},
        {"replicated": True},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"world_size": 2},
        {"tokens_per_block": 32},
        {"tokens_per_hash": 32},
        {"blocks_per_chunk": 16},
        {"block_bytes": 8192},
        {"groups": 2},
        {"layers": ("l0", "l2")},
        {"hash_algo": "sha256"},
        {"version": "0.32.0"},
        {"device": "cpu"},
    ],
    ids=lambda d: next(iter(d)),
)
def test_engines_that_differ_by_one_thing_share_nothing(tmp_path: Path, difference: dict[str, Any]) -> None:
    assert engine(tmp_path) != engine(tmp_path, **difference)


@pytest.mark.parametrize("revisions", [(None, "abc"), ("abc", "abd")])
def test_revisions_of_a_name_whose_files_are_unknown_share_nothing(
    tmp_path: Path, revisions: tuple[str | None, str]
) -> None:
    one, two = (engine(tmp_path, name="org/model", revision=r) for r in revisions)
    assert one != two


@pytest.mark.parametrize("alike", [{"path": "elsewhere"}, {"rank": 1}, {"overrides": {"_name_or_path": "y"}}])
def test_engines_that_differ_by_what_changes_no_byte_share(tmp_path: Path, alike: dict[str, Any]) -> None:
    assert engine(tmp_path) == engine(tmp_path, **alike)


def test_adapters_keep_an_engines_blocks_to_itself_unless_their_names_are_trusted() -> None:
    config = SimpleNamespace(lora_config=SimpleNamespace(), cache_config=SimpleNamespace(calculate_kv_scales=False))
    assert "trust_lora_names" in sharing_blocker(config, trust_lora_names=False)
    assert not sharing_blocker(config, trust_lora_names=True)


def test_scales_that_an_engine_finds_while_it_runs_keep_its_blocks_to_itself() -> None:
    config = SimpleNamespace(lora_config=None, cache_config=SimpleNamespace(calculate_kv_scales=True))
    assert "scales" in sharing_blocker(config, trust_lora_names=True)


def test_an_ordinary_engine_shares() -> None:
    config = SimpleNamespace(lora_config=None, cache_config=SimpleNamespace(calculate_kv_scales=False))
    assert not sharing_blocker(config, trust_lora_names=False)
