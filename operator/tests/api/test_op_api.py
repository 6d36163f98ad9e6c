"""The API: what is refused and with which sentence, and that the CRD says what the models say."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.api import annotations, crdgen
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.quantity import format_bytes, to_bytes
from kvpool_operator.api.resources import RESOURCES, Resource
from kvpool_operator.api.structural import structural
from kvpool_operator.api.v1alpha1 import KVCachePool, PoolSpec
from kvpool_operator.errors import InvalidPoolError

ROOT = Path(__file__).resolve().parents[3]
BAD_POOLS = sorted((ROOT / "operator" / "tests" / "bad_pools").glob("*.yaml"))
SCHEMA = crdgen.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

MINIMAL: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text())

# These are refused by the schema itself; the API server's own words for it are in the example.
BY_SCHEMA = {
    "no_tier": "at least 1 item",
    "tier_name_twice": "a name of its own",
    "codec_unknown": "'None', 'Zstd' or 'LZ4'",
    "min_ready_seconds_absurd": "less than or equal to 3600",
    "min_ready_seconds_with_unit": "a valid integer",
    "pinned_capacity_absurd": "less than or equal to 50",
    "mode_unknown": "'Enforce', 'DryRun' or 'Paused'",
    "preflight_unknown": "'Require', 'Warn' or 'Skip'",
    "write_policy_unknown": "'WriteBack', 'WriteThroughSelective' or 'LocalOnly'",
}


def nodes(schema: dict[str, Any], path: str = "$"):
    yield path, schema
    for key, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}.{key}")


def cel_messages() -> set[str]:
    return {r["message"] for _, n in nodes(SCHEMA) for r in n.get("x-kubernetes-validations", [])}


@pytest.mark.parametrize("path", BAD_POOLS, ids=lambda p: p.stem)
def test_a_bad_pool_is_refused_with_the_same_sentence_everywhere(path: Path):
    case = yaml.safe_load(path.read_text())
    expected = BY_SCHEMA.get(path.stem, case["message"])
    with pytest.raises(InvalidPoolError, match=r".") as refused:
        KVCachePool.parse(case["pool"])
    assert expected in str(refused.value)
    if path.stem not in BY_SCHEMA and "multiple of" not in expected:
        assert any(expected in m for m in cel_messages())


def test_every_rule_has_a_bad_example_or_is_about_a_change():
    shown = [yaml.safe_load(p.read_text())["message"] for p in BAD_POOLS]
    unshown = {m for m in cel_messages() if not any(s in m for s in shown) and "cannot be changed" not in m}
    assert unshown == {
        "give the name of a PersistentVolumeClaim in the pool's namespace",
        "give maxBlockSize from 64Ki to 1Gi",
        "give expectedBandwidth in bytes per second from 1M to 1T, such as 1G",
        "give storeDeadline from 100ms to 10m, such as 10s",
        "give cooldown from 10ms to 10m, such as 1s",
        "give cleanupTimeout from 1s to 24h, such as 5m",
    }


@pytest.mark.parametrize("name", ["minimal.yaml", "kvcachepool.yaml", "object-store.yaml"])
def test_examples_are_valid(name: str):
    KVCachePool.parse(yaml.safe_load((ROOT / "examples" / name).read_text()))


def test_the_pool_at_the_root_is_the_minimal_example():
    assert yaml.safe_load((ROOT / "kvcachepool.yaml").read_text()) == MINIMAL


@pytest.mark.parametrize("generator", ["api.py", "chart_values.py"])
def test_the_reference_pages_are_fresh(generator: str):
    command = [sys.executable, str(ROOT / "docs" / "generate" / generator), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_label_and_annotation_of_the_api_is_in_the_reference():
    names = {v for k, v in vars(annotations).items() if k.startswith(("LABEL_", "ANNOTATION_", "FINALIZER_"))}
    assert names == {k.key for k in annotations.METADATA_KEYS}


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda r: r.kind)
def test_each_kind_describes_its_own_condition_types(resource: Resource):
    status = crdgen.crd(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    described = status["properties"]["conditions"]["items"]["properties"]["type"]["description"]
    assert described == f"Type of the condition: {', '.join(resource.conditions)}."


def test_a_whole_pool_is_ten_lines():
    assert len((ROOT / "examples" / "minimal.yaml").read_text().strip().splitlines()) <= 10


def test_a_refusal_names_the_field_and_never_repeats_the_value():
    pool = copy.deepcopy(MINIMAL)
    pool["spec"]["tiers"][0]["local"]["capacity"] = "hunter2" * 1000
    with pytest.raises(InvalidPoolError, match=r"spec\.tiers\[0\]\.local\.capacity: give a capacity") as refused:
        KVCachePool.parse(pool)
    assert "hunter2" not in str(refused.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    )
)
def test_a_hostile_spec_is_an_invalid_pool_and_nothing_else(spec: Any):
    with pytest.raises(InvalidPoolError):
        KVCachePool.parse({"metadata": {"name": "chat"}, "spec": spec})


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda r: r.kind)
def test_the_crd_is_valid_offline(resource: Resource):
    kubernetes_validate.validate(crdgen.crd(resource), "1.34", strict=True)


def test_the_crd_in_the_repository_is_fresh():
    for name, text in crdgen.files().items():
        assert (ROOT / "crds" / name).read_text() == text, f"crds/{name} is stale: run `make gen`"


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda r: r.kind)
def test_every_field_is_documented_typed_and_bounded(resource: Resource):
    for path, node in nodes(crdgen.crd(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
        assert not {"$ref", "title", "const", "allOf", "$defs"} & set(node), path
        assert node.get("type") or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        leaf = path.rsplit(".", 1)[1] if "." in path else ""
        if leaf not in ("items", "additionalProperties", "metadata", "") and path != "$.metadata.name":
            assert len(node.get("description", "")) > 3, path
        if node.get("type") == "array":
            assert {"maxItems", "x-kubernetes-list-type"} <= set(node), path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "string" and path.startswith("$.spec"):
            assert "maxLength" in node or "enum" in node, path


def test_the_schemas_defaults_are_the_models():
    def fill(schema: dict[str, Any], value: Any) -> Any:
        if isinstance(value, dict):
            for key, child in schema.get("properties", {}).items():
                if key not in value and "default" in child:
                    value[key] = copy.deepcopy(child["default"])
                if key in value:
                    value[key] = fill(child, value[key])
        elif isinstance(value, list):
            value = [fill(schema["items"], v) for v in value]
        return value

    defaulted = fill(SCHEMA, copy.deepcopy(MINIMAL))
    assert KVCachePool.parse(defaulted) == KVCachePool.parse(MINIMAL)
    assert defaulted["spec"]["deletionPolicy"] == "Retain"
    assert defaulted["spec"]["cache"]["eviction"] == {"policy": "PrefixAware", "highWatermark": 85, "lowWatermark": 75}


def test_what_cannot_be_structural_is_an_error():
    with pytest.raises(ValueError, match="contains itself"):
        structural({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}}}})
    with pytest.raises(ValueError, match="union"):
        structural({"anyOf": [{"type": "string"}, {"type": "object"}]})


def test_there_is_a_description_for_each_part_of_the_spec():
    assert all(f.description for f in PoolSpec.model_fields.values())


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        (7, 7),
        ("500Gi", 500 * 2**30),
        ("1.5Ti", 3 * 2**39),
        ("100G", 10**11),
        ("1e9", 10**9),
        ("500m", 1),
        ("+4Gi", 4 * 2**30),
        (".5Ki", 512),
        ("1u", 1),
        ("1E", 10**18),
        ("-0", 0),
    ],
)
def test_quantities(text: str | int, n: int):
    assert to_bytes(text) == n


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "1gi", "0x10", "1e999", "1" * 40, "-1", "-0.5Gi", "4Gib", True, "١Gi"]
)
def test_what_is_no_quantity(text: Any):
    with pytest.raises(ValueError, match="quantity"):
        to_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_formatted_size_reads_back_within_a_percent(n: int):
    text = format_bytes(n)
    assert abs(to_bytes(text) - n) <= n * 0.006
    assert (text == "0") == (n == 0)


@pytest.mark.parametrize(("text", "ms"), [("20ms", 20), ("1s", 1000), ("1m30s", 90_000), ("2h", 7_200_000)])
def test_durations(text: str, ms: int):
    assert to_ms(text) == ms


@pytest.mark.parametrize("text", ["", "20", "ms", "-1s", "1.5s", "1s 2s", "1d"])
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="duration"):
        to_ms(text)
