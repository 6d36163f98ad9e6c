"""`python -m bench NAME [options]`: one measurement, a module of this package with `main(argv)`.

Each prints a table and writes out/bench/NAME.json. Without a name: data.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench

_DEFAULT = "data"
# what the measurements share
_PARTS = {
    "__main__",
    "folios",
    "foreign",
    "kv_of_engine",
    "measure",
    "nodes",
    "peers",
    "picture",
    "plain",
    "rolling_client",
    "soak",
    "trace_file",
    "trace_replay",
    "workloads",
}


def names() -> list[str]:
    """The measurements there are."""
    return sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in _PARTS)


def main(argv: list[str]) -> int:
    """Run the measurement that the first argument names."""
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (_DEFAULT, argv)
    if name not in names():
        print(f"no measurement {name!r}: there are {', '.join(names())}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"bench.{name}").main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
