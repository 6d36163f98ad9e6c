"""The view model of the dashboard: nothing known, everything known, half of it known."""

from __future__ import annotations

from typing import Any

import pytest
from cli_documents import documents
from op_diagnosis_world import World, status

from kvpool_cli.cluster.summary import summarize
from kvpool_cli.cluster.view import pool_state
from kvpool_cli.dashboard.peer_matrix import MAX_NODES, peer_matrix
from kvpool_cli.dashboard.view_model import UNKNOWN, view_model

KEY = "kvpool-system/chat"


def pool(world: World | None = None, docs_url: str = "") -> dict[str, Any]:
    """The page of the pool that `world` describes."""
    document = {"pools": [summarize(pool_state(documents(world), KEY))], "notes": []}
    (found,) = view_model(document, docs_url)["pools"]
    return found


def facts(found: dict[str, Any]) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in found["facts"]}


def rows(*states: str, node: str = "node-0") -> list[dict[str, str]]:
    return [{"node": node, "peer": f"node-{n + 1}", "state": state, "reason": ""} for n, state in enumerate(states)]


def test_an_empty_document_has_no_pools():
    assert view_model({}) == {"pools": [], "notes": []}


def test_a_pool_of_which_nothing_is_known_shows_dashes_and_no_bars():
    (found,) = view_model({"pools": [{"pool": KEY}]})["pools"]
    assert {fact["value"] for fact in found["facts"]} == {UNKNOWN}
    assert {fact["percent"] for fact in found["facts"]} == {None}
    assert found["prompt"]["asked"] == {"count": UNKNOWN, "share": UNKNOWN, "percent": None}
    assert (found["phase"], found["level"]) == ("Unknown", "warning")
    assert found["tiers"][0]["used"] == UNKNOWN
    assert found["models"] == found["nodes"] == found["findings"] == []


def test_a_healthy_pool_shows_everything():
    found = pool()
    assert (found["phase"], found["level"], found["findings"]) == ("Ready", "ok", [])
    assert facts(found) == {
        "Nodes": "2/2", "Hit rate, 5 min": "80 %", "Hit rate, 1 h": "80 %", "Capacity": "10 %",
        "Engines": "2/2", "Index": "2/2", "Reads between nodes": "2/2",
    }  # fmt: skip
    assert found["models"] == [
        {"model": "llama", "rate5m": "80 %", "rate1h": "80 %", "percent": 80.0, "asked": "200k", "found": "160k"}
    ]
    assert found["prompt"]["computed"] == {"count": "40k", "share": "20 %", "percent": 20.0}
    assert [one["share"] for one in found["prompt"]["sources"]] == ["62 %", "38 %", "0 %"]
    assert found["prompt"]["reasons"][0]["reason"] == "never-stored"
    assert [(node["node"], node["state"], node["share"]) for node in found["nodes"]] == [
        ("node-0", "Serving", "10 %"), ("node-1", "Serving", "10 %"),
    ]  # fmt: skip
    assert found["tiers"][0] | {"bytes": "", "blocks": ""} == {
        "tier": "local", "state": "ok", "level": "ok", "used": "2Gi", "capacity": "20Gi", "share": "10 %",
        "percent": 10.0, "bytes": "", "blocks": "",
    }  # fmt: skip


def test_none_of_a_known_number_is_0_percent_and_none_of_none_is_a_dash():
    world = World()
    for node in world.statuses:
        world.set_misses(node, never_stored=100_000)
    assert facts(pool(world))["Hit rate, 1 h"] == "0 %"
    for raw in world.statuses.values():
        for window in raw["cache"]["windows"]:
            window |= {"tokensAsked": 0, "tokensFound": 0, "misses": {}}
    found = pool(world)
    assert facts(found)["Hit rate, 1 h"] == UNKNOWN
    assert found["prompt"]["found"] == {"count": UNKNOWN, "share": UNKNOWN, "percent": None}


def test_a_node_that_does_not_answer_is_unknown_and_the_other_is_shown():
    found = pool(World(silent_nodes={"node-1"}))
    first, second = found["nodes"]
    assert (first["state"], first["rate1h"]) == ("Serving", "80 %")
    assert (second["state"], second["level"], second["used"], second["percent"]) == (
        "no answer", "error", UNKNOWN, None,
    )  # fmt: skip
    assert found["level"] == "error"
    assert "KVP0401" in {finding["code"] for finding in found["findings"]}
    assert found["peers"]["rows"][1]["cells"][0]["state"] == "unknown"


