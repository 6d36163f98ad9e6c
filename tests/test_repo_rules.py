"""Rules that keep this repository workable; each is cheap to break by accident and expensive to find."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tracked() -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    return [ROOT / p for p in out.decode().split("\0") if p and (ROOT / p).is_file()]


def texts() -> dict[Path, str]:
    found = {}
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found[path.relative_to(ROOT)] = data.decode()
    assert len(found) > 20
    return found


def test_the_folder_operator_does_not_shadow_the_standard_library():
    assert not (ROOT / "operator" / "__init__.py").exists()
    subprocess.run([sys.executable, "-c", "import operator; operator.itemgetter(0)"], cwd=ROOT, check=True)


def test_test_folders_are_not_packages():
    assert [p for p in tracked() if p.name == "__init__.py" and "tests" in p.parts] == []


def test_test_files_have_unique_names():
    names = Counter(p.name for p in tracked() if re.fullmatch(r"test_.*\.py", p.name))
    assert [n for n, count in names.items() if count > 1] == []


def test_no_lock_file_names_an_index():
    assert [p for p in tracked() if p.name in ("uv.lock", "poetry.lock", "Pipfile.lock")] == []


def test_requirements_are_hashed_and_name_no_index():
    files = [p for p in tracked() if p.suffix == ".txt" and "requirements" in (p.parent.name, p.stem)]
    assert files
    for path in files:
        text = path.read_text()
        assert "--hash=sha256:" in text, path
        assert not re.search(r"--(extra-)?index-url|--find-links|https?://", text), path


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bimport (pickle|marshal|shelve)\b|\bfrom (pickle|marshal|shelve)\b",
        r"\byaml\.(load|full_load|unsafe_load)\(",
        r"\btorch\.load\(",
        r"(?<![\w.])eval\(",
    ],
)
def test_nothing_from_outside_can_execute(pattern: str):
    code = {p: t for p, t in texts().items() if p.suffix == ".py" and p != Path("tests/test_repo_rules.py")}
    assert [str(p) for p, t in code.items() if re.search(pattern, t)] == []


@pytest.mark.parametrize(
    ("module", "home"),
    [
        ("kopf", "operator/src/kvpool_operator/watches.py"),
        ("kubernetes", "operator/src/kvpool_operator/k8s/rest.py"),
        ("nixl_cu12", "sidecar/src/kvpool_sidecar/peers/rdma/agent.py"),
        ("redis", "sidecar/src/kvpool_sidecar/index/redis_connection.py"),
    ],
)
def test_each_big_dependency_is_imported_in_one_module(module: str, home: str):
    pattern = re.compile(rf"^\s*(import {module}\b|from {module}[. ])", re.MULTILINE)
    sources = {p: t for p, t in texts().items() if p.suffix == ".py" and "src" in p.parts}
    assert [str(p) for p, t in sources.items() if pattern.search(t)] == [home]


def test_no_path_of_a_machine_is_committed():
    own_home = re.compile(r"(?<![\w.{$-])/(root|home/[a-z]+|work)/")
    assert [str(p) for p, t in texts().items() if own_home.search(t) and p.suffix not in (".sum",)] == []
