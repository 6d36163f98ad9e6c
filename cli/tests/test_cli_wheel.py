"""The wheel has its license, its readme and the models' facts, and nothing that only tests use."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CLI = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=CLI, check=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_license_readme_and_classifiers_are_in_the_metadata(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("/METADATA")]
    found = email.message_from_bytes(wheel.read(name))
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "kubectl kvpool" in str(found.get_payload())
    assert found.get_all("Classifier")


def test_the_license_and_the_models_are_shipped_and_tests_are_not(wheel):
    names = wheel.namelist()
    (license_file,) = [n for n in names if n.endswith("/licenses/LICENSE")]
    assert b"Apache License" in wheel.read(license_file)
    assert "kvpool_cli/planner/models.json" in names
    assert not [n for n in names if "test" in n]


def test_the_commands_of_users_kubectl_and_uvx_are_installed(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("/entry_points.txt")]
    lines = wheel.read(name).decode().splitlines()
    assert {line.partition(" = ")[0] for line in lines[1:]} == {"kvpool", "kubectl-kvpool", "kvpool-cli"}
