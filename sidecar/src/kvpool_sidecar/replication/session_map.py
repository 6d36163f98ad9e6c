"""Which blocks belong to which session, so that a hint needs no block ids. Pure; the owner locks.

Bounded for each tenant and in total: the tenant with the most blocks forgets its session that was named longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KEY_BYTES", "SessionMap"]

KEY_BYTES = 32
_SESSIONS = 1024  # of one tenant
_BLOCKS = 1 << 16  # of one tenant; 2 MiB
_ALL_BLOCKS = 1 << 18  # 8 MiB


class _Sessions:
    def __init__(self) -> None:
        self.keys: OrderedDict[bytes, bytes] = OrderedDict()  # session tag: block keys in a row
        self.blocks = 0

    def pop(self, session: bytes) -> None:
        self.blocks -= len(self.keys.pop(session, b"")) // KEY_BYTES

    def pop_oldest(self) -> None:
        self.pop(next(iter(self.keys)))


class SessionMap:
    """Not thread-safe. Block keys of a session's latest prompt, by tenant tag and session tag."""

    def __init__(self, sessions: int = _SESSIONS, blocks: int = _BLOCKS, all_blocks: int = _ALL_BLOCKS) -> None:
        self._sessions = sessions
        self._blocks = blocks
        self._all_blocks = all_blocks
        self._tenants: dict[bytes, _Sessions] = {}

    def __len__(self) -> int:
        return sum(len(one.keys) for one in self._tenants.values())

    @property
    def blocks(self) -> int:
        """Block keys held."""
        return sum(one.blocks for one in self._tenants.values())

    def record(self, tenant: bytes, session: bytes, keys: Sequence[bytes]) -> None:
        """Record the blocks of a session's latest prompt, in order; earlier ones are replaced."""
        if not 0 < len(keys) <= self._blocks:
            return
        mine = self._tenants.setdefault(tenant, _Sessions())
        mine.pop(session)
        mine.keys[session] = b"".join(keys)
        mine.blocks += len(keys)
        while len(mine.keys) > self._sessions or mine.blocks > self._blocks:
            mine.pop_oldest()
        while self.blocks > self._all_blocks:
            tag, largest = max(self._tenants.items(), key=lambda item: item[1].blocks)
            largest.pop_oldest()
            if not largest.keys:
                del self._tenants[tag]

    def find(self, tenant: bytes, session: bytes) -> list[bytes]:
        """Return the session's blocks in the prompt's order; empty if it is not known."""
        mine = self._tenants.get(tenant)
        packed = b"" if mine is None else mine.keys.get(session, b"")
        if mine is not None and packed:
            mine.keys.move_to_end(session)
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def tenants_of(self, session: bytes) -> list[bytes]:
        """Return the tags of the tenants that have such a session: one at most, as its tag depends on the tenant."""
        return [tag for tag, one in self._tenants.items() if session in one.keys]

    def forget(self, tenant: bytes, session: bytes) -> None:
        """Remove a session."""
        mine = self._tenants.get(tenant)
        if mine is not None:
            mine.pop(session)
            if not mine.keys:
                del self._tenants[tenant]