def test_without_the_right_to_read_sidecars_nothing_is_concluded_about_them():
    found = documents(World(silent_nodes={"node-0", "node-1"}))
    found.denied = dict.fromkeys(documents().statuses, "get pods/proxy in namespace kvpool-system")
    found.objects["pools"][0]["status"]["capacity"] = {"total": "20Gi", "used": "2Gi", "usedPercent": 10}
    (shown,) = view_model({"pools": [summarize(pool_state(found, KEY))]})["pools"]
    assert {(node["state"], node["level"]) for node in shown["nodes"]} == {("not read", "unknown")}
    assert facts(shown)["Capacity"] == "10 %"
    assert [finding["code"] for finding in shown["findings"]] == ["KVP0906"]


def test_no_node_answers():
    found = pool(World(silent_nodes={"node-0", "node-1"}))
    assert facts(found)["Capacity"] == UNKNOWN
    assert found["tiers"][0]["capacity"] == UNKNOWN
    assert found["tiers"][0]["blocks"] == UNKNOWN


def test_a_shared_tier_is_as_large_as_its_last_collection_counted():
    world = World()
    sweep = {"used_bytes": 3 * 2**30, "capacity_bytes": 12 * 2**30, "last_s_ago": 5.0}
    world.statuses["node-0"]["shared"] = {"configured": True, "available": True, "sweep": sweep}
    world.statuses["node-1"]["shared"] = {"configured": True, "available": False, "sweep": {"used_bytes": 0}}
    _, shared = pool(world)["tiers"]
    assert (shared["used"], shared["capacity"], shared["share"]) == ("3Gi", "12Gi", "25 %")
    assert (shared["state"], shared["level"]) == ("1 of 2 nodes have it", "error")
    del world.statuses["node-0"]["shared"]["sweep"]
    assert pool(world)["tiers"][1]["used"] == UNKNOWN


def test_a_failing_drive_is_named():
    world = World()
    world.statuses["node-1"]["drives"] = {"nvme": "failing"}
    assert pool(world)["tiers"][0]["state"] == "failing: node-1 nvme"


def test_findings_link_to_the_documentation_if_its_address_is_known():
    world = World(silent_nodes={"node-1"})
    assert {finding["link"] for finding in pool(world)["findings"]} == {""}
    links = {f["code"]: f["link"] for f in pool(world, "https://docs.example/kv/")["findings"]}
    assert links["KVP0401"] == "https://docs.example/kv/reference/findings/#kvp0401"


def test_peers_are_a_matrix_with_the_diagonal_empty():
    listed = [*rows("reachable"), {"node": "node-1", "peer": "node-0", "state": "unreachable", "reason": "timeout"}]
    found = peer_matrix(["node-0", "node-1", "node-2"], listed)
    states = [[cell["state"] for cell in row["cells"]] for row in found["rows"]]
    assert states == [
        ["self", "reachable", "unknown"], ["unreachable", "self", "unknown"], ["unknown", "unknown", "self"],
    ]  # fmt: skip
    assert found["rows"][1]["cells"][0]["text"] == "node-1 from node-0: unreachable: timeout"


@pytest.mark.parametrize("state", ["unheard-of", ""])
def test_a_state_of_another_release_is_unknown(state):
    assert peer_matrix(["node-0", "node-1"], rows(state))["rows"][0]["cells"][1]["state"] == "unknown"


def test_of_many_nodes_those_with_failures_are_shown():
    names = [f"node-{n:03}" for n in range(100)]
    found = peer_matrix(names, [{"node": "node-098", "peer": "node-099", "state": "unreachable"}])
    assert (len(found["nodes"]), found["hidden"]) == (MAX_NODES, 100 - MAX_NODES)
    assert {"node-098", "node-099"} <= set(found["nodes"])


def test_the_pairs_of_a_status_are_in_the_matrix():
    world = World()
    peers = {"peers": 1, "reachable": 0, "unreachable": 1, "unverified": 0}
    row = {"node": "node-1", "address": "10.0.0.2:7421", "state": "unreachable", "reason": "timeout"}
    world.statuses["node-0"]["reachability"] = {**peers, "rows": [row]}
    found = pool(world)
    assert found["peers"]["rows"][0]["cells"][1]["state"] == "unreachable"
    assert facts(found)["Reads between nodes"] == "1/2"


def test_text_of_the_cluster_is_bounded():
    world = World()
    world.statuses |= {f"n-{n}": status(f"n-{n}") for n in range(300)}
    found = pool(world)
    assert len(found["nodes"]) + found["hiddenNodes"] == 302
    assert view_model({"notes": ["x" * 1000] * 50})["notes"] == ["x" * 300] * 20
