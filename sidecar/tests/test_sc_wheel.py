"""The wheel contains the sidecar and nothing that only tests, benchmarks and e2e use."""

from __future__ import annotations

import ast
from pathlib import Path

import tomllib

import kvpool_sidecar
import kvpool_testing

PACKAGE = Path(kvpool_sidecar.__file__).parent
SIDECAR = Path(kvpool_testing.__file__).parents[2]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_test_doubles_are_outside_the_wheel():
    wheel = tomllib.loads((SIDECAR / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/kvpool_sidecar"]}
    assert not (PACKAGE / "testing").exists()
    assert PACKAGE not in Path(kvpool_testing.__file__).parents


def test_no_module_of_the_wheel_imports_test_code():
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    assert not [path for path in modules if imports(path) & {"kvpool_testing", "pytest", "hypothesis"}]
