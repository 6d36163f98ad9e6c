"""Fingerprint inputs of a vLLM engine: everything that changes the meaning of its blocks' bytes.

Two engines share blocks only if all inputs are equal; uncertain ones are included. Paths, host names and sizes of
caches are not: equal engines on two nodes have equal inputs. Imports nothing of vLLM: it reads the objects passed to
it. The fields are those of vLLM 0.32 and 0.33 (vllm/v1/kv_offload/config.py).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvpool.engines.vllm.config_inputs import config_inputs, digest

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["find_engine_config", "fingerprint_inputs", "is_any_parallel_size", "loading_blocker", "sharing_blocker"]

_FORMAT = 2  # version of the payload layout
_SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")


def fingerprint_inputs(
    config: Any,
    block_bytes: int,
    version: str,
    engine_config: Any = None,
    device: str = "",
    *,
    platform: Any = None,
    canonical_format: str = "",
) -> dict[str, Any]:
    """Return JSON values from an OffloadingConfig-like `config` and, if known, the engine's whole configuration.

    `platform`: vLLM's current_platform. `canonical_format`: vLLM's name of the format of canonical blocks, "" if
    the engine has none. Reads the model's files.
    """
    groups = [{"tokens": g.tokens_per_block, "layers": digest(list(g.layer_names))} for g in config.groups]
    canonical = bool(getattr(config, "canonical_layout", False))
    inputs: dict[str, Any] = {
        "format": _FORMAT,
        "engine": "vllm",
        "version": version,
        "device": device,
        "block_bytes": block_bytes,
        "groups": groups,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "kv_dtype": config.model.dtype,
        "kv_layout": getattr(config, "kv_cache_layout", None),
        "canonical_layout": canonical_format or "unknown" if canonical else "",
        "replicated_layout": bool(getattr(config, "replicated_layout", False)),
        "sizes": _sizes(config, engine_config, canonical_format),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    inputs.update(_platform_inputs(platform, str(config.model.dtype)))
    inputs.update(config_inputs(config.model.name, engine_config))
    return inputs


def is_any_parallel_size(config: Any, canonical_format: str) -> bool:
    """Return whether a block has the same bytes at every tensor-parallel size, so that these sizes may share.

    True for the two layouts of vLLM's host memory that hold each head of a block once, in an order that does not
    depend on the ranks: one copy of KV that all ranks hold alike (`replicated_layout`, MLA), and canonical blocks of
    layers that vLLM has certified (`canonical_layout` and `is_parallelism_agnostic`). In the direct layout a block is
    the ranks' parts one after the other, each with all its layers: its order depends on the size, whatever
    `is_parallelism_agnostic` says. Pipeline and context parallelism are never included.
    """
    parallel = config.parallel
    if parallel.world_size != parallel.tp_size:
        return False
    if any(getattr(parallel, name, 1) != 1 for name in ("pp_size", "pcp_size", "dcp_size")):
        return False
    if getattr(config, "canonical_layout", False):
        return bool(canonical_format) and getattr(parallel, "is_parallelism_agnostic", False) is True
    return getattr(config, "replicated_layout", False) is True


def _sizes(config: Any, engine_config: Any, canonical_format: str) -> dict[str, Any] | str:
    if is_any_parallel_size(config, canonical_format):
        return "any"
    sizes = {name: getattr(config.parallel, name, None) for name in _SIZES}
    if any((sizes[name] or 1) != 1 for name in ("pcp_size", "dcp_size")):
        # which rank holds which tokens of a block
        parallel = getattr(engine_config, "parallel_config", None)
        sizes["interleave"] = getattr(parallel, "cp_kv_cache_interleave_size", None)
    return sizes


def _platform_inputs(platform: Any, kv_dtype: str) -> dict[str, Any]:
    """Return what the device type leaves open: AMD's GPUs are of type "cuda", too, and some have other FP8 formats."""
    name = str(getattr(getattr(platform, "_enum", None), "name", ""))
    inputs: dict[str, Any] = {"platform": name.lower()}
    if kv_dtype.startswith("fp8") and platform is not None:
        inputs["fp8_format"] = str(platform.fp8_dtype())
    if name == "ROCM":
        inputs["shuffled"] = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "").lower() in ("1", "true")
    return inputs


def find_engine_config(depth: int = 30) -> Any:
    """Return the VllmConfig of the connector under construction, None if it cannot be found.

    vLLM passes a tier its offloading configuration only; the rest (overrides of the model's configuration, hash
    algorithm) is in a local variable of a caller.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            break
        candidate = frame.f_locals.get("vllm_config")
        if candidate is not None and hasattr(candidate, "model_config") and hasattr(candidate, "cache_config"):
            return candidate
        frame = frame.f_back
    return None


def loading_blocker(engine_config: Any) -> str:
    """Return why this engine must not load any block; empty if it may.

    On a platform without a GPU, vLLM turns chunked prefill and prefix caching off for a model with latent attention,
    because it cannot compute behind a cached prefix there (vllm/platforms/cpu.py, `check_and_update_config`). It loads
    the blocks of a tier all the same, and answers with wrong tokens.
    """
    model = getattr(engine_config, "model_config", None)
    cache = getattr(engine_config, "cache_config", None)
    scheduler = getattr(engine_config, "scheduler_config", None)
    needs_whole_prompt = (
        getattr(cache, "enable_prefix_caching", True) is False
        and getattr(scheduler, "enable_chunked_prefill", True) is False
    )
    if needs_whole_prompt and getattr(model, "use_mla", False):
        return "this vLLM cannot compute behind a cached prefix of a model with latent attention (MLA)"
    return ""


def sharing_blocker(engine_config: Any, *, trust_lora_names: bool) -> str:
    """Return why this engine must not share its blocks, with the fix, for its log; empty if it may.

    LoRA adapters: vLLM's block hash covers an adapter's name and path but not its weights (v1/core/kv_cache_utils.py,
    `_gen_lora_extra_hash_keys`), and adapters can be loaded at run time, so two pods may use different ones under one
    name. Scales that are calculated at run time depend on the first requests, so they differ between pods.
    """
    if getattr(engine_config, "lora_config", None) is not None and not trust_lora_names:
        return (
            "it serves LoRA adapters, which its block hashes identify by name and path only; if these have the same "
            'weights on every pod, set "trust_lora_names": true in the entry of PoolTier'
        )
    if getattr(getattr(engine_config, "cache_config", None), "calculate_kv_scales", False):
        return "it calculates the scales of its KV cache at run time; take them from the checkpoint to share blocks"
    return ""
