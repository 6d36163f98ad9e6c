"""Configuration values of injected engines and their client."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvpool.config import ClientConfig

__all__ = ["client_config", "compact", "escape_expansion", "vllm_connector"]

MODULE: Final = "kvpool.engines.vllm"
CLASS: Final = "PoolTier"


def vllm_connector(*, block_tokens: int, host_memory_bytes: int) -> dict[str, Any]:
    """Return the value of vLLM's --kv-transfer-config (docs/contribute/design/contracts.md, Engine).

    `recompute`: if a block cannot be loaded, the engine recomputes it, and the request does not fail.
    `offload_prompt_only` false:
    generated tokens are stored too, so that the next turn of a conversation finds them.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_memory_bytes,
            "block_size": block_tokens,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": CLASS, "module_path": MODULE}],
        },
    }


def client_config(config: ClientConfig) -> str:
    """Return the value of KVPOOL_CLIENT_CONFIG as one line of JSON."""
    return compact(asdict(config))


def compact(value: Any) -> str:
    """Canonical JSON in one line."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def escape_expansion(text: str) -> str:
    """Escape $(NAME), which Kubernetes expands in arguments and environment values; $$( is a literal $(."""
    return text.replace("$(", "$$(")
