"""Fault 23: pools that are wrong, huge or hostile are refused with a sentence, and the operator goes on."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from api import JSON, MERGE, POOLS, Api, ApiError, until
from conftest import ROOT, SYSTEM, Pools

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIST = f"{POOLS}/namespaces/{SYSTEM}/kvcachepools"
STRICT = f"{LIST}?fieldValidation=Strict&dryRun=All"
GOOD: dict[str, Any] = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "hostile", "namespace": SYSTEM},
    "spec": {"tiers": [{"name": "nvme", "local": {"path": "/var/lib/kvpool/hostile", "capacity": "1Gi"}}]},
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The good pool with one place of it changed."""
    made = copy.deepcopy(GOOD)
    at: Any = made
    for step in path[:-1]:
        at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
    at[path[-1]] = to
    return made


TIER = ("spec", "tiers", 0, "local")
MANY = [{"name": f"t{n}", "local": {"path": f"/mnt/t{n}", "capacity": "1Gi"}} for n in range(20_000)]
HOSTILE = {
    "an_unknown_field": (changed("spec", "colour", to="blue"), "unknown field"),
    "an_unknown_field_of_a_tier": (changed(*TIER, "raid", to=5), "unknown field"),
    "a_list_where_a_map_belongs": (changed("spec", "tiers", 0, "local", to=[1, 2]), "must be of type object"),
    "a_number_where_text_belongs": (changed(*TIER, "path", to=7), "must be of type string"),
    "no_spec": ({k: v for k, v in GOOD.items() if k != "spec"}, "spec: Required value"),
    "a_megabyte_of_path": (changed(*TIER, "path", to="/" + "a" * 1_000_000), "Too long"),
    "twenty_thousand_tiers": (changed("spec", "tiers", to=MANY), "Too many"),
    "two_megabytes": (changed("metadata", "annotations", to={"x": "a" * 2_000_000}), "Too long"),
    "a_path_that_climbs": (changed(*TIER, "path", to="/var/lib/../../etc"), "path"),
    "a_path_with_a_line_break": (changed(*TIER, "path", to="/mnt/a\n/mnt/b"), "path"),
    "a_path_with_a_variable": (changed(*TIER, "path", to="/mnt/$(HOSTNAME)"), "path"),
    "a_capacity_beyond_all_numbers": (changed(*TIER, "capacity", to="9" * 200), "capacity"),
    "a_capacity_in_scientific_form": (changed(*TIER, "capacity", to="1e99"), "capacity"),
    "a_deadline_of_a_century": (changed("spec", "failOpen", "lookupDeadline", to="876000h"), "lookupDeadline"),
    "a_selector_that_is_no_label": (
        changed("spec", "nodes", "selector", "matchLabels", to={"a b": "c"}),
        "",
    ),
}


def refusal(api: Api, manifest: dict[str, Any]) -> str:
    """What the API server says; empty if it takes it."""
    try:
        api.call("POST", STRICT, manifest)
    except ApiError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("case", sorted(set(HOSTILE) - {"a_selector_that_is_no_label"}))
def test_a_hostile_pool_is_refused_with_a_sentence(api: Api, case: str):
    manifest, words = HOSTILE[case]
    assert refusal(api, GOOD) == ""
    said = refusal(api, manifest)
    assert words in said, said[:500]
    assert len(said) < 64 * 1024, "the answer repeats what was sent"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "operator" / "tests" / "bad_pools").glob("*.yaml")), ids=lambda p: p.stem
)
def test_each_bad_pool_of_the_table_is_refused_with_its_sentence(api: Api, path: Path):
    case = yaml.safe_load(path.read_text())
    case["pool"]["metadata"].setdefault("namespace", SYSTEM)
    assert case["message"] in refusal(api, case["pool"])


@pytest.fixture
def unmoved(pools: Pools) -> Iterator[None]:
    """Afterwards the operator still makes a pool Ready: nothing that was sent took it down."""
    yield
    pools.apply("after")
    pools.until_ready("after")
    assert pools.api.items(LIST)


@pytest.mark.usefixtures("unmoved")
def test_what_the_schema_lets_through_costs_only_its_own_pool(pools: Pools, api: Api):
    manifest, _ = HOSTILE["a_selector_that_is_no_label"]
    if refusal(api, manifest) == "":
        api.call("POST", LIST, manifest)
        pools.until_condition("hostile", "Ready", "InvalidSpec", "give label keys")
    # unknown fields of a client that does not ask for strictness are dropped, and the pool is made
    made = {**changed("spec", "colour", to="blue"), "metadata": {"name": "dropped", "namespace": SYSTEM}}
    api.call("POST", f"{LIST}?fieldValidation=Ignore", made)
    assert "colour" not in pools.get("dropped")["spec"]
    pools.until_ready("dropped")


@pytest.mark.usefixtures("unmoved")
def test_a_status_that_somebody_forged_is_put_right(pools: Pools, api: Api):
    pools.apply("chat")
    pools.until_ready("chat")
    forged = {"status": {"phase": "Ready", "conditions": [], "nodes": {"desired": 999, "ready": 999}}}
    api.call("PATCH", f"{pools.path('chat')}/status", forged, MERGE)

    def right() -> bool:
        status = pools.get("chat")["status"]
        return bool(status["nodes"]["ready"] == 2 and len(status["conditions"]) >= 6)

    until("the status tells the truth", right)


@pytest.mark.usefixtures("unmoved")
def test_annotations_and_labels_of_any_content_are_borne(pools: Pools, api: Api):
    pools.apply("chat")
    pools.until_ready("chat")
    odd = {"kvpool.dev/wiped": "yes\n--x", "kvpool.dev/applied-digest": "0" * 1000, "big": "x" * 200_000}
    api.call("PATCH", pools.path("chat"), {"metadata": {"annotations": odd}}, MERGE)
    pools.apply("chat", failOpen={"lookupDeadline": "30ms"})
    pools.until_ready("chat")


def test_what_cannot_be_changed_is_refused_with_a_sentence(pools: Pools, api: Api):
    pools.apply("chat")
    moved = [{"op": "replace", "path": "/spec/tiers/0/local/path", "value": "/mnt/elsewhere"}]
    with pytest.raises(ApiError, match="cannot be changed"):
        api.call("PATCH", pools.path("chat"), moved, "application/json-patch+json")


def test_bodies_that_are_no_objects_are_refused(api: Api):
    for body in ([], "text", 7, {"kind": "KVCachePool"}, json.loads("[" * 200 + "]" * 200)):
        with pytest.raises(ApiError) as refused:
            api.call("POST", STRICT, body, JSON)
        assert 400 <= refused.value.status < 500
