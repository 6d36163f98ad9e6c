"""The error tree of KVPool.

::

    KVPoolError                      carries `block_key` (hex), `where` (a path or address), never content
    +-- RetryableError               the same call may work later: the pool is away, full or slow
    |   +-- PoolUnavailableError     no sidecar answers (also ConnectionError)
    |   +-- DeadlineExceededError    the caller's deadline passed (also TimeoutError)
    |   +-- TierFullError            no space, or the tenant is over its quota
    |   +-- BusyError                too many requests in flight; nothing was tried
    +-- PermanentError               the same call will never work
    |   +-- ProtocolError            the other side violated the protocol; its connection is closed
    |   +-- ConfigError              a configuration cannot be used (also ValueError)
    |   +-- RefusedError             the caller may not do this
    +-- CorruptBlockError            stored bytes do not match the request: a miss, and the block is quarantined

Engine plug-ins let none of these escape: at an engine's boundary every error is a miss and a counter.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ConfigError",
    "CorruptBlockError",
    "DeadlineExceededError",
    "KVPoolError",
    "PermanentError",
    "PoolUnavailableError",
    "ProtocolError",
    "RefusedError",
    "RetryableError",
    "TierFullError",
]


class KVPoolError(Exception):
    """Base of all errors; `block_key` is in hex, `where` a path or an address; both may be empty."""

    def __init__(self, message: str, *, block_key: str = "", where: str = "") -> None:
        self.block_key = block_key
        self.where = where
        detail = " ".join(
            p for p in (f"block_key={block_key[:16]}" if block_key else "", f"at={where}" if where else "") if p
        )
        super().__init__(f"{message} ({detail})" if detail else message)


class RetryableError(KVPoolError):
    """The same call may work later."""


class PoolUnavailableError(RetryableError, ConnectionError):
    """No sidecar answers on this node."""


class DeadlineExceededError(RetryableError, TimeoutError):
    """The caller's deadline passed; requests in flight are discarded."""


class TierFullError(RetryableError):
    """No space left in the tier, or the tenant is over its quota."""


class BusyError(RetryableError):
    """Too many requests in flight; nothing was tried."""


class PermanentError(KVPoolError):
    """The same call will never work."""


class ProtocolError(PermanentError):
    """The other side violated the protocol; its connection is closed."""


class ConfigError(PermanentError, ValueError):
    """A configuration cannot be used; the message names the field and the fix."""


class RefusedError(PermanentError):
    """The caller may not do this."""


class CorruptBlockError(KVPoolError):
    """Stored bytes do not match the request: a miss; the block is quarantined."""
