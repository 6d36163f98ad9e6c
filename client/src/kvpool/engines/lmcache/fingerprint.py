"""Fingerprint inputs and chunk identities of LMCache. Imports nothing of LMCache: it reads the objects passed to it.

LMCache identifies a chunk by a chained hash of its tokens, the model's name, the worker and, with its server, a salt.
Weights, dtype and shape are not included, so they go into the fingerprint, as far as LMCache knows them. The
fields are those of LMCache 0.5.6 (lmcache/v1/distributed/api.py, lmcache/utils.py, lmcache/v1/metadata.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engines.common import weights

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = [
    "FingerprintNamespace",
    "chunk_name",
    "fingerprint_inputs",
    "key_name",
    "layout_of",
    "layout_of_object",
    "leading_chunks",
    "salt_of",
]

_log = logging.getLogger("lmcache.kvpool")  # under LMCache's own logger

MIN_HASH_BYTES = 16  # shorter hashes are Python's built-in hash: not collision-resistant
_FORMAT = 1  # version of the payload layout
_WORLD_SHIFT = 24  # lmcache ObjectKey.ComputeKVRank


class FingerprintNamespace(NamedTuple):
    """Properties that exchangeable chunks have in common, besides their tokens."""

    model: str
    world_size: int
    group: int
    layout: str  # of `layout_of`


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Return a canonical text of shapes (sequences of int) and dtypes; "" for bytes produced by an LMCache serde."""
    pairs = [[[int(n) for n in shape], str(dtype)] for shape, dtype in zip(shapes, dtypes, strict=True)]
    if not pairs or any(len(shape) < 2 for shape, _ in pairs):
        return ""
    return json.dumps(pairs, separators=(",", ":"))


def layout_of_object(memory: Any) -> str:
    """Return `layout_of` a memory object of LMCache; "" for one without shapes or dtypes."""
    try:
        return layout_of(memory.get_shapes(), memory.get_dtypes())
    except Exception as e:
        _log.debug("kvpool: an object has no shapes: %r", e)
        return ""


def space_of(key: Any, layout: str) -> FingerprintNamespace:
    """Return the namespace of an ObjectKey of LMCache's server."""
    return FingerprintNamespace(
        str(key.model_name), (int(key.kv_rank) >> _WORLD_SHIFT) & 0xFF, int(key.object_group_id), layout
    )


def chunk_name(key: Any) -> tuple[bytes, bytes] | None:
    """Return hash and part (kvpool.protocol.keys.block_id) of an ObjectKey; None if its hash is too short to be safe.

    Salt and rank are in the part: chunks of two salts are two blocks.
    """
    chunk_hash = bytes(key.chunk_hash)
    if len(chunk_hash) < MIN_HASH_BYTES:
        return None
    return chunk_hash, _canonical(["mp", int(key.kv_rank), int(key.object_group_id), str(key.cache_salt)])


def leading_chunks(keys: Sequence[Any], found: Collection[int]) -> tuple[int, int]:
    """Return the number of chunks of a prompt, and of the leading ones that are complete.

    A chunk has one ObjectKey for each rank and cache group. `found`: positions of the keys that were found.
    """
    whole: dict[bytes, bool] = {}
    for place, key in enumerate(keys):
        name = bytes(key.chunk_hash)
        whole[name] = whole.get(name, True) and place in found
    return len(whole), next((n for n, is_found in enumerate(whole.values()) if not is_found), len(whole))


def salt_of(key: Any) -> str | None:
    """Return the `cache_salt` of an ObjectKey; None if its request had none."""
    return str(key.cache_salt) or None


def key_name(key: Any, dtype: str) -> tuple[bytes, bytes]:
    """Return hash and part of a CacheEngineKey of LMCache inside an engine, with the tags of its request.

    LMCache's own text of a key is not used: in it a tag's value can look like another tag.
    """
    chunk_hash = key.chunk_hash if isinstance(key.chunk_hash, bytes) else b"%x" % int(key.chunk_hash)
    tags = [[str(name), str(value)] for name, value in key.tags or ()]
    part = ["in-process", str(key.model_name), int(key.world_size), int(key.worker_id), dtype, tags]
    return chunk_hash, _canonical(part)


def fingerprint_inputs(
    space: FingerprintNamespace, version: str, *, revision: str = "", tag: str = "", **more: Any
) -> dict[str, Any]:
    """Return the fingerprint inputs as JSON values. Reads the model's files if present: not for an engine's thread."""
    files = weights.find(space.model, revision or None)
    return {
        "format": _FORMAT,
        "engine": "lmcache",
        "version": version,
        # the files' digest suffices if it is known, and pods may keep them under different paths
        "model": {"files": files} if files else {"name": space.model, "revision": revision},
        "world_size": space.world_size,
        "group": space.group,
        "layout": space.layout,
        "tag": tag,
        **more,
    }


def split(keys: Sequence[Any], layouts: Mapping[int, str] | Sequence[str]) -> dict[FingerprintNamespace, list[int]]:
    """Return the positions of `keys` by namespace. `layouts`: by cache group, or one per key; "" is left out."""
    out: dict[FingerprintNamespace, list[int]] = {}
    for place, key in enumerate(keys):
        layout = layouts[place] if not hasattr(layouts, "get") else layouts.get(int(key.object_group_id), "")
        if layout:
            out.setdefault(space_of(key, layout), []).append(place)
    return out


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.encode() if len(text) < 4096 else hashlib.sha256(text.encode()).digest()
