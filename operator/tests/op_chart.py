"""The chart for tests: values, schema, and objects rendered by helm."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvpool"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
KUBERNETES = ("1.30", "1.34")


def find_helm():
    if found := shutil.which("helm"):
        return found
    cache = os.environ.get("KVPOOL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpool"
    built = sorted(Path(cache).glob("airgap/bin*/helm"), key=lambda p: p.stat().st_mtime)
    return str(built[-1]) if built else None


HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not on PATH: install it, or run e2e/airgap/binaries.sh helm (it builds one with Go)"
)


def helm(*args):
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def rendered(sets, namespace):
    flags = [f for s in sets for f in ("--set-json", s)]
    done = helm("template", "kvpool", str(CHART), "-n", namespace, "--kube-version", "1.34.4", *flags)
    assert done.returncode == 0, done.stderr
    return tuple(o for o in yaml.safe_load_all(done.stdout) if o)


def render(*sets, namespace="kvpool-system"):
    """The objects; helm runs once for the same values. No test changes them."""
    return list(rendered(sets, namespace))


def one(objects, kind, name):
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pod_of(workload):
    return workload["spec"]["template"]["spec"]
