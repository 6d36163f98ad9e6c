"""`make release-check` finds what a release lacks."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import sys
import zipfile

import pytest
import tomllib
from supply import release

# of an image with S3 or RDMA, or of the engine that runs the client
ELSEWHERE = {"botocore", "nixl_cu12", "vllm", "lmcache", "sglang", "torch", "huggingface_hub"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("wheels"))


def changed(wheel, target, name, old, new):
    """A copy of the wheel in which a file differs; without the file for `new` None."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.namelist():
            data = source.read(entry)
            if entry.endswith(name):
                if new is None:
                    continue
                assert old in data
                data = data.replace(old, new)
            copy.writestr(entry, data)
    return target


def test_the_wheels_of_this_tree_have_all(wheels):
    assert [wheel.name.partition("-")[0] for wheel in wheels] == [
        "kvpool", "kvpool_cli", "kvpool_operator", "kvpool_sidecar"
    ]  # fmt: skip
    assert [problem for wheel in wheels for problem in release.wheel_problems(wheel)] == []


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("/METADATA", b"Description-Content-Type: text/markdown\n", b"", "a readme in Markdown"),
        ("/METADATA", b"License-Expression: Apache-2.0\n", b"", "a license expression"),
        ("/METADATA", b"License-Expression: Apache-2.0\n", b"License-Expression: Of my own\n", "license"),
        ("/METADATA", b"Requires-Python: >=3.10\n", b"", "requires-python"),
        ("/licenses/LICENSE", b"", None, "a license file"),
        ("/py.typed", b"", None, "py.typed"),
    ],
)
def test_a_wheel_that_lacks_something_is_named(wheels, tmp_path, name, old, new, said):
    spoiled = changed(wheels[0], tmp_path / wheels[0].name, name, old, new)
    problems = list(release.wheel_problems(spoiled))
    assert len(problems) == 1
    assert said in problems[0]
    assert problems[0].startswith(spoiled.name)


def test_a_version_that_differs_is_named_wherever_it_is(tmp_path):
    files = [f"{project}/pyproject.toml" for project in release.PROJECTS] + ["charts/kvpool/Chart.yaml"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(release.ROOT / file, tmp_path / file)
    assert list(release.version_problems(tmp_path)) == []
    client = tmp_path / files[0]
    client.write_text(client.read_text().replace('version = "0.1.0"', 'version = "0.2.0"'))
    problems = list(release.version_problems(tmp_path))
    assert {problem.partition(" is ")[0] for problem in problems} >= {
        "sidecar/pyproject.toml", "cli/pyproject.toml: kvpool-operator", "charts/kvpool/Chart.yaml: operator"
    }  # fmt: skip


def imported(folder):
    """Top-level names of all modules that the files below import."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


@pytest.mark.parametrize("project", release.PROJECTS)
def test_a_distribution_declares_what_it_imports(project):
    """What another package of the tools happens to bring is missing where the wheel is installed alone."""
    table = tomllib.loads((release.ROOT / project / "pyproject.toml").read_text())["project"]
    extras = table.get("optional-dependencies", {}).values()
    requirements = [*table["dependencies"], *(one for extra in extras for one in extra)]
    # an extra is counted by its name: redis[hiredis]
    declared = {name.lower().replace("_", "-") for one in requirements for name in re.split(r"[\[\],<>=]+", one)}
    of_module = importlib.metadata.packages_distributions()
    (own,) = [path.name for path in (release.ROOT / project / "src").iterdir() if path.is_dir()]
    outside = set(imported(release.ROOT / project / "src")) - sys.stdlib_module_names - ELSEWHERE - {own}
    missing = {
        name for name in outside if not {d.lower().replace("_", "-") for d in of_module.get(name, [name])} & declared
    }
    assert missing == set()
