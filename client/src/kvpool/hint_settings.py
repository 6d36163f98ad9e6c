"""The section `hints` of a pool's configuration (kvpool.config)."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.schema import doc

__all__ = ["HintsConfig"]


@dataclass(frozen=True)
class HintsConfig:
    """Session hints (docs/reference/session-hints.md)."""

    enabled: bool = doc(
        "Accept session hints. Each tenant then has an eviction order of its own on every drive.",
        default=True,
        live=True,
    )
    share_percent: int = doc(
        "Percent of a tenant's bytes on a drive that its sessions may expect to use again.", default=25, live=True
    )
    max_keep_s: int = doc("Longest time for which a session's expectation counts, in seconds.", default=3600, live=True)

    token_revision: int = doc("A change rotates the bearer token of POST /hints.", default=0, live=True)

    def __post_init__(self) -> None:
        if not 0 <= self.share_percent <= 100 or not 0 < self.max_keep_s <= 86400:
            raise ConfigError("hints: share_percent must be from 0 to 100, max_keep_s from 1 to 86400")
        if not 0 <= self.token_revision < 1 << 32:
            raise ConfigError("hints: token_revision must have 32 bits")
