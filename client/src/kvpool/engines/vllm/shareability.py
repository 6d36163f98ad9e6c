"""Why the blocks of a vLLM engine may mean something that no fact names, so that it must share them with nobody.

It imports nothing of vLLM: it reads the VllmConfig it is given. The fields are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from typing import Any

__all__ = ["sharing_blocker"]


def sharing_blocker(engine_config: Any, *, trust_lora_names: bool) -> str:
    """A sentence for the engine's log, with what to do about it; empty if the engine's blocks may be shared.

    Adapters: vLLM's block hash has an adapter's name and path and nothing of its weights (v1/core/kv_cache_utils.py,
    `_gen_lora_extra_hash_keys`), and adapters come and go while it serves, so two pods may have different ones of one
    name. Scales that are calculated while it runs come from the first requests, so they differ between pods.
    """
    if getattr(engine_config, "lora_config", None) is not None and not trust_lora_names:
        return (
            "it serves LoRA adapters, which its block hashes tell apart by name and path only; if these stand for the "
            'same weights on every pod, say "trust_lora_names": true in the entry of PoolTier'
        )
    if getattr(getattr(engine_config, "cache_config", None), "calculate_kv_scales", False):
        return "it calculates the scales of its KV cache while it runs; take them from the checkpoint to share blocks"
    return ""
