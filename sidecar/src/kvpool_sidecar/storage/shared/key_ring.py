"""Keys of the shared tier: one file that the operator writes, read again when it changes.

The file is JSON. `keys` maps the id of a key (32 hexadecimal digits, `kvpool.protocol.keys.shared_key_id`) to
the key (64 hexadecimal digits). `tenants` maps a tenant's id to the id of the key for its new blocks; `default` is the
id for tenants that are not listed, empty if they have none.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ConfigError, RefusedError
from kvpool.protocol.keys import shared_key_id
from kvpool_sidecar.blocks.encryption import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["KeyRing", "NoKeyError", "ParsedKeys", "TenantTags", "parse_keys"]

log = logging.getLogger(__name__)

_READ_EVERY_S = 2.0
_MAX_KEYS = 8192


class NoKeyError(RefusedError):
    """This sidecar has no key for the tenant of a block."""


class ParsedKeys(NamedTuple):
    """Content of the file."""

    keys: dict[bytes, bytes]  # by id
    tenants: dict[bytes, bytes]  # id of the key by tenant tag
    default: bytes  # id of the key of all others; empty: none


_NONE = ParsedKeys({}, {}, b"")


def parse_keys(text: bytes, tag_of: Callable[[str], bytes]) -> ParsedKeys:
    """Parse the file; empty text: no keys. ConfigError if anything is malformed or a key has another id. Pure."""
    if not text:
        return _NONE
    try:
        value = json.loads(text)
        keys = {bytes.fromhex(name): bytes.fromhex(key) for name, key in value["keys"].items()}
        tenants = {tag_of(tenant): bytes.fromhex(name) for tenant, name in value["tenants"].items()}
        default = bytes.fromhex(value["default"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("the keys of the shared tier are malformed") from None
    if len(keys) > _MAX_KEYS or any(len(key) != KEY_BYTES or shared_key_id(key) != name for name, key in keys.items()):
        raise ConfigError("a key of the shared tier does not fit its id")
    return ParsedKeys(keys, tenants, default)


@dataclass(frozen=True)
class TenantTags:
    """`tag_of` derives the tag of a tenant's id; `configured` returns the tags of the configured tenants."""

    tag_of: Callable[[str], bytes]
    configured: Callable[[], Collection[bytes]] = tuple


class KeyRing:
    """The current keys. Thread-safe. Without a readable file there are none, so that no forgotten key is used.

    `read` returns the file's content, empty if it is missing; it is called at most every 2 s. A configured tenant
    has a key of its own and never gets the default one, also before its key has arrived and after it was forgotten.
    """

    def __init__(
        self,
        read: Callable[[], bytes],
        tags: TenantTags,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._tags = tags
        self._clock = clock
        self._lock = threading.Lock()
        self._text: bytes | None = None
        self._parsed = _NONE
        self._once_assigned: set[bytes] = set()
        self._read_at = 0.0
        self.problem = ""

    def key(self, key_id: bytes) -> bytes | None:
        """Return the key with this id; None if it is not known."""
        return self._current().keys.get(key_id)

    def key_for(self, tenant_tag: bytes) -> bytes | None:
        """Return the key for new blocks of a tenant; None if it has none."""
        current = self._current()
        key_id = current.tenants.get(tenant_tag)
        if key_id is None:
            has_own = tenant_tag in self._once_assigned or tenant_tag in self._tags.configured()
            key_id = b"" if has_own else current.default
        return current.keys.get(key_id)

    def is_assigned(self, tenant_tag: bytes) -> bool:
        """Return whether a tenant has a separate key here."""
        return tenant_tag in self._current().tenants

    def ids(self) -> list[str]:
        """Return the ids of the known keys, sorted."""
        return sorted(key_id.hex() for key_id in self._current().keys)

    def _current(self) -> ParsedKeys:
        with self._lock:
            now = self._clock()
            if self._text is not None and now - self._read_at < _READ_EVERY_S:
                return self._parsed
            self._read_at = now
            try:
                text = self._read()
                if text != self._text:
                    self._parsed = parse_keys(text, self._tags.tag_of)
                    self._text = text
                    if len(self._once_assigned) < _MAX_KEYS:
                        self._once_assigned |= self._parsed.tenants.keys()
                    log.info("the shared tier has %d keys", len(self._parsed.keys))
                self.problem = ""
            except ConfigError as e:
                self._text, self._parsed, self.problem = b"", _NONE, str(e)
                log.warning("no keys for the shared tier: %s", e)
            return self._parsed
