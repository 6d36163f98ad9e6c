"""Digest of a model's files that is cheap enough to compute at every start of an engine.

Models whose blocks must not be mixed differ in their configuration or in their weights. Reading all weights
would take minutes, so a few pages of every tensor are read: training or merging changes a tensor everywhere. File names
count, paths and times do not, so the same model gives the same digest on every node.

The safetensors format: https://github.com/huggingface/safetensors (8 bytes little-endian length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ModelFiles", "digest", "directory_of", "find", "find_files"]

_log = logging.getLogger("kvpool")

_PAGE = 4096
_MAX_HEADER = 64 << 20
_MAX_TENSORS = 20_000
_SAMPLES = 64  # pages of a file of unknown format
_WHOLE = 1 << 20  # smaller files are read completely
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = (".json", ".py")
# block hashes are over token ids: tokenization does not matter
_IGNORED = ("tokenizer", "vocab", "added_tokens", "special_tokens", "chat_template", "generation_config")


def directory_of(name: str, revision: str | None) -> Path | None:
    """Return the directory of a model given as a path or a hub name; None if its files are not on this node."""
    if os.path.isdir(name):
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found,unused-ignore]

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:  # not installed, or not a hub name
        return None
    return Path(found).parent if isinstance(found, str) else None


class ModelFiles(NamedTuple):
    """A model's files on this node."""

    digest: str  # of `digest`; "" if there are none
    has_weights: bool


def find(name: str, revision: str | None) -> str:
    """Return `digest` of a model by its name, "" if its files are missing or cannot be read."""
    return find_files(name, revision).digest


def find_files(name: str, revision: str | None) -> ModelFiles:
    """Return a model's files by its path (a directory, or one file as GGUF's) or hub name. Never raises."""
    try:
        if os.path.isfile(name):
            return ModelFiles(_file_digest(Path(name)).hex(), has_weights=True)
        directory = directory_of(name, revision)
        if directory is None:
            return ModelFiles("", has_weights=False)
        return ModelFiles(digest(directory), any(n.endswith(_WEIGHTS) for n in os.listdir(directory)))
    except OSError as e:
        _log.warning("kvpool: the model's files cannot be read (%s); the fingerprint uses its name instead", e)
        return ModelFiles("", has_weights=False)


def digest(directory: Path) -> str:
    """Return 32 hex digits over configuration and weights in `directory`, "" without a model. OSError if unreadable."""
    names = sorted(os.listdir(directory))
    wanted = [n for n in names if n.endswith(_WEIGHTS) or (n.endswith(_CONFIGS) and not n.startswith(_IGNORED))]
    if not wanted:
        return ""
    total = hashlib.blake2b(digest_size=16)
    for name in wanted:
        path = directory / name
        if not path.is_file():
            continue
        part = _file_digest(path)
        total.update(len(name).to_bytes(4, "little") + name.encode() + part)
    return total.hexdigest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    out = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb", buffering=0) as file:
        if size <= _WHOLE:
            out.update(file.read(_WHOLE))
            return out.digest()
        places = _tensor_places(file.fileno(), size) if path.name.endswith(".safetensors") else None
        for place in places or [size * n // _SAMPLES for n in range(_SAMPLES)] + [size - _PAGE]:
            out.update(os.pread(file.fileno(), _PAGE, max(0, place)))
    return out.digest()


def _tensor_places(descriptor: int, size: int) -> list[int] | None:
    """First, middle and last page of each tensor, and of the header; None if the file is not as expected."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(_MAX_HEADER, size - 8):
        return None
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        spans = sorted(
            (int(t["data_offsets"][0]), int(t["data_offsets"][1])) for n, t in header.items() if n != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if len(spans) > _MAX_TENSORS or any(not 0 <= a <= b <= size for a, b in spans):
        return None
    base = 8 + length
    places = list(range(0, base, _PAGE))
    for first, last in spans:
        places += [base + first, base + (first + last) // 2, base + max(first, last - _PAGE)]
    return places
