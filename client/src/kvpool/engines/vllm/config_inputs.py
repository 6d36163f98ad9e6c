"""Fingerprint inputs from a vLLM engine's whole configuration: model, drafter, attention, caches, media.

Imports nothing of vLLM: it reads a VllmConfig-like object, of which any part may be missing. The fields are those of
vLLM 0.32 and 0.33 (vllm/config/).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvpool.engines.common import weights

__all__ = ["config_inputs", "digest"]

_PATHS = ("_name_or_path", "transformers_version", "architectures_override")
_WITHOUT_DRAFTER = ("ngram", "ngram_gpu", "suffix")  # methods that compute no KV
_DRAFTER = ("quantization", "kv_cache_dtype", "index_share_for_mtp_iteration", "parallel_drafting")
_CACHE = (
    "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode",
    "mamba_block_size", "use_replayssm", "use_kda_recoverssm",
)  # fmt: skip
_ATTENTION = ("backend", "backend_per_kind", "flash_attn_version", "indexer_kv_dtype", "use_non_causal")
_MEDIA = (
    "mm_hasher_algorithm", "mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate",
    "video_pruning_method", "language_model_only",
)  # fmt: skip


def config_inputs(name: str, engine_config: Any) -> dict[str, Any]:
    """Return the inputs as JSON values. `name`: the model's path or hub name. Reads the files of its model."""
    model = getattr(engine_config, "model_config", None)
    cache = getattr(engine_config, "cache_config", None)
    load = getattr(engine_config, "load_config", None)
    load_format = str(getattr(load, "load_format", ""))
    return {
        "engine_config": "known" if model is not None else "unknown",
        "model_dtype": str(getattr(model, "dtype", "")),
        "quantization": str(getattr(model, "quantization", "")),
        "quantization_config": _plain(getattr(model, "quantization_config", None)),
        "hash_algorithm": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "load_format": load_format,
        "seed": getattr(model, "seed", None) if load_format == "dummy" else None,
        "hf_config": _hf_config_digest(getattr(model, "hf_config", None)),
        "long_rope": _uses_long_rope(model),
        "model_code": _fields(model, ("model_impl", "model_class_overrides", "disable_sliding_window")),
        "model_runner": _runner(engine_config),
        "attention": _fields(getattr(engine_config, "attention_config", None), _ATTENTION),
        "cache_settings": _fields(cache, _CACHE),
        "multimodal": _fields(getattr(model, "multimodal_config", None), _MEDIA),
        "speculative": _speculative_inputs(getattr(engine_config, "speculative_config", None)),
        "model": _weights_inputs(name, model, load),
    }


def digest(value: Any) -> str:
    """Return 32 hex digits over a JSON value; other values count as their text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _weights_inputs(name: str, model: Any, load: Any) -> dict[str, Any]:
    revision = str(getattr(model, "revision", None) or "")
    source = str(getattr(model, "model_weights", "") or "")  # an object store's address; the directory has no weights
    found = weights.find_files(name, revision or None)
    inputs: dict[str, Any] = {"files": found.digest} if found.digest else {"name": name, "revision": revision}
    if source:
        inputs |= {"source": source, "revision": revision}
    elif found.digest and not found.has_weights:
        # a loader takes the weights from elsewhere
        inputs |= {"name": name, "revision": revision, "loader": _plain(getattr(load, "model_loader_extra_config", {}))}
    return inputs


def _speculative_inputs(speculative: Any) -> dict[str, Any] | None:
    """Return the inputs of a drafter, whose layers are part of the blocks; None if no drafter computes KV."""
    method = str(getattr(speculative, "method", "") or "")
    if speculative is None or method in _WITHOUT_DRAFTER:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    name = str(getattr(draft, "model", None) or getattr(speculative, "model", None) or "")
    load = getattr(speculative, "draft_load_config", None)
    settings = {field: _plain(getattr(speculative, field, None)) for field in _DRAFTER}
    return {
        "method": method,
        "tokens": getattr(speculative, "num_speculative_tokens", None),
        "settings": digest({**settings, "dtype": str(getattr(draft, "dtype", ""))}),
        "hf_config": _hf_config_digest(getattr(draft, "hf_config", None)),
        "draft": digest(_weights_inputs(name, draft, load)) if name else "",
    }


def _uses_long_rope(model: Any) -> bool:
    """Return whether positions of a LongRoPE model are rotated by its long factors.

    vLLM decides that by the engine's longest request (phi3_long_rope_scaled_rope.py), so `--max-model-len` changes
    the keys of every token.
    """
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    original = getattr(text, "original_max_position_embeddings", None)
    for source in ("rope_parameters", "rope_scaling"):
        values = getattr(text, source, None)
        if original is None and isinstance(values, dict):
            original = values.get("original_max_position_embeddings")
    longest = getattr(model, "max_model_len", None)
    return isinstance(original, int) and isinstance(longest, int) and longest > original and _is_long_rope(text)


def _is_long_rope(text: Any) -> bool:
    for source in ("rope_parameters", "rope_scaling"):
        values = getattr(text, source, None)
        if isinstance(values, dict) and "longrope" in (values.get("rope_type"), values.get("type")):
            return True
    return False


def _runner(engine_config: Any) -> str:
    """Return vLLM's generation of model runners: each allocates its KV tensors in a way of its own."""
    try:
        return "v2" if engine_config.use_v2_model_runner else "v1"
    except Exception:  # a property that needs parts that are missing
        return ""


def _fields(part: Any, names: tuple[str, ...]) -> str:
    """Return a digest of those of the fields that are set; "" if there are none."""
    values = {name: _plain(getattr(part, name, None)) for name in names}
    values = {name: value for name, value in values.items() if value not in (None, "", [], {})}
    return digest(values) if values else ""


def _plain(value: Any) -> Any:
    """Return `value` as JSON values that are equal in every process: no address of an object, no order of a set."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    name = getattr(value, "name", None)
    if isinstance(name, str):  # an enumeration's member
        return name
    fields = getattr(value, "__dataclass_fields__", None)
    if isinstance(fields, dict):
        return {field: _plain(getattr(value, field, None)) for field in fields}
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _hf_config_digest(hf_config: Any) -> str:
    """Return a digest of a model's configuration after the user's overrides (rope scaling and the like)."""
    try:
        values = _without_paths(hf_config.to_dict())
    except Exception:
        return ""
    return digest(values)


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items() if key not in _PATHS}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    return value
