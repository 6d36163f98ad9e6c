"""Entry point of `kvpool` and `kubectl-kvpool`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_cli.commands import up
from kvpool_cli.errors import INTERRUPTED, PIPE_CLOSED, CliError
from kvpool_cli.output import Style
from kvpool_cli.parser import build_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [up.NAME] and importlib.util.find_spec("kvpool_sidecar") is not None:
        return up.run_sidecar(arguments[1:])  # its arguments are the sidecar's to parse
    args = build_parser(program()).parse_args(arguments)
    try:
        status = int(args.command.run(args))
        sys.stdout.flush()
    except CliError as e:
        style = Style.of(args, sys.stderr)
        print(f"{style.paint('error:', 'red', 'bold')} {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes stdout once more at its end, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def program() -> str:
    """Return how the user called this program: kubectl runs plug-ins by the name of their file."""
    return "kubectl kvpool" if Path(sys.argv[0]).name.startswith("kubectl-") else "kvpool"
