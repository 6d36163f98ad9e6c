"""Seed, algorithm, tokenizer and chat template: one kind of finding, with the field that differs and its fix."""

from __future__ import annotations

from typing import Any

import pytest
from op_diagnosis_world import World, engine_pod

from kvpool_operator.api.findings.codes import Code

SUBJECT = "Model team-a/llama"


def facts(world: World, node: str, **fields: str) -> None:
    """Add facts that are no part of the fingerprint to the engines of a node."""
    named = {f"prompt.{name}": digest for name, digest in fields.items()}
    world.statuses[node]["fingerprints"][0]["fields"] |= named


def of_hashes(world: World) -> list[Any]:
    return [finding for finding in world.findings() if finding.code is Code.HASHES_DIFFER]


@pytest.mark.parametrize(
    ("fields", "named", "fix"),
    [
        ({"hash_seed": "6b86b273"}, "(hash_seed differs)", "PYTHONHASHSEED"),
        ({"hash_seed": "6b86b273", "hash_probe": "77aa0000"}, "(hash_seed differs)", "PYTHONHASHSEED"),
        ({"hash_algorithm": "77aa0000", "hash_probe": "1"}, "(hash_algorithm differs)", "--prefix-caching-hash-algo"),
        ({"hash_probe": "77aa0000"}, "(hash_probe differs)", "without a fixed seed"),
    ],
)
def test_fingerprints_that_differ_in_hashes(fields: dict[str, str], named: str, fix: str):
    world = World()
    world.set_fingerprint("node-1", **fields)
    (found,) = of_hashes(world)
    assert (found.subject, found.severity) == (SUBJECT, "Error")
    assert named in found.summary
    assert fix in found.fix


@pytest.mark.parametrize(
    ("fields", "words", "fix"),
    [
        ({"tokenizer": "b"}, "the tokenizer of team-a/y is not that of team-a/x", "same files of the tokenizer"),
        ({"chat_template": "b"}, "the chat template of team-a/y is not that of team-a/x", "same chat template"),
        (
            {"tokenizer": "b", "chat_template": "b"},
            "chat template and tokenizer of team-a/y are not those of team-a/x",
            "same files of the tokenizer",
        ),
    ],
)
def test_prompts_that_are_tokenized_differently(fields: dict[str, str], words: str, fix: str):
    world = World()
    facts(world, "node-0", tokenizer="a", chat_template="a")
    facts(world, "node-1", **{"tokenizer": "a", "chat_template": "a"} | fields)
    (found,) = of_hashes(world)
    assert (found.subject, found.severity) == (SUBJECT, "Warning")
    assert found.summary == words
    assert fix in found.fix


def test_equal_or_unknown_tokenizers_are_no_finding():
    world = World()
    facts(world, "node-0", tokenizer="a")
    assert world.findings() == ()
    facts(world, "node-1", tokenizer="a")
    assert world.findings() == ()


def test_tokenizers_of_two_namespaces_are_not_compared():
    world = World()
    facts(world, "node-0", tokenizer="a")
    facts(world, "node-1", tokenizer="b")
    world.pods[1] = engine_pod("y", "node-1")
    world.pods[1]["metadata"]["namespace"] = "team-b"
    assert of_hashes(world) == []


def test_the_larger_group_is_the_one_to_compare_with():
    world = World()
    facts(world, "node-0", tokenizer="odd")
    facts(world, "node-1", tokenizer="usual")
    world.pods.append(engine_pod("z", "node-1"))
    world.statuses["node-1"]["connected_pods"].append("uid-z")
    world.statuses["node-1"]["fingerprints"][0]["pods"].append({"uid": "uid-z", "connected": True, "seen": 1})
    (found,) = of_hashes(world)
    assert found.summary == "the tokenizer of team-a/x is not that of team-a/y, team-a/z"


def test_tokenizers_do_not_explain_fingerprints_that_differ():
    world = World()
    world.set_fingerprint("node-1", kv_dtype="77ab0000", prompt__tokenizer="b")
    facts(world, "node-0", tokenizer="a")
    found = {finding.code.value: finding for finding in world.findings()}
    assert set(found) == {"KVP0201", "KVP0202"}
    assert "(kv_dtype differs)" in found["KVP0202"].summary
    assert "tokenizer" in found["KVP0201"].summary


def test_hashes_and_tokenizers_that_differ_are_one_finding():
    world = World()
    world.set_fingerprint("node-1", hash_seed="6b86b273", prompt__tokenizer="b")
    facts(world, "node-0", tokenizer="a")
    (found,) = of_hashes(world)
    assert "hash_seed" in found.summary
