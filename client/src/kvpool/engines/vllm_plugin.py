"""Public import path of the vLLM plug-in: `kvpool.engines.vllm_plugin:register`."""

from kvpool.engines.vllm.plugin import register

__all__ = ["register"]
