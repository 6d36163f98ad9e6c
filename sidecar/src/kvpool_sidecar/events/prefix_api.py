"""POST /prefixes of the sidecar's HTTP port, for routers: a prompt's prefix length by node.

Reference: docs/reference/kv-events.md. The request holds a tenant, a fingerprint and the engine's block hashes in
order; the response, how many blocks from the first on each node has. The index is queried at most twice, whatever the
number of blocks.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ProtocolError
from kvpool.protocol import keys
from kvpool.protocol.block import MAX_ENGINE_HASH
from kvpool.protocol.wire import MAX_LOOKUP
from kvpool_sidecar.system.json_requests import MAX_BODY, MAX_PART, decode_request, is_bearer, read_hex, read_tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["MAX_BODY", "PrefixApi", "PrefixQuery", "parse_query"]

_TIMEOUT_S = 1.0
_WINDOW = 64
_FIRST_GROUP = bytes(4)  # the part of vLLM's first cache group


class PrefixQuery(NamedTuple):
    """`hashes` are those of the engine's blocks, in order; `part` is that of kvpool.protocol.keys.block_id."""

    tenant: str
    fingerprint: bytes
    hashes: Sequence[bytes]
    part: bytes = _FIRST_GROUP


def parse_query(body: bytes) -> PrefixQuery:
    """Decode a request. ProtocolError if it is invalid."""
    value = decode_request(body)
    tenant, hashes = read_tenant(value.get("tenant")), value.get("hashes")
    if not isinstance(hashes, list) or not 0 < len(hashes) <= MAX_LOOKUP:
        raise ProtocolError(f"hashes is a list of 1 to {MAX_LOOKUP} block hashes in hex")
    return PrefixQuery(
        tenant,
        read_hex(value.get("fingerprint"), "fingerprint", keys.FINGERPRINT_BYTES, keys.FINGERPRINT_BYTES),
        [read_hex(one, "each of hashes", 1, MAX_ENGINE_HASH) for one in hashes],
        read_hex(value.get("part", _FIRST_GROUP.hex()), "part", 0, MAX_PART),
    )


class PrefixApiSettings(NamedTuple):
    """`token` authenticates routers; `secret` is the pool's; `node` is this node's name."""

    token: str
    secret: bytes
    node: str


class PrefixApi:
    """Thread-safe. `tenants_of` returns the ids of a namespace's tenant and of the tenants it may read."""

    def __init__(
        self,
        settings: PrefixApiSettings,
        local: Store,
        peers: BlockResolver,
        shared: SharedTier | None,
        stats: Stats,
        tenants_of: Callable[[str], Sequence[str]] = lambda namespace: (namespace,),
    ) -> None:
        self._tenants_of = tenants_of
        self._token = settings.token
        self._secret = settings.secret
        self._node = settings.node
        self._local = local
        self._peers = peers
        self._shared = shared
        self._stats = stats

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is valid, in constant time."""
        ok = is_bearer(authorization, self._token)
        if not ok:
            self._stats.add("prefix_queries", "refused")
        return ok

    def respond(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and JSON: `{"nodes": {node: blocks}, "shared": blocks, "complete": the index answered}`."""
        try:
            query = parse_query(body)
        except ProtocolError as e:
            self._stats.add("prefix_queries", "malformed")
            return 400, {"error": str(e)}
        deadline = time.monotonic() + _TIMEOUT_S
        block_ids = [keys.block_id(query.fingerprint, one, query.part) for one in query.hashes]
        tenants = self._tenants_of(query.tenant)
        wanted = [[keys.block_key(self._secret, tenant, block_id) for block_id in block_ids] for tenant in tenants]
        nodes = self._peer_prefixes(wanted, deadline)
        complete = nodes is not None
        names = list(zip(*wanted, strict=True))  # of each block
        reach = {
            self._node: next((n for n, its in enumerate(names) if not any(map(self._local.contains, its))), len(names))
        }
        reach.update(nodes or {})
        self._stats.add("prefix_queries", "answered" if complete else "without-index")
        return 200, {
            "nodes": {node: n for node, n in reach.items() if n},
            "shared": self._shared_prefix(wanted, deadline),
            "complete": complete,
        }

    def _peer_prefixes(self, wanted: Sequence[Sequence[bytes]], deadline: float) -> dict[str, int] | None:
        """Return the prefix length by peer; None without the index. `wanted`: the block keys of each tenant."""
        there: list[set[str]] = [set() for _ in wanted[0]]
        for its in wanted:
            holders = self._peers.replicas(its, deadline - time.monotonic())
            if holders is None:
                return None
            there = [one | other for one, other in zip(there, holders, strict=True)]
        reach: dict[str, int] = {}
        still = set(there[0])
        for n, nodes in enumerate(there):
            still &= nodes
            if not still:
                break
            reach.update(dict.fromkeys(still, n + 1))
        return reach

    def _shared_prefix(self, wanted: Sequence[Sequence[bytes]], deadline: float) -> int:
        """Return the number of leading blocks on the shared tier that are found before the deadline."""
        if self._shared is None or not self._shared.available:
            return 0
        reach, count = 0, len(wanted[0])
        size = 1  # an unknown prompt costs one query
        while reach < count and deadline - time.monotonic() > 0:
            missing = list(range(reach, min(reach + size, count)))
            for its in wanted:
                left = deadline - time.monotonic()
                there = self._shared.contains_many([its[n] for n in missing], left) if missing and left > 0 else ()
                missing = [n for n, is_there in itertools.zip_longest(missing, there) if not is_there]
            if missing:
                return missing[0]
            reach += size
            size = _WINDOW
        return min(reach, count)
