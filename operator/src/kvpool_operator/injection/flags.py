"""Flags of a command line: which are there, and how more are handed over. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.injection.command_line import Channel, ContainerInfo
from kvpool_operator.injection.connector import literal
from kvpool_operator.injection.pod import default_env, items
from kvpool_operator.injection.skip import Skip, SkipReason

__all__ = ["ARGS_ENV", "add_flags", "has_flag", "value_of"]

ARGS_ENV: Final = "KVPOOL_ENGINE_ARGS"
"""Where an engine is started by shell text or a script: the flags, for `$KVPOOL_ENGINE_ARGS` in it."""


def has_flag(words: list[str], flag: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether the flag is there, as `--flag`, `--flag=value` or an abbreviation that is no flag of `known` itself."""
    for word in words:
        name = word.partition("=")[0]
        if name == flag or (len(name) > 4 and name not in known and name.startswith("--") and flag.startswith(name)):
            return True
    return False


def value_of(words: list[str], flag: str) -> tuple[int, str] | None:
    """Where the flag's value stands and what it is: of `--flag value` and `--flag=value`; the last one wins."""
    found = None
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            found = i + 1, words[i + 1]
        elif word.startswith(f"{flag}="):
            found = i, word.partition("=")[2]
    return found


def add_flags(container: dict[str, Any], reading: ContainerInfo, flags: list[str], *, asked: bool) -> list[str]:
    """Hand `flags` (no spaces inside) to the engine; the warnings that follow.

    Shell text is never edited: it may say `$KVPOOL_ENGINE_ARGS` where the flags belong. So may a script that cannot be
    seen, if the user named the engine (`asked`). Else Skip(command-not-extendable) says what to write.
    """
    if not flags:
        return []
    if reading.channel is Channel.ARGS:
        items(container, "args").extend(literal(f) for f in flags)
        return []
    text = " ".join(flags)
    if f"${ARGS_ENV}" in reading.shell_text or f"${{{ARGS_ENV}}}" in reading.shell_text:
        default_env(container, ARGS_ENV, literal(text))
        return []
    if asked and not reading.shell_text and not reading.engine:
        default_env(container, ARGS_ENV, literal(text))
        return [f"the flags are in ${ARGS_ENV}: the script that starts the engine must hand them on"]
    raise Skip(
        SkipReason.COMMAND_NOT_EXTENDABLE,
        f"the command line of container {container.get('name')} cannot be extended safely; write ${ARGS_ENV} where the "
        "engine's flags belong, or start the engine without a shell and without a file of settings",
    )
