"""Probe of vLLM's block hashes: the hash of fixed tokens by the engine's own function and seed. Needs vLLM.

Engines name equal blocks alike if and only if their probes are equal: seed, algorithm, serialization and patches of
vLLM all count. The functions are those of vLLM 0.33 (vllm/utils/hashing.py, vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import logging

__all__ = ["hash_probe"]

_log = logging.getLogger("vllm.kvpool")
_TOKENS = tuple(range(16))


def hash_probe(algorithm: str) -> str:
    """Return 32 hex digits for `--prefix-caching-hash-algo`; empty if this vLLM does not show its seed. Never raises.

    Without a fixed seed each process has another probe, as it has other block hashes.
    """
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        hash_function = get_hash_fn_by_name(algorithm)
        root = hash_function(resolve_none_hash_seed(hash_function))
        return bytes(hash_function((root, _TOKENS, None))).hex()[:32]
    except Exception as e:
        _log.debug("kvpool: this vLLM's block hashes cannot be probed: %r", e)
        return ""
