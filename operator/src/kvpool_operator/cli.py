"""`kvpool-operator run | webhook`: one image, two Deployments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_USAGE = """usage: kvpool-operator COMMAND [--help]

  run      keep every KVCachePool of the cluster as its spec says
  webhook  bring the pool into pods that opted in
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args[:1]:
        case ["run"]:
            from kvpool_operator.manager import main as run

            return run(args[1:])
        case ["webhook"]:
            from kvpool_operator.webhook.server import main as webhook

            return webhook(args[1:])
        case ["-h" | "--help"]:
            print(_USAGE, end="")
            return 0
    print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
