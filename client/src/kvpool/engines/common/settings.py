"""The client's configuration inside an engine: the environment, overridden by what the user wrote into the engine's."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvpool.config import CLIENT_CONFIG_ENV, ClientConfig, loads
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["client_config", "read_object"]

_log = logging.getLogger("kvpool")
_MAX_TEXT = 65_536


def client_config(overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ClientConfig:
    """Merge `overrides` into KVPOOL_CLIENT_CONFIG (`deadlines` field by field).

    Invalid settings are logged and ignored: a wrong setting costs hits, never an engine.
    """
    base: dict[str, Any] = {}
    text = environment.get(CLIENT_CONFIG_ENV, "")
    try:
        if text:
            loads(ClientConfig, text, where=CLIENT_CONFIG_ENV)
            base = json.loads(text)
    except ConfigError as e:
        _log.error("kvpool: %s is ignored: %s", CLIENT_CONFIG_ENV, e)
    known = {f.name for f in fields(ClientConfig)}
    for name in overrides:
        if name not in known:
            _log.warning("kvpool: unknown setting %r in the engine's configuration is ignored", name)
    mine = {name: value for name, value in overrides.items() if name in known}
    if isinstance(mine.get("deadlines"), dict) and isinstance(base.get("deadlines"), dict):
        mine["deadlines"] = {**base["deadlines"], **mine["deadlines"]}
    for candidate in ({**base, **mine}, base, {}):
        try:
            return loads(ClientConfig, json.dumps(candidate), where="the engine's configuration")
        except (ConfigError, TypeError) as e:
            _log.error("kvpool: settings %s are ignored: %s", sorted(mine), e)
    return ClientConfig()


def read_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of an environment variable; None if it is none, or longer than 64 KiB."""
    try:
        value = json.loads(text) if len(text) <= _MAX_TEXT else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
