"""Public import path of the vLLM plug-in: `kvpool.engines.vllm_plugin:register`.

It guards the import of the rest: a client that is damaged or made for another Python must not keep vLLM from starting.
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

_log = logging.getLogger("vllm.kvpool")


def register() -> None:
    """Called by vLLM in each of its processes. Never raises."""
    try:
        from kvpool.engines.vllm import plugin

        plugin.register()
    except Exception as e:
        problem = f"the client cannot be imported: {type(e).__name__}: {e}"
        _log.warning("kvpool: the engine runs without the pool: %s", problem)
        if os.environ.get("KVPOOL_VLLM_KV_TRANSFER_CONFIG"):
            _report(problem)


def _report(problem: str) -> None:
    try:
        from kvpool.engines.common.without_pool import report_without_pool

        report_without_pool(problem, "vllm")
    except Exception as e:
        _log.debug("kvpool: the sentence cannot be reported: %s", e)
