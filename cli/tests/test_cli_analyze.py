"""Manifests that `analyze` checks before they are applied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml
from op_samples import pool_manifest

from kvpool_cli import main as entry
from kvpool_cli.cluster.analyzer import analyze

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LABEL = {"kvpool.dev/inject": "true"}


def deployment(*, labels: Any = None, template_labels: Any = None, pool: str = "", **container: Any) -> dict[str, Any]:
    notes = {"annotations": {"kvpool.dev/pool": pool}} if pool else {}
    engine = {"name": "vllm", "image": "vllm/vllm-openai:v0.33.0", "args": ["--model", "llama"], **container}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "namespace": "team-a", "labels": labels or {}},
        "spec": {
            "template": {"metadata": {"labels": template_labels or {}, **notes}, "spec": {"containers": [engine]}}
        },
    }


def found(*objects: dict[str, Any], **injection: Any) -> list[tuple[str, str]]:
    everywhere = {"allowedNamespaces": {"from": "All"}, **injection}
    findings, _ = analyze(yaml.safe_dump_all(objects), [pool_manifest(injection=everywhere)], {}, "default")
    return [(f.code.value, f.subject) for f in findings]


def test_a_template_that_is_injected_has_no_finding():
    findings, count = analyze(
        yaml.safe_dump(deployment(template_labels=LABEL, pool="kvpool-system/chat")), [], {}, "default"
    )
    assert ([f.code.value for f in findings if f.severity.value != "Info"], count) == ([], 1)


def test_the_label_on_the_deployment_is_an_error():
    assert found(deployment(labels=LABEL)) == [("KVP0101", "Deployment team-a/vllm")]


def test_a_template_that_did_not_opt_in_is_left_alone():
    assert found(deployment()) == []


def test_a_mistyped_pool_gets_a_suggestion():
    findings, _ = analyze(
        yaml.safe_dump(deployment(template_labels=LABEL, pool="kvpool-system/chatt")), [pool_manifest()], {}, "default"
    )
    assert [(f.code.value, "did you mean 'kvpool-system/chat'" in f.summary) for f in findings] == [("KVP0104", True)]


def test_a_namespace_that_the_pool_does_not_admit_is_an_error():
    one = deployment(template_labels=LABEL, pool="kvpool-system/chat")
    assert found(one, allowedNamespaces={"from": "Same"}) == [("KVP0106", "Deployment team-a/vllm")]


def test_an_engine_with_a_connector_is_skipped_with_a_fix():
    transfer = json.dumps({"kv_connector": "SomeConnector", "kv_role": "kv_both"})
    one = deployment(template_labels=LABEL, args=["--model", "llama", "--kv-transfer-config", transfer])
    findings, _ = analyze(
        yaml.safe_dump(one), [pool_manifest(injection={"allowedNamespaces": {"from": "All"}})], {}, "d"
    )
    assert [f.code.value for f in findings] == ["KVP0103"]
    assert "connector" in findings[0].fix


def test_a_document_that_cannot_be_read_is_a_finding():
    findings, _ = analyze("kind: Pod\n  bad: [", [], {}, "default")
    assert [f.severity.value for f in findings] == ["Error"]


def test_the_command_reads_files_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    manifest, pool = tmp_path / "deploy.yaml", tmp_path / "pool.yaml"
    manifest.write_text(yaml.safe_dump(deployment(labels=LABEL)))
    pool.write_text(yaml.safe_dump(pool_manifest()))
    assert entry.main(["analyze", "-f", str(manifest), "--pool", str(pool)]) == 1
    assert "Error [KVP0101] (Deployment team-a/vllm)" in capsys.readouterr().out
    assert entry.main(["analyze", "-f", str(tmp_path / "none"), "--pool", str(pool)]) == 2
