"""Pods in the shape of what upstream projects publish: the decision for each, and what holds for all of them.

The files of pod_templates/ were written here; flags and image names are those of the projects' public documentation.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_operator.webhook.explain import explain
from kvpool_operator.webhook.pod_templates import read_documents

FOLDER = Path(__file__).parent / "pod_templates"
SHAPES = [
    pytest.param(shape, id=f"{path.stem}: {shape['shape']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for shape in yaml.safe_load(path.read_text())
]
CHANGED_ENV = {"PYTHONPATH", "VLLM_PLUGINS"}
"""Variables whose value of the user is extended."""
ADDED_ENV = ("KVPOOL_", "PYTHON", "LMCACHE_", "DYN_KVBM_")
ADDED_VOLUMES = {"kvpool", "kvpool-shm", "kvpool-kvbm"}


def manifest_of(shape: dict[str, Any]) -> dict[str, Any]:
    container = {"name": "engine"} | shape.get("container", {})
    pod = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    found: dict[str, Any] = shape.get("manifest", pod)
    return found


def expected_of(shape: dict[str, Any]) -> list[str]:
    expect = shape["expect"]
    return expect if isinstance(expect, list) else [expect]


def assert_expected(item: dict[str, Any], expected: str) -> None:
    """`injected ENGINE !WARNING`, or `skipped REASON WORDS OF THE MESSAGE`."""
    decision, what, *words = expected.split(" ", 2)
    found = item["engine"] if decision == "injected" else item["reason"]
    assert (item["decision"], found) == (decision, what), item["message"]
    text = " ".join(words)
    if decision == "skipped":
        assert text in item["message"]
    elif text:
        assert any(text.removeprefix("!") in w for w in item["warnings"]), item["warnings"]
    else:
        assert [w for w in item["warnings"] if "host memory tier" not in w] == []


def test_there_are_shapes_of_every_project():
    assert len(SHAPES) >= 80
    assert {p.stem for p in FOLDER.glob("*.yaml")} >= {"kserve", "llm_d", "production_stack", "sglang", "dynamo"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_shape_is_decided_as_expected(shape: dict[str, Any]):
    result = await explain(read_documents(json.dumps(manifest_of(shape))), None)
    expected = expected_of(shape)
    assert len(result["items"]) == len(expected)
    for item, words in zip(result["items"], expected, strict=True):
        assert_expected(item, words)


@pytest.mark.parametrize("shape", SHAPES)
async def test_injection_only_adds_and_only_once(shape: dict[str, Any]):
    (document,) = read_documents(json.dumps(manifest_of(shape)))
    before = copy.deepcopy(document)
    result = await explain([document], None)
    assert document == before
    for template, item in zip(document.templates, result["items"], strict=True):
        assert_only_additions(template.pod, item["pod"])
        (again,) = read_documents(json.dumps(item["pod"]))
        (second,) = (await explain([again], None))["items"]
        assert second["pod"] == item["pod"], "a second invocation changes the pod"


def assert_only_additions(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Only volumes, init containers, mounts and variables are added. Null and absent are equal."""
    old, new = before["spec"], after["spec"]
    rest = ("containers", "initContainers", "volumes")
    assert {k: v for k, v in new.items() if k not in rest} == {k: v for k, v in old.items() if k not in rest}
    added = (new.get("volumes") or [])[len(old.get("volumes") or []) :]
    assert (new.get("volumes") or [])[: len(old.get("volumes") or [])] == (old.get("volumes") or [])
    assert {v["name"] for v in added} <= ADDED_VOLUMES
    assert all(set(v) == {"name", "emptyDir"} for v in added)
    for section in ("containers", "initContainers"):
        kept = [c for c in new.get(section) or [] if c["name"] != "kvpool-client"]
        for theirs, ours in zip(old.get(section) or [], kept, strict=True):
            assert_container_kept(theirs, ours)


def assert_container_kept(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    rest = ("env", "volumeMounts")
    assert {k: v for k, v in ours.items() if k not in rest} == {k: v for k, v in theirs.items() if k not in rest}
    mounts = theirs.get("volumeMounts") or []
    assert (ours.get("volumeMounts") or [])[: len(mounts)] == mounts
    given = {e["name"]: e for e in theirs.get("env") or []}
    made = {e["name"]: e for e in ours.get("env") or []}
    assert {n: e for n, e in made.items() if n in given and n not in CHANGED_ENV} == {
        n: e for n, e in given.items() if n not in CHANGED_ENV
    }
    assert all(n.startswith(ADDED_ENV) for n in made.keys() - given.keys())
    for name in CHANGED_ENV & given.keys():
        assert str(given[name].get("value", "")) in str(made[name].get("value", ""))
