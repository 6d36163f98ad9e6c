"""Operation `reload`: apply a configuration before the kubelet delivers it as a file.

Parameters: `config`, the text of pool.json. A running sidecar applies the live fields
(kvpool_sidecar.app.config_reload). RefusedError has the reason if it cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpool.errors import ProtocolError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Context

__all__ = ["ConfigTarget", "Reload"]


class ConfigTarget(Protocol):
    """Applies a configuration text."""

    def apply(self, text: str) -> str:
        """Apply the text; return the reason if it was not applied, otherwise an empty string."""


class Reload:
    """Operation `reload`."""

    def __init__(self, target: ConfigTarget) -> None:
        self._target = target

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        text = params.get("config")
        if not isinstance(text, str) or set(params) != {"config"}:
            raise ProtocolError("reload: config (the text of pool.json) is required, and nothing else is allowed")
        if problem := self._target.apply(text):
            raise RefusedError(problem)
        context.count("taken")
