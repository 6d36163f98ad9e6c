"""Kinds of models that vLLM's CPU backend runs, each tiny, with weights of loud_weights.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from en_model import GEMMA, LLAMA, WINDOW, save
from en_talk import BLOCK

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8  # of the adapter
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MOE = {
    **LLAMA, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONVOLUTION = {
    **LLAMA, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3], "conv_L_cache": 3, "conv_bias": False,
    "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128, "block_ff_dim": 256, "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model, how vLLM is started with it, and what to expect."""

    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] | None = None
    stored: int = 0
    """Fewest blocks that the engine stores of it; 0: all whole blocks of the prompt."""
    uses_adapter: bool = False
    """Requests name a LoRA adapter, and the tier trusts its name."""


KINDS = {
    "grouped-query attention": Kind(LLAMA),
    "sliding window in every layer": Kind(
        {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
        stored=WINDOW // BLOCK,  # the last ones of the prompt
    ),
    "sliding window in every other layer": Kind(GEMMA, {"disable_hybrid_kv_cache_manager": False}),
    "mixture of experts": Kind(MOE),
    "attention and convolution states": Kind(CONVOLUTION),
    "FP8 KV cache": Kind(LLAMA, {"kv_cache_dtype": "fp8"}),
    "LoRA adapter": Kind(LLAMA, {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}, uses_adapter=True),
    "drafter (EAGLE)": Kind(LLAMA, drafter={**LLAMA, "num_hidden_layers": 1}),
}


def write(directory: Path, kind: Kind) -> dict[str, Any]:
    """Write the model's configuration; return the arguments of vllm.LLM."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(kind.config))
    options = {"load_format": "dummy", "disable_log_stats": True, **kind.options}  # counters have one engine
    if kind.drafter is not None:
        drafter = directory / "drafter"
        drafter.mkdir()
        (drafter / "config.json").write_text(json.dumps(kind.drafter))
        speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2}
        options["speculative_config"] = speculative
    return options


def write_adapter(directory: Path) -> Path:
    """A LoRA adapter for LLAMA's queries and values that changes every answer."""
    directory.mkdir()
    targets = {"q_proj": 128, "v_proj": 64}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)
    tensors = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, rows in targets.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            down, up = random.standard_normal((RANK, 128)), random.standard_normal((rows, RANK))
            tensors[base + "lora_A.weight"] = (down / np.sqrt(128)).astype(np.float32)
            tensors[base + "lora_B.weight"] = (up / np.sqrt(RANK)).astype(np.float32)
    save(directory / "adapter_model.safetensors", tensors)
    return directory
