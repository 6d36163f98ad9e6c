"""What `kvpool up` prints: the engines' command lines, and the figures while it runs. Pure functions."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["engine_commands", "figures", "join_command", "vllm_connector"]


def vllm_connector(host_memory_bytes: int, block_tokens: int) -> dict[str, Any]:
    """Value of KVPOOL_VLLM_KV_TRANSFER_CONFIG, the same that the webhook sets."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_memory_bytes,
            "block_size": block_tokens,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "PoolTier", "module_path": "kvpool.engines.vllm"}],
        },
    }


def engine_commands(socket: str, client: str, host_memory_bytes: int, block_tokens: int) -> str:
    """Return a shell line to set the client up, and one line for each engine.

    `socket`: of the sidecar. `client`: directory of the client's code. Each line can be pasted as it is.
    """
    settings = shlex.quote(json.dumps({"socket": socket}))
    connector = shlex.quote(json.dumps(vllm_connector(host_memory_bytes, block_tokens)))
    common = (
        f"export PYTHONPATH={shlex.quote(client)}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONHASHSEED=0 "
        f"KVPOOL_CLIENT_CONFIG={settings}"
    )
    return "\n".join(
        [
            "In the shell of an engine, first:",
            f"  {common}",
            "then one of:",
            f"  KVPOOL_VLLM_KV_TRANSFER_CONFIG={connector} vllm serve MODEL",
            "  KVPOOL_SGLANG_HICACHE='{}' sglang serve --model-path MODEL",
            "  KVPOOL_LMCACHE_L2='{}' lmcache server --l1-size-gb 16 --eviction-policy LRU",
        ]
    )


def join_command(host: str, port: int, secret: str) -> str:
    """Return what to run on another machine."""
    return (
        f"On another machine, copy {secret} there, and run:\n"
        f"  kvpool up --path DIR --address ITS-ADDRESS --join {host}:{port} --secret-file pool-secret"
    )


def figures(status: Mapping[str, Any]) -> str:
    """One line from the sidecar's /status; a figure that is not known yet is shown as a dash."""
    cache = status.get("cache", {})
    asked, found = cache.get("tokensAsked", 0), cache.get("tokensFound", 0)
    rate = f"{100 * found / asked:.1f} %" if asked else "-"
    loaded = " ".join(f"{tier} {count}" for tier, count in sorted(status.get("hits", {}).items()))
    return (
        f"blocks {status.get('blocks', 0)} ({size(status.get('used_bytes', 0))} of "
        f"{size(status.get('capacity_bytes', 0))}), peers {status.get('index', {}).get('peers', 0)}, "
        f"engine connections {status.get('clients', 0)}; tokens found {found} of {asked} in 1 h ({rate}); "
        f"blocks loaded: {loaded or 'none'}"
    )


def size(count: float) -> str:
    """Bytes as Kubernetes writes them, with at most one decimal."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.4g}{unit}" if unit else f"{count:.0f}"
        count /= 1024
    return f"{count:.4g}Ti"
