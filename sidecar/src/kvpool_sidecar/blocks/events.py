"""In-process event bus for changes of blocks: stores emit, other parts subscribe by event type.

Dispatch is synchronous: handlers run in the emitting thread, in the order of subscription. An emitter holds no lock,
so a handler may call the store. An emit without subscribers costs one dictionary lookup.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.protocol.block import BlockHeader

__all__ = [
    "BlockEvents",
    "BlockPromoted",
    "BlockReplicated",
    "BlockStored",
    "BlockUnreplicated",
    "BlocksEvicted",
    "BlocksOpened",
    "BlocksRemoved",
    "CorruptBlockReported",
    "DriveIncident",
    "SharedBlockOpened",
    "SharedBlocksAbsent",
]

log = logging.getLogger(__name__)
E = TypeVar("E")


class BlockStored(NamedTuple):
    """A local drive has committed a block, or its scan has found one (only where the scan reads headers)."""

    block_key: bytes
    header: BlockHeader


class BlockReplicated(NamedTuple):
    """The shared tier has a copy of a local block."""

    block_key: bytes


class BlockUnreplicated(NamedTuple):
    """The scan has found a local block that is not marked as copied to the shared tier."""

    block_key: bytes
    payload_len: int


class BlockPromoted(NamedTuple):
    """A block was copied into the local tier from the shared tier or from a peer."""

    block_key: bytes
    payload_len: int


class BlocksOpened(NamedTuple):
    """Local blocks were opened for an engine or a peer."""

    block_keys: Sequence[bytes]


class BlocksRemoved(NamedTuple):
    """Local blocks are gone. `cause`: that of BlocksEvicted, purged or quarantined; empty if they vanished."""

    block_keys: Sequence[bytes]
    cause: str = ""


class BlocksEvicted(NamedTuple):
    """`blocks` were evicted.

    `cause`: capacity (of the tier), space (of its file system), memory (of the table), quota or expired.
    """

    cause: str
    blocks: int


class DriveIncident(NamedTuple):
    """`occurrences` of `kind` on a drive.

    `kind`: evicted, expired, over_quota, purged, quarantined, junk, io_error or writers_given_up.
    """

    kind: str
    occurrences: int


class SharedBlockOpened(NamedTuple):
    """A block of the shared tier was opened. `used_at`: its previous access time by the mount's clock; 0: unknown."""

    block_key: bytes
    used_at: float


class SharedBlocksAbsent(NamedTuple):
    """The shared tier has confirmed that it does not have these blocks."""

    block_keys: Sequence[bytes]


class CorruptBlockReported(NamedTuple):
    """A copy of this block that a peer sent failed verification. Stores do not emit it."""

    block_key: bytes


class BlockEvents:
    """The bus. Thread-safe.

    An exception of a handler is logged and never reaches the emitter or the other handlers.
    """

    def __init__(self) -> None:
        self._handlers: dict[type, tuple[Callable[[Any], None], ...]] = {}  # tuples are replaced, never changed
        self._lock = threading.Lock()  # serializes subscriptions; `emit` does not take it

    def subscribe(self, event_type: type[E], handler: Callable[[E], None]) -> Callable[[], None]:
        """Call `handler` for each event of exactly this type.

        Returns
        -------
        A function that ends the subscription. A handler that runs at that moment still finishes.
        """
        with self._lock:
            self._handlers[event_type] = (*self._handlers.get(event_type, ()), handler)
        return lambda: self._unsubscribe(event_type, handler)

    def has_subscribers(self, event_type: type) -> bool:
        """Return whether an event of this type would be handled: lets an emitter skip building its payload."""
        return bool(self._handlers.get(event_type))

    def emit(self, event: object) -> None:
        """Call the handlers of the event's type. Never raises an Exception."""
        for handler in self._handlers.get(type(event), ()):
            try:
                handler(event)
            except Exception:
                log.exception("a subscriber of %s failed; the event is lost for it", type(event).__name__)

    def _unsubscribe(self, event_type: type, handler: Callable[[Any], None]) -> None:
        with self._lock:
            left = list(self._handlers.get(event_type, ()))
            if handler in left:
                left.remove(handler)
            self._handlers[event_type] = tuple(left)
