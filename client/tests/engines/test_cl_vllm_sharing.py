"""Pairs of engines that must not share a block, each by one difference, and pairs that must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpool.engines.vllm import fingerprint as vllm_fingerprint
from kvpool.engines.vllm.fingerprint import loading_blocker, sharing_blocker
from kvpool.protocol import keys
from kvpool.protocol.fingerprint_fields import MAX_FIELDS, field_digests

if TYPE_CHECKING:
    from pathlib import Path


class Platform:
    def __init__(self, name: str, fp8: str) -> None:
        self._enum = SimpleNamespace(name=name)
        self._fp8 = fp8

    def fp8_dtype(self) -> str:
        return self._fp8


CUDA = Platform("CUDA", "torch.float8_e4m3fn")
MI355 = Platform("ROCM", "torch.float8_e4m3fn")
MI300 = Platform("ROCM", "torch.float8_e4m3fnuz")
PHI = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = {"hidden_size": 64, "num_hidden_layers": 2, "_name_or_path": "x", **values}
        self.rope_scaling = values.get("rope_scaling")
        self.original_max_position_embeddings = values.get("original_max_position_embeddings")

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
    if weight:
        (home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weight)
    name = give("name", str(home))
    sizes = {s: give(s, 1) for s in ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    sizes["is_parallelism_agnostic"] = give("agnostic", False)
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
    hf_config = HfConfig(**give("overrides", {}))
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            revision=give("revision", None),
            dtype=give("dtype", "bfloat16"),
            quantization=give("quantization", None),
            quantization_config=give("online_quantization", None),
            seed=0,
            hf_config=hf_config,
            max_model_len=give("max_model_len", 4096),
            model_weights=give("model_weights", ""),
            model_impl=give("model_impl", "auto"),
            disable_sliding_window=give("disable_sliding_window", False),
            multimodal_config=SimpleNamespace(**give("media", {})),
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=give("hash_algo", "sha256_cbor"), **give("cache", {})),
        load_config=SimpleNamespace(
            load_format=give("load_format", "auto"), model_loader_extra_config=give("loader", {})
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=give("interleave", 1)),
        attention_config=SimpleNamespace(**give("attention", {})),
        speculative_config=give("speculative", None),
        use_v2_model_runner=give("v2_runner", False),
    )
    inputs = vllm_fingerprint.fingerprint_inputs(
        offloading,
        give("block_bytes", 4096),
        give("version", "0.33.0"),
        config,
        give("device", "cuda"),
        platform=give("platform", CUDA),
        canonical_format=give("canonical_format", "v1-hnd" if offloading.canonical_layout else ""),
    )
    assert not changes, "a difference that this table does not know"
    assert len(field_digests({**inputs, "private": "x", "reset": "x"})) < MAX_FIELDS
    return keys.fingerprint(inputs)


def drafter(directory: Path, weight: bytes = b"w", method: str = "eagle", **changes: Any) -> SimpleNamespace:
    """A SpeculativeConfig whose drafter is a model in `directory`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weight)
    model = SimpleNamespace(model=str(directory), revision=None, dtype="bfloat16", hf_config=HfConfig())
    values = {"num_speculative_tokens": 2, "quantization": None, "kv_cache_dtype": None, **changes}
    return SimpleNamespace(method=method, model=str(directory), draft_model_config=model, **values)


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
        {"platform": MI355},
        {"online_quantization": {"linear": "fp8"}},
        {"model_weights": "s3://bucket/model"},
        {"model_impl": "transformers"},
        {"disable_sliding_window": True},
        {"v2_runner": True},
        {"attention": {"backend": SimpleNamespace(name="TRITON_ATTN")}},
        {"attention": {"indexer_kv_dtype": "fp8"}},
        {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
        {"cache": {"mamba_ssm_cache_dtype": "float32"}},
        {"media": {"mm_processor_kwargs": {"max_pixels": 1024}}},
        {"media": {"video_pruning_rate": 0.5}},
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


@pytest.mark.parametrize(
    "alike",
    [
        {"path": "elsewhere"},
        {"rank": 1},
        {"overrides": {"_name_or_path": "y"}},
        {"max_model_len": 8192},
        {"interleave": 16},
        {"loader": {"concurrency": 16}},
    ],
    ids=lambda d: next(iter(d)),
)
def test_engines_that_differ_by_what_changes_no_byte_share(tmp_path: Path, alike: dict[str, Any]) -> None:
    assert engine(tmp_path) == engine(tmp_path, **alike)


def test_adapters_keep_an_engines_blocks_to_itself_unless_their_names_are_trusted() -> None:
    config = SimpleNamespace(lora_config=SimpleNamespace(), cache_config=SimpleNamespace(calculate_kv_scales=False))
    assert "trust_lora_names" in sharing_blocker(config, trust_lora_names=False)
    assert not sharing_blocker(config, trust_lora_names=True)


def test_scales_that_an_engine_finds_while_it_runs_keep_its_blocks_to_itself() -> None:
    config = SimpleNamespace(lora_config=None, cache_config=SimpleNamespace(calculate_kv_scales=True))
    assert "scales" in sharing_blocker(config, trust_lora_names=True)


@pytest.mark.parametrize(
    ("use_mla", "prefix_caching", "chunked_prefill", "blocked"),
    [(True, False, False, True), (True, True, True, False), (True, False, True, False), (False, False, False, False)],
    ids=["latent attention on a CPU", "on a GPU", "without a prefix cache", "another model on a CPU"],
)
def test_an_engine_that_cannot_compute_behind_a_prefix_loads_nothing(
    use_mla: bool, prefix_caching: bool, chunked_prefill: bool, blocked: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked_prefill),
    )
    assert ("MLA" in loading_blocker(config)) is blocked
    assert not loading_blocker(None)


