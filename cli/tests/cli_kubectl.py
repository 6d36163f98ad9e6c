"""A kubectl that answers from documents, for tests of commands as users call them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.documents import QUERIES

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool_cli.cluster.documents import Documents

_PROGRAM = """#!{python}
import json, sys
answers = json.load(open({answers!r}))
request = [a for a in sys.argv[1:] if not a.startswith("--request-timeout")]
raw = [a.partition("=")[2] for a in request if a.startswith("--raw=")]
labels = [a.partition("=")[2] for a in request if a.startswith("--selector=")]
key = raw[0] if raw else f"{{request[1]}} {{labels[0] if labels else ''}}"
if key not in answers:
    denied = 'pods is forbidden: User "jane" cannot get resource "pods/proxy"'
    sys.exit(f"Error from server (Forbidden): {{denied}}")
print(answers[key] if isinstance(answers[key], str) else json.dumps(answers[key]))
"""


def install(folder: Path, found: Documents, metrics: str = "", *, proxy: bool = True) -> None:
    """Write `kubectl` into a folder. Without `proxy` the user has no right to pods/proxy."""
    answers: dict[str, Any] = {f"{q.kinds} {q.labels}": {"items": found.of(q.name)} for q in QUERIES}
    for key, answer in found.statuses.items() if proxy else ():
        namespace, _, name = key.partition("/")
        root = f"/api/v1/namespaces/{namespace}/pods/{name}:7422/proxy"
        answers |= {f"{root}/status": answer["status"], f"{root}/metrics": metrics}
    (folder / "answers.json").write_text(json.dumps(answers))
    program = folder / "kubectl"
    program.write_text(_PROGRAM.format(python=sys.executable, answers=str(folder / "answers.json")))
    program.chmod(0o755)
