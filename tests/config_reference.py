"""Generate docs/reference/config.md from kvpool.config: `python tests/config_reference.py --write | --check`."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvpool.config import CLIENT_CONFIG_ENV, ClientConfig, PoolConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "config.md"

_HEAD = f"""# Configuration files

The operator writes these files. The sidecar reads `PoolConfig` (`pool.json` in the pool's ConfigMap); the client reads
`ClientConfig` (environment variable `{CLIENT_CONFIG_ENV}`). Users do not write them: they are derived from the
KVCachePool. Generated from `kvpool.config` by `make gen`.

A running sidecar applies the fields marked *live* without a restart
([Change a running pool](../how-to/resize.md)).
For any other field the operator restarts the sidecars, one node at a time.
"""


def classes() -> list[Any]:
    """Return the classes of both files: each root, then its parts in the order of their fields, each once."""
    found: list[Any] = []
    for root in (PoolConfig, ClientConfig):
        _collect(root, found)
    return found


def _collect(kind: Any, found: list[Any]) -> None:
    if is_dataclass(kind):
        if kind not in found:
            found.append(kind)
            hints = get_type_hints(kind)
            for f in fields(kind):
                _collect(hints[f.name], found)
    else:
        for part in get_args(kind):
            _collect(part, found)


def page() -> str:
    """Render the whole page."""
    return _HEAD + "".join(_section(kind) for kind in classes())


def _section(kind: Any) -> str:
    lines = ["", f"## {kind.__name__}", "", (kind.__doc__ or "").strip(), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for f in fields(kind):
        if f.default_factory is not MISSING:
            default = "see below"
        else:
            default = "required" if f.default is MISSING else f"`{json.dumps(f.default)}`"
        live = " *Live.*" if f.metadata["live"] else ""
        lines.append(f"| `{f.name}` | {str(f.type).replace('|', 'or')} | {default} | {f.metadata['doc']}{live} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        PAGE.write_text(page())
        return 0
    if argv == ["--check"]:
        if PAGE.exists() and PAGE.read_text() == page():
            return 0
        sys.stderr.write(f"{PAGE} is stale: run `make gen` and commit the result\n")
        return 1
    sys.stderr.write("usage: python tests/config_reference.py --write | --check\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
