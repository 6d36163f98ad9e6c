"""The configuration in force, shared by all parts of the process, and its change notifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.tenancy.mapping import Tenancy

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.config import PoolConfig

__all__ = ["ConfigHolder"]


class ConfigHolder:
    """Holds the current configuration and the tenancy derived from it.

    Parts read `current` at each use, or subscribe to changes. `replace` is called from one thread at a time; reading is
    thread-safe.
    """

    def __init__(self, secret: bytes, config: PoolConfig) -> None:
        self._secret = secret
        self._state = (config, Tenancy(secret, config))
        self._listeners: list[Callable[[PoolConfig], None]] = []

    @property
    def current(self) -> PoolConfig:
        return self._state[0]

    @property
    def tenancy(self) -> Tenancy:
        return self._state[1]

    def subscribe(self, listener: Callable[[PoolConfig], None]) -> None:
        """Call `listener(previous)` after each change, in the order of subscription."""
        self._listeners.append(listener)

    def replace(self, config: PoolConfig) -> None:
        """Make `config` current and notify all listeners."""
        previous = self.current
        self._state = (config, Tenancy(self._secret, config))
        for listener in self._listeners:
            listener(previous)
