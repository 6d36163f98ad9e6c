"""LMCache's own tests of its L2 adapters, from its source distribution, with the pool's adapter in place.

EXPECTED explains each test that does not pass. The list only shrinks: a test that passes and is listed fails, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from en_lmcache import environment
from en_overlay import overlay, source_tests

if TYPE_CHECKING:
    from cl_nodes import Cluster

SETTINGS = {"deadlines": {"lookup_ms": 5000, "load_min_ms": 5000, "store_ms": 10_000, "breaker_failures": 1000}}
TOOLS = (
    "pytest",
    "_pytest",
    "py.py",
    "pluggy",
    "iniconfig",
    "pygments",
    "packaging",
    "pytest_asyncio",
    "typing_extensions.py",
)

BANDWIDTH = "simulates a slow link, which the pool does not have"
EXPECTED: dict[str, dict[str, str]] = {
    "v1/distributed/test_mock_l2_adapter.py": {"test_store_completion_is_delayed_by_bandwidth": BANDWIDTH},
    "v1/distributed/test_fs_l2_adapter_delete.py": {},
}


@pytest.mark.parametrize("file", EXPECTED)
def test_lmcaches_own_tests(file: str, engine_home: Path, cluster: Cluster, tmp_path: Path) -> None:
    python, folders = overlay("lmcache", engine_home)
    tests = source_tests("lmcache", engine_home)
    tools = tmp_path / "tools"
    tools.mkdir()
    # redis, which a fixture of LMCache's patches, wants it before Python 3.11.3
    (tools / "async_timeout.py").write_text("from asyncio import timeout\n")
    for folder in map(Path, sys.path):
        for name in TOOLS:
            if (folder / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(folder / name)
        for info in folder.glob("pytest*-*.dist-info"):
            if not (tools / info.name).exists():
                (tools / info.name).symlink_to(info)
    settings = json.dumps({**SETTINGS, "socket": cluster["a"].socket})
    env = environment(tmp_path, [*folders, tools, Path(__file__).parent, tests], KVPOOL_TEST_SETTINGS=settings)
    results = tmp_path / "results.xml"
    options = [
        "-q",
        "-p",
        "lmcache_upstream_plugin",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        f"--rootdir={tests}",
    ]
    with (tmp_path / "log").open("w+") as log:
        subprocess.run(
            [python, "-P", "-m", "pytest", *options, str(tests / "tests" / file)],
            env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, stdout=log, stderr=log, check=False, timeout=800,
            cwd=tmp_path,
        )  # fmt: skip
        log.seek(0)
        text = log.read()
    assert results.exists(), text[-3000:]
    failed, passed = set(), set()
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        outcome = failed if any(case.find(kind) is not None for kind in ("failure", "error")) else passed
        if case.find("skipped") is None:
            outcome.add(str(case.get("name")))
    assert passed
    assert failed == set(EXPECTED[file]), text[-6000:]
