"""What a request's kv_transfer_params say to the pool. Needs no vLLM."""

from __future__ import annotations

from typing import Any

__all__ = ["is_promised", "traceparent_of"]


def traceparent_of(req_context: Any) -> object:
    """Return what the request's kv_transfer_params name as its W3C traceparent."""
    params = getattr(req_context, "kv_transfer_params", None)
    return params.get("traceparent") if isinstance(params, dict) else None


def is_promised(req_context: Any) -> bool:
    """Return whether another engine transfers this prompt (a NixlConnector alongside this one in a MultiConnector).

    vLLM queries every connector and uses the first that offers anything, so a load by this one would be wasted.
    """
    params = getattr(req_context, "kv_transfer_params", None)
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))
