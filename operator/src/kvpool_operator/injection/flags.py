"""Command line flags: detection, and passing more of them to an engine."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.injection.command_line import Channel, ContainerInfo
from kvpool_operator.injection.connector import escape_expansion
from kvpool_operator.injection.pod import default_env, items
from kvpool_operator.injection.skip import Skip, SkipReason

__all__ = ["ARGS_ENV", "add_flags", "has_flag", "value_of"]

ARGS_ENV: Final = "KVPOOL_ENGINE_ARGS"
"""Environment variable with the flags, for shell text or a script that uses `$KVPOOL_ENGINE_ARGS`."""


def has_flag(argv: list[str], flag: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether the flag is present as `--flag`, `--flag=value`, or an abbreviation that is not in `known`."""
    for word in argv:
        name = word.partition("=")[0]
        if name == flag or (len(name) > 4 and name not in known and name.startswith("--") and flag.startswith(name)):
            return True
    return False


def value_of(argv: list[str], flag: str) -> tuple[int, str] | None:
    """Return index and value of `--flag value` or `--flag=value`; the last one wins."""
    found = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = i + 1, argv[i + 1]
        elif word.startswith(f"{flag}="):
            found = i, word.partition("=")[2]
    return found


def add_flags(container: dict[str, Any], info: ContainerInfo, flags: list[str], *, requested: bool) -> list[str]:
    """Pass `flags` (without spaces) to the engine, and return warnings.

    Shell text is never modified; it can contain `$KVPOOL_ENGINE_ARGS` where the flags belong. The same applies to a
    script, if the user named the engine (`requested`). Otherwise raises Skip(command-not-extendable) with the change
    that is needed.
    """
    if not flags:
        return []
    if info.channel is Channel.ARGS:
        items(container, "args").extend(escape_expansion(f) for f in flags)
        return []
    text = " ".join(flags)
    if f"${ARGS_ENV}" in info.shell_text or f"${{{ARGS_ENV}}}" in info.shell_text:
        default_env(container, ARGS_ENV, escape_expansion(text))
        return []
    if requested and not info.shell_text and not info.engine:
        default_env(container, ARGS_ENV, escape_expansion(text))
        return [f"the engine's flags are in ${ARGS_ENV}: the script that starts the engine must pass them on"]
    raise Skip(
        SkipReason.COMMAND_NOT_EXTENDABLE,
        f"the command line of container {container.get('name')} cannot be extended safely; write ${ARGS_ENV} where the "
        "engine's flags belong, or start the engine without a shell and without a --config file",
    )
