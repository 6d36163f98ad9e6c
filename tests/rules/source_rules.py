"""Limits of the source that `make check` holds: sizes, class names, and words of docstrings and messages.

python tests/rules/source_rules.py     list what is above a limit
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ("operator/src/kvpool_operator", "sidecar/src/kvpool_sidecar", "client/src/kvpool", "cli/src/kvpool_cli")
TESTS = (
    "operator/tests",
    "sidecar/tests",
    "sidecar/tests_nodes",
    "client/tests",
    "client/tests_engine",
    "cli/tests",
    "tests",
    "e2e",
)

LIMITS = {
    "module lines": 400,
    "class lines": 250,
    "constructor parameters": 7,
    "constructor callables": 2,
    "test lines": 500,
    "banned words": 0,
}

# Words that stood for standard terms, and what to write instead. Matched in docstrings, comments and string messages.
BANNED = {
    r"\btold\b|\btells?\b|\btelling\b": "report, show, specify, notify",
    r"\banew\b": "again, recreate, from scratch",
    r"\bso many\b": "maximum, number of",
    r"\bof before\b": "previous",
    r"\bwhoever\b|\bwhose ?ever\b": "any client that, any node that",
    r"\bnobody\b": "no client, no node",
    r"\blook(s|ed|ing)? (at|whether|for)\b": "check, read, inspect, poll, search",
    r"\bgoes on\b|\bgo on\b": "continue",
    r"\bin vain\b": "unsuccessfully",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bat once\b": "immediately, or simultaneously",
    r"\bin the place of\b": "instead of",
    r"\bout of the way\b": "moved aside",
    r"\bis had\b|\bare had\b|\bbe had\b": "is retrieved, is available",
}
_BANNED = re.compile("|".join(BANNED), re.IGNORECASE)

Measures = dict[str, dict[str, int]]
"""By kind of limit: the size of everything above it, by place."""


def sources(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if "__pycache__" not in path.parts:
            yield path, ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def constructor(node: ast.ClassDef) -> tuple[int, int]:
    """Parameters and callables of `__init__`; 0, 0 without one."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs][1:]
            texts = [ast.unparse(a.annotation) if a.annotation else "" for a in arguments]
            return len(arguments), sum("Callable[" in text for text in texts)
    return 0, 0


def prose(path: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings, comments and texts of more than two words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.value
    for line in path.read_text().splitlines():
        _, mark, comment = line.partition("# ")
        if mark:
            yield comment


def measure() -> Measures:
    """Everything above a limit today."""
    above: Measures = defaultdict(dict)
    for wheel in WHEELS:
        for path, tree in sources(wheel):
            place = name_of(path)
            lines = len(path.read_text().splitlines())
            if lines > LIMITS["module lines"]:
                above["module lines"][place] = lines
            words = sum(len(_BANNED.findall(text)) for text in prose(path, tree))
            if words:
                above["banned words"][place] = words
            for node in ast.walk(tree):
                if not isinstance(node, ast.ClassDef):
                    continue
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                parameters, callables = constructor(node)
                for kind, value in (
                    ("class lines", size),
                    ("constructor parameters", parameters),
                    ("constructor callables", callables),
                ):
                    if value > LIMITS[kind]:
                        above[kind][f"{place}:{node.name}"] = value
    for folder in TESTS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = len(path.read_text().splitlines())
            if lines > LIMITS["test lines"] and "__pycache__" not in path.parts:
                above["test lines"][name_of(path)] = lines
    return dict(above)


def duplicate_classes() -> dict[str, list[str]]:
    """Public class names that stand in several modules of one wheel."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for wheel in WHEELS:
        for path, tree in sources(wheel):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[wheel, node.name].append(name_of(path))
    return {name: places for (_, name), places in found.items() if len(places) > 1}


def problems() -> list[str]:
    """One sentence for each limit that is exceeded."""
    found = [f"class {name} is defined in {' and in '.join(places)}" for name, places in duplicate_classes().items()]
    for kind, places in sorted(measure().items()):
        found += [f"{place}: {value} {kind}, at most {LIMITS[kind]} are allowed" for place, value in places.items()]
    return found


if __name__ == "__main__":
    above = problems()
    print("\n".join(above))
    sys.exit(bool(above))
