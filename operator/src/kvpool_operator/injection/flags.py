"""Detection of flags in the plain arguments of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["dotted_values", "has_flag", "value_of"]


def has_flag(argv: Sequence[str], flag: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether the flag is present as `--flag`, `--flag=value`, or an abbreviation that is not in `known`."""
    for word in argv:
        name = word.partition("=")[0]
        if name == flag or (len(name) > 4 and name not in known and name.startswith("--") and flag.startswith(name)):
            return True
    return False


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of `--flag value` or `--flag=value`; the last one wins."""
    found = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def dotted_values(argv: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Return keys and values of a flag as vLLM reads it: with underscores, abbreviated, or as `--flag.key value`.

    The key is empty for the value of the whole flag.
    """
    found = []
    for i, word in enumerate(argv):
        name, assigned, value = word.partition("=")
        name, _, key = name.partition(".")
        name = name.replace("_", "-")
        if name.startswith("--kv-t") and flag.startswith(name):
            found.append((key, value if assigned else argv[i + 1] if i + 1 < len(argv) else ""))
    return found
