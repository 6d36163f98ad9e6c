"""Bytes of KV cache by model: published figures, each kind of attention, and refusals."""

from __future__ import annotations

import pytest

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import catalog
from kvpool_cli.planner.attention import MODEL_TYPES, read_layout

KIB = 1024
GIB = 2**30


def layout(name, **options):
    return read_layout(catalog.find(name).config, **options)


@pytest.mark.parametrize(
    ("name", "nominal", "growing"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 128 * KIB, 128 * KIB),
        ("meta-llama/Llama-3.3-70B-Instruct", 320 * KIB, 320 * KIB),
        ("meta-llama/Llama-3.1-405B", 504 * KIB, 504 * KIB),
        ("Qwen/Qwen3-8B", 144 * KIB, 144 * KIB),
        ("openai/gpt-oss-20b", 48 * KIB, 24 * KIB),
        ("openai/gpt-oss-120b", 72 * KIB, 36 * KIB),
        ("deepseek-ai/DeepSeek-R1", 576 * 61 * 2, 576 * 61 * 2),
    ],
)
def test_bytes_of_a_token_are_the_published_ones(name, nominal, growing):
    found = layout(name)
    assert (found.bytes_per_token, found.bytes_per_token_growing) == (nominal, growing)


@pytest.mark.parametrize(
    ("name", "block_mib", "at_4k_gib", "at_32k_gib", "at_128k_gib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32, 0.5, 4, 16),
        ("meta-llama/Llama-3.3-70B-Instruct", 80, 1.25, 10, 40),
        ("meta-llama/Llama-3.1-405B", 126, 1.97, 15.75, 63),
        ("Qwen/Qwen3-8B", 36, 0.5625, 4.5, 18),
        ("openai/gpt-oss-20b", 12, 0.094, 0.75, 3),
        ("openai/gpt-oss-120b", 18, 0.141, 1.13, 4.5),
        ("deepseek-ai/DeepSeek-R1", 17.2, 0.268, 2.14, 8.58),
    ],
)
def test_blocks_and_sessions_have_the_published_sizes(name, block_mib, at_4k_gib, at_32k_gib, at_128k_gib):
    found = layout(name)
    assert found.block_bytes(256) / 2**20 == pytest.approx(block_mib, rel=0.005)
    # windows add 128 tokens of half of the layers: 3 % of a session of 4,096 tokens
    assert found.session_bytes(4096) / GIB == pytest.approx(at_4k_gib, rel=0.035)
    assert found.session_bytes(32768) / GIB == pytest.approx(at_32k_gib, rel=0.006)
    assert found.session_bytes(131072) / GIB == pytest.approx(at_128k_gib, rel=0.002)


def test_an_fp8_cache_is_half_as_large():
    assert layout("meta-llama/Llama-3.1-8B-Instruct", dtype="fp8").session_bytes(131072) == 8 * GIB
    assert layout("deepseek-ai/DeepSeek-R1", dtype="fp8").bytes_per_token == 576 * 61


def test_layers_with_a_window_stop_to_grow():
    found = layout("openai/gpt-oss-20b")
    assert found.session_bytes(128) == 128 * 48 * KIB
    assert found.session_bytes(1128) - found.session_bytes(128) == 1000 * 24 * KIB


