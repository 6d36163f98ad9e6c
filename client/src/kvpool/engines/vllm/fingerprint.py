"""Fingerprint inputs of a vLLM engine: everything that changes the meaning of its blocks' bytes.

Two engines share blocks only if all inputs are equal; uncertain ones are included. Imports nothing of vLLM: it reads
the objects passed to it. The fields are those of vLLM 0.32 and 0.33 (vllm/v1/kv_offload/config.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kvpool.engines.common import weights

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["find_engine_config", "fingerprint_inputs", "sharing_blocker"]

_FORMAT = 1  # version of the payload layout
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "architectures_override")


def fingerprint_inputs(
    config: Any, block_bytes: int, version: str, engine_config: Any = None, device: str = ""
) -> dict[str, Any]:
    """Return JSON values from an OffloadingConfig-like `config` and, if known, the engine's whole configuration."""
    groups = [{"tokens": g.tokens_per_block, "layers": _digest(list(g.layer_names))} for g in config.groups]
    parallel = config.parallel
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
        "canonical_layout": bool(getattr(config, "canonical_layout", False)),
        "replicated_layout": bool(getattr(config, "replicated_layout", False)),
        "sizes": {
            name: getattr(parallel, name, None) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    inputs.update(_model_inputs(config.model.name, engine_config))
    return inputs


def _model_inputs(name: str, engine_config: Any) -> dict[str, Any]:
    model = getattr(engine_config, "model_config", None)
    cache = getattr(engine_config, "cache_config", None)
    load = getattr(engine_config, "load_config", None)
    revision = getattr(model, "revision", None)
    inputs: dict[str, Any] = {
        "engine_config": "known" if model is not None else "unknown",
        "model_dtype": str(getattr(model, "dtype", "")),
        "quantization": str(getattr(model, "quantization", "")),
        "hash_algorithm": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "load_format": str(getattr(load, "load_format", "")),
        "seed": getattr(model, "seed", None) if str(getattr(load, "load_format", "")) == "dummy" else None,
        "hf_config": _hf_config_digest(getattr(model, "hf_config", None)),
    }
    files = weights.find(name, revision)
    # the files' digest suffices if it is known, and pods may keep them under different paths
    inputs["model"] = {"files": files} if files else {"name": name, "revision": str(revision or "")}
    return inputs


def _hf_config_digest(hf_config: Any) -> str:
    """Return a digest of the model's configuration after the user's overrides (rope scaling and the like)."""
    try:
        values = dict(hf_config.to_dict())
    except Exception:
        return ""
    for noise in _CONFIG_NOISE:
        values.pop(noise, None)
    return _digest(values)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
