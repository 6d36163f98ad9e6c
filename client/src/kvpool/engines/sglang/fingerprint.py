"""Fingerprint inputs of an SGLang engine, and the parts of its block identities.

Two engines share pages only if all inputs are equal; uncertain ones are included. Imports nothing of SGLang: it reads
the objects passed to it. The fields are those of SGLang 0.5.23 (sglang/srt/mem_cache/hicache_storage.py,
mem_cache/pool_host/, arg_groups/fields/).
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from kvpool.engines.common import weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["digest", "fingerprint_inputs", "pool_inputs", "rank_part"]

_FORMAT = 1  # version of the payload layout

# of a host pool: everything that decides which bytes a page holds and in which order, nothing about its capacity
_POOL_FIELDS = (
    "layout", "dtype", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "size_per_token",
    "head_num", "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
    "override_kv_cache_dim", "item_bytes", "slot_page_size", "indexer_page_stride_size", "indexer_dtype",
    "dsa_kv_cache_store_fp8", "num_mamba_layers", "temporal_dtype", "conv_dtype", "temporal_state_shape",
    "conv_state_shapes", "shard_rank", "shard_size", "dcp_size", "storage_format_tag",
)  # fmt: skip

_SIZES = ("tp_size", "pp_size", "attn_cp_size", "dcp_size", "tp_lcm_size", "logical_page_size")

# of the server's arguments, as SGLang has resolved them
_ARGUMENTS = (
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args", "load_format",
    "device", "attention_backend", "prefill_attention_backend", "decode_attention_backend", "enable_dp_attention",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision", "weight_version",
)  # fmt: skip


def fingerprint_inputs(config: Any, pool: Any, version: str, argument: Callable[[str], Any]) -> dict[str, Any]:
    """Return JSON values from a HiCacheStorageConfig-like `config`, the KV's host `pool` and the server arguments.

    `argument(name)` returns one resolved argument, None if it is unknown.
    """
    path = argument("model_path")
    inputs: dict[str, Any] = {
        "format": _FORMAT,
        "engine": "sglang",
        "version": version,
        "server_arguments": "known" if path else "unknown",
        "arguments": _known((name, argument(name)) for name in _ARGUMENTS),
        "sizes": _known((name, getattr(config, name, None)) for name in _SIZES),
        "split_heads": bool(getattr(config, "should_split_heads", False)),
        "mla": bool(config.is_mla_model),
        "pool": pool_inputs(pool),
        "loras": _adapters(argument("lora_paths")),
        "model": _files(str(path or config.model_name or ""), argument("revision")),
    }
    draft = argument("speculative_draft_model_path")
    if draft:
        inputs["draft_model"] = _files(str(draft), argument("speculative_draft_model_revision"))
    if (
        inputs["arguments"].get("load_format") == "dummy"
    ):  # random weights, or weights that are loaded later from elsewhere
        inputs["process"] = os.urandom(16).hex()
    return inputs


def pool_inputs(pool: Any) -> dict[str, Any]:
    """Return the inputs of one host pool as JSON values: its class, and everything that changes the bytes of a page."""
    inputs = _known((name, getattr(pool, name, None)) for name in _POOL_FIELDS)
    inner = getattr(pool, "host_pool", None)  # a facade that shards pages over ranks
    inputs["class"] = type(pool).__name__ + (f"({type(inner).__name__})" if inner is not None else "")
    return inputs


def rank_part(config: Any, name: str, pool: Any) -> str:
    """Which rank's share of a page a block holds; ranks that hold copies of the same bytes have the same.

    Only KV that is replicated for certain is shared by the ranks of a tensor-parallel group: a wrong guess here would
    give one rank the heads of another.
    """
    kinds = {kind.__name__ for kind in type(pool).__mro__}
    replicated = bool(config.is_mla_model) and name != "mamba" and (name == "kv" or bool(kinds & _REPLICATED))
    tensor = f"shard{getattr(config, 'dcp_rank', 0)}" if replicated else f"tp{config.tp_rank}"
    return f"{tensor}-pp{config.pp_rank}-cp{getattr(config, 'attn_cp_rank', 0)}"


_REPLICATED = frozenset({"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool"})


def digest(value: Any) -> str:
    """32 hex digits over a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _known(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values if value is not None}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def _files(name: str, revision: Any) -> dict[str, str]:
    """Return a digest of the model's files if they are known, else its name."""
    revision = str(revision or "")
    files = weights.find(name, revision or None)
    return {"files": files} if files else {"name": name, "revision": revision}


def _adapters(loras: Any) -> list[str]:
    """SGLang names an adapter by its name and path: what lies at the path must count too."""
    values = list(loras.values()) if isinstance(loras, dict) else list(loras or [])
    digests = []
    for lora in values[:1024]:
        path = str(getattr(lora, "lora_path", None) or lora)
        digests.append(digest(_files(path.rpartition("=")[2], None)))
    return sorted(digests)
