"""What commands print: text for a terminal, JSON or YAML for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

FORMATS = ("table", "json", "yaml")
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def add_arguments(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    """Add `-o` and `--color`."""
    parser.add_argument("-o", "--output", choices=formats, default="table", help="format of the result")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colors of text; auto: on a terminal"
    )


class Style:
    """Colors of text, or none."""

    def __init__(self, color: bool) -> None:
        self.color = color

    @classmethod
    def of(cls, args: argparse.Namespace, stream: TextIO) -> Style:
        """Return the style for `--color`: by default colors on a terminal, none if NO_COLOR is set or TERM is dumb."""
        choice = getattr(args, "color", "auto")
        if choice != "auto":
            return cls(choice == "always")
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(not plain and stream.isatty())

    def paint(self, text: str, *names: str) -> str:
        """Return the text in colors or weights: bold, dim, red, green, yellow, cyan."""
        if not self.color or not text:
            return text
        return f"\033[{';'.join(_CODES[name] for name in names)}m{text}\033[0m"


def emit(args: argparse.Namespace, data: object, text: Callable[[Style], str]) -> None:
    """Print `data` as `-o json` or `-o yaml` ask for, else what `text` draws."""
    if args.output == "json":
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    elif args.output == "yaml":
        sys.stdout.write(as_yaml(data))
    else:
        sys.stdout.write(text(Style.of(args, sys.stdout)).rstrip("\n") + "\n")


def progress(text: str) -> None:
    """Show what takes time, on stderr and only on a terminal; the next call replaces it, an empty text removes it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def as_yaml(data: object) -> str:
    """Return the data as a YAML document, keys in their order."""
    import yaml

    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def table(
    rows: Sequence[Sequence[str]],
    head: Sequence[str] = (),
    right: Sequence[int] = (),
    style: Style | None = None,
) -> str:
    """Return rows as aligned columns, two spaces apart; columns in `right` (from 0) are aligned to the right.

    Cells must not contain colors, because their length is counted; the head is bold where the style has colors.
    """
    lines = [list(head), *map(list, rows)] if head else [list(row) for row in rows]
    columns = max((len(line) for line in lines), default=0)
    widths = [max((len(line[n]) for line in lines if n < len(line)), default=0) for n in range(columns)]
    texts = [
        "  ".join(c.rjust(widths[n]) if n in right else c.ljust(widths[n]) for n, c in enumerate(line)).rstrip()
        for line in lines
    ]
    if head and style is not None:
        texts[0] = style.paint(texts[0], "bold")
    return "\n".join(texts)
