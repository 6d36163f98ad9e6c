"""Models whose config facts ship with this program, found by name."""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
MAX_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Model:
    """A model to plan for. `config`: fields of its config.json."""

    name: str
    config: dict[str, Any]
    source: str
    """Where the fields are from."""
    active_parameters: float | None = None
    """Parameters that compute a token, in billions, by the model's name or card."""


@functools.cache
def shipped() -> tuple[tuple[Model, tuple[str, ...]], ...]:
    """Return all shipped models with their other names."""
    text = resources.files("kvpool_cli.planner").joinpath("models.json").read_text()
    return tuple(
        (Model(name, entry["config"], entry["source"], entry["active_parameters"]), tuple(entry["aliases"]))
        for name, entry in json.loads(text).items()
    )


def find(name: str) -> Model:
    """Return the shipped model of a name, with or without its organization, in any case. Raises UsageError."""
    names = {alias.lower(): model for model, aliases in shipped() for alias in (model.name, *aliases)}
    wanted = name.strip().lower()
    if wanted in names:
        return names[wanted]
    found = {model.name: model for full, model in names.items() if full.rpartition("/")[2] == wanted}
    if len(found) == 1:
        return next(iter(found.values()))
    near = difflib.get_close_matches(wanted, [*names, *(full.rpartition("/")[2] for full in names)], n=3, cutoff=0.6)
    hint = f"; similar: {', '.join(dict.fromkeys(near))}" if near else ""
    raise UsageError(f"the model {name!r} does not ship with this version: give its config.json by --config{hint}")


def find_cached(name: str, cache: Path) -> Model | None:
    """Return a model of the local Hugging Face cache (`hub` folder) by its whole name; None if it is not there."""
    if not _REPOSITORY.fullmatch(name):
        return None
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return replace(read_config(found[-1]), name=name) if found else None


def read_config(path: Path) -> Model:
    """Return the model of a config.json. Raises UsageError for a file that is none."""
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} has more than {MAX_CONFIG_BYTES // 2**20} MiB: it is no config.json")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read as a config.json: {e}") from e
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object")
    return Model(str(found.get("_name_or_path") or path), found, str(path))
