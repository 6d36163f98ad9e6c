"""Events in vLLM's wire format (vllm/distributed/kv_events.py of 0.33): MessagePack of `[time, [events], null]`.

Each event is a map with its `type`. Routers index the engine's blocks: if the engine reported them, one event lists all
blocks of one or more of the pool's blocks, with their 64-bit hashes and, if the pool publishes them, their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvpool_sidecar.events.feed import Event, EventKind, Locality

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvpool.protocol.block import EngineBlock

__all__ = ["encode_batch"]

_LOCALITY = {Locality.LOCAL: "LOCAL", Locality.SHARED: "REMOTE"}
_MEDIUM = {Locality.LOCAL: "STORAGE", Locality.SHARED: "SHARED"}  # routers distinguish entries by medium
_LOW_64 = (1 << 64) - 1


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int | None = None
    locality: str | None = None
    kvpool: dict[str, str] | None = None  # extension: readers ignore it; Dynamo drops an unknown `ownership`


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    kvpool: dict[str, str] | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


def encode_batch(
    events: Iterable[Event],
    now: float,
    *,
    int_hashes: bool = False,
    models: Mapping[bytes, str] | None = None,
) -> bytes:
    """The payload of one message. Consecutive changes that fit become one event. `models`: name by fingerprint."""
    models = models or {}
    encoded: list[_Stored | _Removed | _Cleared] = []
    last: Event | None = None
    for event in events:
        name = event.name
        if name is None:
            encoded.append(_Cleared())
        elif last is not None and last.name is not None and _go_together(last, event, int_hashes=int_hashes):
            open_event = encoded[-1]
            assert not isinstance(open_event, _Cleared)  # noqa: S101
            open_event.block_hashes += _hashes(name, int_hashes=int_hashes)
            if isinstance(open_event, _Stored):
                open_event.token_ids += name.router_blocks.token_numbers
        else:
            encoded.append(_event(event, name, models, int_hashes=int_hashes))
        last = event
    return msgspec.msgpack.encode([now, encoded, None])


def _event(event: Event, name: EngineBlock, models: Mapping[bytes, str], *, int_hashes: bool) -> _Stored | _Removed:
    labels = {"tenant": event.tenant, "fingerprint": event.fingerprint.hex()}
    if model := models.get(event.fingerprint):
        labels["model"] = model
    hashes = _hashes(name, int_hashes=int_hashes)
    medium, where, group = _MEDIUM[event.place], _LOCALITY[event.place], name.group or None
    if event.kind is not EventKind.STORED:
        return _Removed(hashes, medium, group, where, labels)
    size = name.router_blocks.block_tokens if int_hashes and name.router_blocks else name.tokens
    tokens = name.router_blocks.token_numbers if int_hashes else []
    parent = _parent(name, int_hashes=int_hashes)
    return _Stored(hashes, parent, tokens, size, None, medium, None, group, where, labels)


def _hashes(name: EngineBlock, *, int_hashes: bool) -> list[bytes | int]:
    """Return the hashes of the engine's blocks; that of the last one if the engine did not report them."""
    if not int_hashes:
        return [name.engine_hash]
    return list(name.router_blocks.hash_numbers) if name.router_blocks else [_low_64(name.engine_hash)]


def _parent(name: EngineBlock, *, int_hashes: bool) -> bytes | int | None:
    if int_hashes and name.router_blocks:
        parent = name.router_blocks.parent
        return int.from_bytes(parent, "big") if parent else None
    if not name.parent_hash:
        return None
    return _low_64(name.parent_hash) if int_hashes else name.parent_hash


def _low_64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & _LOW_64


def _go_together(a: Event, b: Event, *, int_hashes: bool) -> bool:
    """Return whether one event covers both: consecutive stored blocks, or removed blocks of one kind."""
    assert a.name is not None and b.name is not None  # noqa: PT018, S101
    if (a.kind, a.place, a.tenant, a.fingerprint, a.name.group) != (
        b.kind,
        b.place,
        b.tenant,
        b.fingerprint,
        b.name.group,
    ):
        return False
    if a.kind is EventKind.REMOVED:
        return True
    if a.name.tokens != b.name.tokens or b.name.parent_hash != a.name.engine_hash:
        return False
    one, other = a.name.router_blocks, b.name.router_blocks
    return not int_hashes or (one.block_tokens, bool(one.token_ids)) == (other.block_tokens, bool(other.token_ids))
