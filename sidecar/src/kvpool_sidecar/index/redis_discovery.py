"""Discovers the servers of an index: the master that Sentinel reports, or the masters of a Redis Cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import RetryableError
from kvpool_sidecar.index.credentials import Passwords
from kvpool_sidecar.index.redis_connection import ConnectionFailure, ErrorReply, RedisConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.index_url import IndexUrl
    from kvpool_sidecar.index.redis_connection import Command, Login, Reply, Target

__all__ = ["SLOTS", "ServerDiscovery"]

SLOTS = 16384


class ServerDiscovery:
    """Opens a connection for each query. Thread-safe."""

    def __init__(self, url: IndexUrl, login: Login, timeout_s: float) -> None:
        self._url = url
        self._login = login
        self._timeout_s = timeout_s

    def master(self) -> Target:
        """Query the Sentinels for the master, and check its role. RetryableError."""
        reason = "no Sentinel responds"
        for endpoint in self._url.endpoints:
            # Sentinels have users of their own or none; if they require a password, it is the same one
            anonymous = self._login._replace(username="", passwords=Passwords.fixed(""), db=0)
            for login in (anonymous, self._login._replace(db=0)):
                answer = self._execute_once(
                    endpoint, login, (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._url.service)
                )
                if isinstance(answer, list) and len(answer) == 2:
                    target = (_text(answer[0]), int(answer[1]))
                    role = self._execute_once(target, self._login, (b"ROLE",))
                    if (isinstance(role, list) and role and role[0] == b"master") or role == ErrorReply("NOPERM"):
                        return target
                    reason = "the master that the Sentinels report is no master, or does not respond"
                elif answer is None:
                    reason = "the Sentinels know no master of that name"
                if not isinstance(answer, ErrorReply):
                    break
        raise RetryableError(f"index: {reason}", where=self._url.public)

    def cluster_masters(self, known: Sequence[Target]) -> list[tuple[Target, list[range]]]:
        """Query the slots of each master of the cluster, `known` servers first. RetryableError."""
        for target in [*known, *(t for t in self._url.endpoints if t not in known)]:
            answer = self._execute_once(target, self._login, (b"CLUSTER", b"SLOTS"))
            found = _read_slots(answer, target[0]) if isinstance(answer, list) else {}
            if found:
                return sorted(found.items())
        raise RetryableError("index: no server of the cluster returned its slots", where=self._url.public)

    def _execute_once(self, target: Target, login: Login, command: Command) -> Reply:
        link = RedisConnection(target, login, self._timeout_s)
        try:
            answer = link.execute([command])
        finally:
            link.close()
        return answer if isinstance(answer, ConnectionFailure) else answer[0]


def _read_slots(answer: Sequence[Reply], asked: str) -> dict[Target, list[range]]:
    """Parse CLUSTER SLOTS: start, end, then [host, port, ...] of the master and of its replicas."""
    found: dict[Target, list[range]] = {}
    try:
        for start, end, master, *_ in answer:
            if not 0 <= start <= end < SLOTS:
                return {}
            found.setdefault((_text(master[0]) or asked, int(master[1])), []).append(range(start, end + 1))
    except (TypeError, ValueError, IndexError):
        return {}
    return found


def _text(value: Reply) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
