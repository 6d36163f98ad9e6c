"""Digests of what turns a prompt into tokens: the tokenizer's files and the chat template.

They are no part of a fingerprint, because blocks are named by token ids: engines with different ones share what they
tokenize alike. The pool's status compares them, because a prompt that is tokenized differently is never found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from kvpool.engines.common import weights

__all__ = ["prompt_digests"]

_log = logging.getLogger("kvpool")

_MAX_BYTES = 64 << 20  # of all files together; those of the largest vocabularies have about 35 MB
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CONFIG = "tokenizer_config.json"  # has the template of older models, and paths of no meaning


def prompt_digests(tokenizer: str, revision: str | None = None, chat_template: str = "") -> dict[str, str]:
    """Return digests by name, `tokenizer` and `chat_template`; a name is absent if nothing is known. Never raises.

    `tokenizer`: a directory or a hub name. `chat_template`: a file or the text that replaces the tokenizer's own.
    Reads at most 64 MiB.
    """
    try:
        directory = weights.directory_of(tokenizer, revision) if tokenizer else None
        found = {"tokenizer": _of_files(directory, _TOKENIZER) if directory else ""}
        found["chat_template"] = _of_template(directory, chat_template)
        return {name: digest for name, digest in found.items() if digest}
    except Exception as e:  # an engine starts without them
        _log.debug("kvpool: the tokenizer's files cannot be read: %r", e)
        return {}


def _of_files(directory: Path, names: tuple[str, ...]) -> str:
    """Return a digest of those files that exist; empty without any, or if they are too large."""
    paths = [path for name in names if (path := directory / name).is_file()]
    if not paths or sum(path.stat().st_size for path in paths) > _MAX_BYTES:
        return ""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        total.update(hashlib.blake2b(path.name.encode()).digest() + hashlib.blake2b(_content(path)).digest())
    return total.hexdigest()


def _of_template(directory: Path | None, given: str) -> str:
    if given:
        text = _content(Path(given)) if os.path.isfile(given) else given.encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()
    if directory is None:
        return ""
    own = _of_files(directory, _TEMPLATES)
    config = directory / _CONFIG
    if own or not config.is_file():
        return own
    value = json.loads(_content(config))
    template = value.get("chat_template") if isinstance(value, dict) else None
    text = json.dumps(template, sort_keys=True).encode() if template else b""
    return hashlib.blake2b(text, digest_size=16).hexdigest() if text else ""


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)
