"""Reload: take a configuration now, which the kubelet will bring as a file later.

parameters: `config`, the text of pool.json. It is taken as far as a running sidecar can
(kvpool_sidecar.app.config_reload);
RefusedError says why not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.admin.context import Context

__all__ = ["Reload"]


class Reload:
    """A kind of operation. `take` gets the text and tells why it is not in force, or nothing."""

    def __init__(self, take: Callable[[str], str]) -> None:
        self._take = take

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        text = params.get("config")
        if not isinstance(text, str) or set(params) != {"config"}:
            raise ProtocolError("reload: config is the text of pool.json, and there is nothing else")
        if problem := self._take(text):
            raise RefusedError(problem)
        context.count("taken")
