"""`make release-check` finds what a release lacks."""

from __future__ import annotations

import shutil
import zipfile

import pytest
from supply import release


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
