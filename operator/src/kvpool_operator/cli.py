"""`kvpool-operator run | webhook`: one image, two Deployments. `explain-injection` needs no cluster."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_USAGE = """usage: kvpool-operator [--version] COMMAND [--help]

Commands:
  run      run the controllers of KVCachePool, KVCacheTenant and KVCacheOperation
  webhook  serve the admission webhook that injects opted-in pods
  explain-injection
           print what the webhook would decide about the pods in a file, and why

Options:
  --version  print the version
  --help     describe the flags of a command, each with its environment variable
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status of the process."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args[:1]:
        case ["run"]:
            from kvpool_operator.manager import main as run

            return run(args[1:])
        case ["webhook"]:
            from kvpool_operator.webhook.server import main as webhook

            return webhook(args[1:])
        case ["explain-injection"]:
            from kvpool_operator.webhook.explain import main as explain

            return explain(args[1:])
        case ["--version"]:
            print(f"kvpool-operator {metadata.version('kvpool-operator')}")
            return 0
        case ["-h" | "--help"]:
            print(_USAGE, end="")
            return 0
    print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
