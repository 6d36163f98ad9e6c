"""The vLLM request behind a tier's ReqContext, for pools that publish the engine's blocks. Needs no vLLM.

A ReqContext (vllm/v1/kv_offload/base.py) has neither the request's block hashes nor its tokens. The scheduler's module
makes it from the request, by a function that it calls by name in that module. That function is wrapped, once in a
process, and records the request in the context's room for state.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["record_requests", "request_of"]

_log = logging.getLogger("vllm.kvpool")
_MARK = "_kvpool_records_requests"


class _Recorded(NamedTuple):
    request: Any


def record_requests() -> None:
    """Make vLLM record each new request in its context. Never raises: without it, events have one hash per chunk."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        make: Callable[..., Any] = scheduler._create_req_context
        if not getattr(make, _MARK, False):
            scheduler._create_req_context = _recording(make)
    except Exception as e:
        _log.info("kvpool: events have one hash per stored block: requests cannot be recorded (%s)", type(e).__name__)


def request_of(req_context: Any) -> Any:
    """Return the recorded request; None if there is none. Never raises."""
    try:
        recorded = req_context.get_state(_Recorded)
    except Exception:
        return None
    return recorded.request if recorded is not None else None


def _recording(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)  # keeps the marks of other wrappers
    def with_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        context = make(request, *args, **kwargs)
        try:
            context.set_state(_Recorded(request))
        except Exception:
            _log.debug("kvpool: a request could not be recorded", exc_info=True)
        return context

    setattr(with_request, _MARK, True)
    return with_request