def test_attention_chunks_count_up_to_one_chunk():
    found = layout("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert [(g.kind, g.layers, g.window) for g in found.groups] == [("full", 12, 0), ("chunk", 36, 8192)]
    assert found.session_bytes(100_000) == (12 * 100_000 + 36 * 8192) * 4096


def test_a_recurrent_state_counts_once_and_is_no_token():
    found = layout("Qwen/Qwen3.5-27B")
    assert found.bytes_per_token == 16 * 2 * 4 * 256 * 2
    convolution, state = (2 * 16 * 128 + 48 * 128) * 3 * 2, 48 * 128 * 128 * 4
    assert found.state_bytes == 48 * (convolution + state)
    assert found.session_bytes(1000) == 1000 * found.bytes_per_token + found.state_bytes
    # 48 layers with a state and 16 with attention: pieces of 16 layers
    assert (found.objects_per_block, found.largest_object(256)) == (4, found.state_bytes // 3)


@pytest.mark.parametrize(
    ("name", "objects", "layers"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 1, 80),
        ("openai/gpt-oss-20b", 2, 12),
        ("google/gemma-3-27b-it", 7, 10),  # 52 with a window, in 6 pieces of at most 9, and 10 with full attention
        ("deepseek-ai/DeepSeek-V3.2", 1, 61),
    ],
)
def test_each_kind_of_layer_is_stored_in_pieces_of_equal_numbers_of_layers(name, objects, layers):
    found = layout(name)
    assert found.objects_per_block == objects
    of_layer = found.bytes_per_token / sum(g.layers for g in found.groups if g.layers)
    if len(found.groups) == 1 or name.startswith(("openai", "google")):
        assert found.largest_object(256) == 256 * layers * of_layer
    else:
        assert found.largest_object(256) == found.block_bytes(256)


def test_mamba_layers_keep_convolution_and_state():
    found = layout("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert [(g.kind, g.layers) for g in found.groups] == [("full", 6), ("state", 23)]
    assert found.state_bytes == 23 * ((4096 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4)


def test_full_layers_may_have_other_heads_than_windows():
    found = layout("google/gemma-4-26B-A4B")
    assert found.bytes_per_token_growing == 5 * 2 * 2 * 512 * 2
    assert found.bytes_per_token - found.bytes_per_token_growing == 25 * 2 * 8 * 256 * 2


def test_sparse_attention_stores_the_keys_of_its_indexer_too():
    assert layout("deepseek-ai/DeepSeek-V3.2").bytes_per_token == 61 * (576 * 2 + 132)
    assert layout("deepseek-ai/DeepSeek-V3.2", dtype="fp8").bytes_per_token == 61 * (656 + 132)


def test_more_ranks_than_heads_store_copies_but_latents_are_stored_once():
    assert layout("Qwen/Qwen3-235B-A22B", tensor_parallel=8).bytes_per_token == 2 * 188 * KIB
    assert layout("Qwen/Qwen3-235B-A22B", tensor_parallel=4).bytes_per_token == 188 * KIB
    assert layout("deepseek-ai/DeepSeek-R1", tensor_parallel=8).bytes_per_token == 576 * 61 * 2


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


def test_a_model_without_grouped_heads_has_one_per_query_head():
    assert read_layout(LLAMA).bytes_per_token == 2 * 2 * 4 * 16 * 2


def test_the_language_model_of_a_larger_config_counts():
    assert read_layout({"model_type": "sees", "text_config": LLAMA}).bytes_per_token == 512


def test_the_dtype_that_the_checkpoint_asks_for_is_taken():
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert read_layout({**LLAMA, **scheme}).dtype == "fp8"
    assert read_layout({**LLAMA, "quantization_config": {"kv_cache_scheme": "FP8"}}).dtype == "fp8"
    assert read_layout({**LLAMA, "torch_dtype": "float32"}).bytes_per_token == 1024


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"model_type": None}, "not known"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "lightning"]}, "layer_types"),
        ({"model_type": "gpt_oss", "sliding_window": 8, "layer_types": ["full_attention", "sparse"]}, "sparse"),
        ({"model_type": "gpt_oss", "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "deepseek_v3", "index_topk": 8}, "index_topk"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}, "indexer_types"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "--kv-dtype"),
        ({"torch_dtype": "float4"}, "--kv-dtype"),
        ({"model_type": "mistral"}, "sliding_window"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        read_layout({**LLAMA, **change})
    assert "\n" not in str(caught.value)


def test_each_shipped_model_has_facts_a_source_and_a_name_of_its_own():
    names = [name.lower() for model, aliases in catalog.shipped() for name in (model.name, *aliases)]
    assert len(names) == len(set(names))
    assert len(catalog.shipped()) >= 40
    for model, _ in catalog.shipped():
        found = read_layout(model.config)
        assert 4 * KIB <= found.bytes_per_token <= 1024 * KIB, model.name
        assert 0 < found.bytes_per_token_growing <= found.bytes_per_token, model.name
        assert model.config["model_type"] in MODEL_TYPES
        assert model.source
        assert model.active_parameters
    assert {model.config["model_type"] for model, _ in catalog.shipped()} >= {
        "llama", "gpt_oss", "gemma3_text", "llama4_text", "deepseek_v3", "deepseek_v32", "qwen3_5_text", "nemotron_h",
    }  # fmt: skip


def test_a_model_is_found_without_its_organization_and_in_any_case():
    assert catalog.find("qwen3-8b").name == "Qwen/Qwen3-8B"
    with pytest.raises(UsageError, match="qwen/qwen3-8b"):
        catalog.find("Qwen/Qwen3-8")


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"'])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        catalog.read_config(tmp_path)


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(5 * 2**20)
    with pytest.raises(UsageError, match="it is no config"):
        catalog.read_config(tmp_path / "config.json")
