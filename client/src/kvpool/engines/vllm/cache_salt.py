"""Cache salt of a vLLM request, for pools whose blocks can be purged by salt. Needs no vLLM to be imported.

A tier of vLLM's offloading sees a request as its ReqContext (vllm/v1/kv_offload/base.py), which does not hold its
`cache_salt`. The scheduler's module makes it from the request, by a function that it calls by name in that module. So
that function is wrapped, once in a process: what it returns is the same, with the salt in the context's room for
state. All blocks of a request have its salt, because vLLM hashes the salt into the first one and each into the next.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["record_salts", "salt_of"]

_log = logging.getLogger("vllm.kvpool")
_MARK = "_kvpool_remembers_salts"


class _Salt(NamedTuple):
    value: str


def record_salts() -> str:
    """Make vLLM record the salt in each new request's context. Return why that is impossible, or "". Never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        make: Callable[..., Any] = scheduler._create_req_context
        if not getattr(make, _MARK, False):
            scheduler._create_req_context = _remembering(make)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def salt_of(request: Any) -> str | None:
    """Return the salt of a request's context; None if it has none or it was not recorded. Never raises."""
    try:
        salt = request.get_state(_Salt)
        return salt.value if salt is not None else None
    except Exception:
        _log.debug("kvpool: the salt of a store is unknown", exc_info=True)
        return None


def _remembering(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def with_salt(request: Any, *args: Any, **kwargs: Any) -> Any:
        context = make(request, *args, **kwargs)
        try:
            if request.cache_salt:
                context.set_state(_Salt(str(request.cache_salt)))
        except Exception:
            _log.debug("kvpool: the salt of a request could not be recorded", exc_info=True)
        return context

    setattr(with_salt, _MARK, True)
    return with_salt