def test_an_ordinary_engine_shares() -> None:
    config = SimpleNamespace(lora_config=None, cache_config=SimpleNamespace(calculate_kv_scales=False))
    assert not sharing_blocker(config, trust_lora_names=False)


def test_the_path_in_a_nested_configuration_changes_nothing(tmp_path: Path) -> None:
    one, two = ({"text_config": {"hidden_size": 8, "_name_or_path": path}} for path in ("/here", "/there"))
    assert engine(tmp_path, overrides=one) == engine(tmp_path, overrides=two)


def test_engines_whose_longest_request_selects_other_rope_factors_share_nothing(tmp_path: Path) -> None:
    short, long, longer = (engine(tmp_path, overrides=PHI, max_model_len=n) for n in (4096, 8192, 131_072))
    assert short != long
    assert long == longer


def test_fp8_blocks_of_gpus_with_another_fp8_format_are_not_shared(tmp_path: Path) -> None:
    assert engine(tmp_path, platform=MI300, kv_dtype="fp8") != engine(tmp_path, platform=MI355, kv_dtype="fp8")
    assert engine(tmp_path, platform=MI300) == engine(tmp_path, platform=MI355)


def test_a_shuffled_layout_of_rocm_is_not_shared_with_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cuda = engine(tmp_path, platform=MI300), engine(tmp_path)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert engine(tmp_path, platform=MI300) != plain
    assert engine(tmp_path) == cuda


def test_token_positions_of_context_parallel_ranks_count(tmp_path: Path) -> None:
    two = {"dcp_size": 2, "tp_size": 2, "world_size": 2}
    assert engine(tmp_path, **two, interleave=1) != engine(tmp_path, **two, interleave=16)


def test_an_enumerations_member_counts_by_its_name(tmp_path: Path) -> None:
    one, two = ({"backend": SimpleNamespace(name="FLASH_ATTN")} for _ in range(2))
    assert engine(tmp_path, attention=one) == engine(tmp_path, attention=two)


def test_a_drafter_counts_with_its_weights_and_not_with_its_path(tmp_path: Path) -> None:
    def speculating(place: str, **changes: Any) -> bytes:
        return engine(tmp_path, speculative=drafter(tmp_path / place, **changes))

    eagle = speculating("a")
    assert eagle == speculating("b")
    others = [
        engine(tmp_path),
        speculating("c", weight=b"v"),
        speculating("d", method="mtp"),
        speculating("e", num_speculative_tokens=3),
        speculating("f", kv_cache_dtype="fp8"),
    ]
    assert eagle not in others


def test_a_method_that_computes_no_kv_shares_with_an_engine_without_one(tmp_path: Path) -> None:
    assert engine(tmp_path, speculative=SimpleNamespace(method="ngram", model="ngram")) == engine(tmp_path)


def test_a_directory_without_weights_counts_with_the_model_s_name_and_its_loader(tmp_path: Path) -> None:
    bare = engine(tmp_path, weight=b"")
    assert bare != engine(tmp_path, weight=b"", loader={"tensorizer_uri": "s3://bucket/model"})
    assert bare != engine(tmp_path, weight=b"", revision="abc")


def test_a_model_in_one_file_counts_by_its_content(tmp_path: Path) -> None:
    prints = []
    for place, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.gguf").write_bytes(content * 5000)
        prints.append(engine(tmp_path, name=str(tmp_path / place / "model.gguf")))
    assert prints[0] == prints[1] != prints[2]


TP2 = {"tp_size": 2, "world_size": 2}
TP4 = {"tp_size": 4, "world_size": 4}


def test_replicated_blocks_are_shared_by_all_tensor_parallel_sizes(tmp_path: Path) -> None:
    assert engine(tmp_path, replicated=True, **TP2) == engine(tmp_path, replicated=True, **TP4)
    assert engine(tmp_path, replicated=True, **TP2) != engine(tmp_path, **TP2)


def test_certified_canonical_blocks_are_shared_by_all_tensor_parallel_sizes(tmp_path: Path) -> None:
    canonical = {"canonical": True, "agnostic": True}
    assert engine(tmp_path, **canonical) == engine(tmp_path, **canonical, **TP2) == engine(tmp_path, **canonical, **TP4)
    assert engine(tmp_path, **canonical) != engine(tmp_path, agnostic=True)


@pytest.mark.parametrize(
    "layout",
    [
        {"agnostic": True},  # direct: the order of its bytes depends on the size, whatever this field says
        {"canonical": True},
        {"canonical": True, "replicated": True},
        {"canonical": True, "agnostic": True, "canonical_format": ""},
        {"canonical": True, "replicated": True, "agnostic": True, "canonical_format": ""},
    ],
    ids=["direct", "uncertified", "uncertified replicated", "unknown format", "unknown format, replicated"],
)
def test_blocks_of_any_other_layout_are_not_shared_by_two_sizes(tmp_path: Path, layout: dict[str, Any]) -> None:
    assert engine(tmp_path, **layout) != engine(tmp_path, **layout, **TP2)


@pytest.mark.parametrize("axis", ["pp_size", "pcp_size", "dcp_size"])
@pytest.mark.parametrize("layout", [{"replicated": True}, {"canonical": True, "agnostic": True}])
def test_other_parallel_axes_are_never_left_out(tmp_path: Path, axis: str, layout: dict[str, Any]) -> None:
    one, two = (engine(tmp_path, **layout, **sizes) for sizes in (TP2, {**TP2, "world_size": 4, axis: 2}))
    assert one != two


def test_formats_of_canonical_blocks_are_not_shared(tmp_path: Path) -> None:
    one, two = (engine(tmp_path, canonical=True, agnostic=True, canonical_format=f) for f in ("v1-hnd", "v2-hnd"))
    assert one != two
