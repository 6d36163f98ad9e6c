"""CustomResourceDefinitions of others, whose objects the chart makes: from Go modules, by version and checksum."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CACHE = Path(os.environ.get("KVPOOL_CACHE") or Path.home() / ".cache" / "kvpool")
DOWNLOAD_S = 300


@dataclass(frozen=True)
class Module:
    """`files` below the module's root; `checksum` as go.sum has it."""

    path: str
    version: str
    checksum: str
    files: tuple[str, ...]


CERT_MANAGER = Module(
    "github.com/cert-manager/cert-manager",
    "v1.21.2",
    "h1:UWgoYM+KLNtRlqmoWOKjKBOBUPVHeepQ6/ac3ERJW68=",
    ("deploy/crds/cert-manager.io_certificates.yaml", "deploy/crds/cert-manager.io_issuers.yaml"),
)
PROMETHEUS_OPERATOR = Module(
    "github.com/prometheus-operator/prometheus-operator",
    "v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
)


def crds(module: Module, empty: Path) -> list[dict[str, Any]]:
    """Read them, after a download the first time. `empty`: a folder of no Go module."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go, by which others' definitions are fetched")
    env = {**os.environ, "GOMODCACHE": str(CACHE / "airgap" / "gomodcache"), "GOFLAGS": "-modcacherw"}
    command = [go, "mod", "download", "-json", f"{module.path}@{module.version}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=empty, env=env, timeout=DOWNLOAD_S)
    reported = json.loads(done.stdout or "{}")
    assert done.returncode == 0, f"{module.path}: {reported.get('Error') or done.stderr[-1000:]}"
    assert reported["Sum"] == module.checksum, f"{module.path} {module.version} is not what was looked at"
    return [yaml.safe_load((Path(reported["Dir"]) / name).read_text()) for name in module.files]
