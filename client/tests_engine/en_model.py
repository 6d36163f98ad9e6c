"""Tiny models whose answers depend on every block of their context.

Weights that vLLM makes up (load_format dummy) are so small that an answer follows from the last token alone: it would
be the same with wrong blocks. As in e2e/engine/model.py, matrices here keep the variance of their input, queries and
keys are loud enough for attention to pick single tokens, and embeddings are quiet.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION_GAIN = 2.0
EMBEDDING_SCALE = 0.3
SEED = 20_261_121

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
WINDOW = 64  # tokens, of every other layer of the hybrid model
GEMMA = {
    **LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 2, "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}  # fmt: skip


def write(directory: Path, config: dict[str, Any] = LLAMA, seed: int = SEED) -> Path:
    """config.json and model.safetensors of a model of 2 MB; the same files each time. `seed`: of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save(directory / "model.safetensors", _weights(config, seed))
    return directory


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gemma = config["model_type"] == "gemma3_text"

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
        return (random.standard_normal((rows, columns)) * gain / math.sqrt(columns)).astype(np.float32)

    def norm(size: int = hidden) -> np.ndarray[Any, Any]:
        return np.zeros(size, np.float32) if gemma else np.ones(size, np.float32)  # Gemma's are added to 1

    loudness = EMBEDDING_SCALE * (1.0 if gemma else math.sqrt(hidden))  # Gemma multiplies by sqrt(hidden) itself
    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, loudness), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found |= {
            layer + "input_layernorm.weight": norm(),
            layer + "post_attention_layernorm.weight": norm(),
            layer + "self_attn.q_proj.weight": matrix(queries, hidden, ATTENTION_GAIN),
            layer + "self_attn.k_proj.weight": matrix(keys, hidden, ATTENTION_GAIN),
            layer + "self_attn.v_proj.weight": matrix(keys, hidden),
            layer + "self_attn.o_proj.weight": matrix(hidden, queries),
            layer + "mlp.gate_proj.weight": matrix(inner, hidden),
            layer + "mlp.up_proj.weight": matrix(inner, hidden),
            layer + "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if gemma:
            found |= {
                layer + "pre_feedforward_layernorm.weight": norm(),
                layer + "post_feedforward_layernorm.weight": norm(),
                layer + "self_attn.q_norm.weight": norm(head),
                layer + "self_attn.k_norm.weight": norm(head),
            }
    return found


def save(file: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """The safetensors format: length of a JSON header, the header, the data (github.com/huggingface/safetensors)."""
    header, place = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.tobytes())
