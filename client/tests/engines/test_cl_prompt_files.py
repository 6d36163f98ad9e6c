"""Digests of tokenizer and chat template, and the probe of block hashes: reported, compared, and never an error."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpool.engines.common import prompt_files
from kvpool.engines.common.prompt_files import prompt_digests
from kvpool.engines.vllm.hash_probe import hash_probe
from kvpool.protocol.fingerprint_fields import field_digests

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Write a model's directory; return its path."""

    def make(name: str = "model", tokens: str = "{}", config: object = None, **files: str) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "tokenizer.json").write_text(tokens)
        if config is not None:
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
        for file, text in files.items():
            (directory / file.replace("__", ".")).write_text(text)
        return str(directory)

    return make


def test_the_place_of_a_tokenizer_does_not_matter_but_its_files_do(model: Any) -> None:
    here, there, other = (prompt_digests(model(name, tokens)) for name, tokens in (("a", "1"), ("b", "1"), ("c", "2")))
    assert here == there
    assert here["tokenizer"] != other["tokenizer"]
    assert "chat_template" not in here


def test_a_template_is_found_in_its_file_or_in_the_tokenizers_configuration(model: Any) -> None:
    config = {"name_or_path": "/here", "chat_template": "{{ a }}"}
    old, moved = model("old", config=config), model("moved", config=config | {"name_or_path": "/there"})
    assert prompt_digests(old) == prompt_digests(moved)
    new = model("new", config=config, chat_template__jinja="{{ b }}")
    assert prompt_digests(new)["chat_template"] != prompt_digests(old)["chat_template"]
    assert prompt_digests(new)["tokenizer"] == prompt_digests(old)["tokenizer"]


def test_a_template_of_the_command_line_replaces_the_own_one(model: Any, tmp_path: Path) -> None:
    path = model(chat_template__jinja="own")
    given = tmp_path / "given.jinja"
    given.write_text("{{ c }}")
    by_file, by_text = prompt_digests(path, None, str(given)), prompt_digests(path, None, "{{ c }}")
    assert by_file == by_text
    assert by_file["chat_template"] != prompt_digests(path)["chat_template"]


def test_what_cannot_be_read_has_no_digest(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_digests("") == prompt_digests(str(tmp_path / "none")) == {}
    broken = model("broken", tokenizer_config__json="{")
    assert prompt_digests(broken) == {}
    odd = model("odd", config=["not an object"])
    assert set(prompt_digests(odd)) == {"tokenizer"}
    monkeypatch.setattr(prompt_files, "_MAX_BYTES", 8)
    assert prompt_digests(model("large", tokens="0123456789")) == {}


def test_pipes_and_directories_in_place_of_files_are_not_read(model: Any) -> None:
    path = model()
    os.mkfifo(f"{path}/chat_template.jinja")
    os.mkdir(f"{path}/merges.txt")
    assert set(prompt_digests(path)) == {"tokenizer"}


def test_the_digests_reach_the_status_as_fields_of_their_own() -> None:
    fields = field_digests({"engine": "vllm", "prompt": {"tokenizer": "a", "chat_template": "b"}})
    assert set(fields) == {"engine", "prompt.tokenizer", "prompt.chat_template"}


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The two modules of vLLM that hash blocks, with functions that a test replaces."""
    part = SimpleNamespace(seed="0", salt="")
    names = ("vllm", "vllm.utils", "vllm.utils.hashing", "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def by_name(algorithm: str) -> Any:
        if algorithm not in ("sha256", "sha256_cbor"):
            raise ValueError(algorithm)
        return lambda value: hashlib.sha256(repr((algorithm, part.salt, value)).encode()).digest()

    sys.modules["vllm.utils.hashing"].get_hash_fn_by_name = by_name  # type: ignore[attr-defined]
    sys.modules["vllm.v1.core.kv_cache_utils"].resolve_none_hash_seed = lambda _: part.seed  # type: ignore[attr-defined]
    return part


def test_the_probe_depends_on_seed_algorithm_and_the_engines_function(hashing: SimpleNamespace) -> None:
    first = hash_probe("sha256")
    assert len(bytes.fromhex(first)) == 16
    assert hash_probe("sha256") == first
    assert hash_probe("sha256_cbor") != first
    hashing.seed = "1"
    assert hash_probe("sha256") != first
    hashing.seed, hashing.salt = "0", "patched"
    assert hash_probe("sha256") != first


def test_without_the_functions_there_is_no_probe(hashing: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hashing.seed == "0"
    assert hash_probe("unknown") == ""
    monkeypatch.delattr(sys.modules["vllm.v1.core.kv_cache_utils"], "resolve_none_hash_seed")
    assert hash_probe("sha256") == ""
