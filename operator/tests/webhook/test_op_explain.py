"""`explain-injection`: decisions of the webhook about pods in files, and input that no API server has checked."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvpool_operator.cli import main
from kvpool_operator.webhook import pod_templates

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = {"name": "engine", "image": "vllm/vllm-openai:v0.33.0", "command": ["vllm", "serve", "m"]}
SPEC: dict[str, Any] = {"containers": [ENGINE]}
KEYS = {
    "kind", "name", "namespace", "path", "requested", "decision", "engine", "container", "containers", "reason",
    "message", "warnings", "pod",
}  # fmt: skip


def pod(name: str = "e", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name} | ({"labels": labels} if labels else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": SPEC | spec}


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command on documents, and return exit status and result."""

    def run(*documents: Any, flags: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "pods.yaml"
        path.write_text("\n---\n".join(d if isinstance(d, str) else json.dumps(d) for d in documents))
        status = main(["explain-injection", "-f", str(path), *flags])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_pod_is_explained_as_the_webhook_would_change_it(explain: Any):
    status, result = explain(pod(labels={"kvpool.dev/inject": "true"}))
    (item,) = result["items"]
    assert status == 0
    assert set(item) == KEYS
    assert (item["decision"], item["engine"], item["container"], item["requested"]) == (
        "injected",
        "vllm",
        "engine",
        True,
    )
    changed = item["pod"]["spec"]["containers"][0]
    assert changed["command"] == ENGINE["command"]
    assert "KVPOOL_VLLM_KV_TRANSFER_CONFIG" in {e["name"] for e in changed["env"]}
    assert item["warnings"] == []


def test_a_pod_without_the_label_is_explained_as_if_it_had_it(explain: Any):
    _, result = explain(pod())
    (item,) = result["items"]
    assert (item["requested"], item["decision"]) == (False, "injected")


def test_a_pod_whose_label_excludes_it_is_not_requested(explain: Any):
    _, result = explain(pod(labels={"kvpool.dev/inject": "false"}))
    (item,) = result["items"]
    assert (item["requested"], item["decision"]) == (False, "not-requested")
    assert item["pod"]["spec"] == SPEC


def test_a_skipped_pod_has_reason_and_message(explain: Any):
    container = ENGINE | {"command": ["sleep", "1"]}
    status, result = explain(pod(containers=[container]))
    (item,) = result["items"]
    assert (status, item["decision"], item["reason"]) == (0, "skipped", "unsupported-engine")
    assert "no container runs a known engine" in item["message"]
    assert item["warnings"] == []
    assert item["container"] == ""
    assert explain(pod(containers=[container]), flags=("--exit-code",))[0] == 3


@pytest.mark.parametrize(
    ("kind", "spec", "path"),
    [
        ("Deployment", {"template": {"spec": SPEC}}, "spec.template"),
        ("CronJob", {"jobTemplate": {"spec": {"template": {"spec": SPEC}}}}, "spec.jobTemplate.spec.template"),
        (
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"workerTemplate": {"spec": SPEC}}},
            "spec.leaderWorkerTemplate.workerTemplate",
        ),
        (
            "RayCluster",
            {"workerGroupSpecs": [{"template": {"spec": SPEC}}]},
            "spec.workerGroupSpecs[0].template",
        ),
        ("RoleBasedGroup", {"roles": [{"template": {"spec": SPEC}}]}, "spec.roles[0].template"),
        ("LLMInferenceService", {"template": SPEC}, "spec.template"),
        ("InferenceService", {"predictor": SPEC}, "spec.predictor"),
        ("ServingRuntime", SPEC, ""),
        (
            "DynamoGraphDeployment",
            {"services": {"Worker": {"extraPodSpec": {"mainContainer": ENGINE}}}},
            "spec.services.Worker.extraPodSpec",
        ),
    ],
)
def test_templates_of_any_kind_are_found(explain: Any, kind: str, spec: dict[str, Any], path: str):
    status, result = explain({"kind": kind, "metadata": {"name": "w", "namespace": "team-a"}, "spec": spec})
    (item,) = result["items"]
    assert (status, item["path"], item["decision"]) == (0, path, "injected")
    assert (item["kind"], item["name"], item["namespace"]) == (kind, "w", "team-a")


def test_labels_and_annotations_of_a_template_are_its_own(explain: Any):
    template = {
        "metadata": {"labels": {"kvpool.dev/inject": "true"}, "annotations": {"kvpool.dev/engine": "none"}},
        "spec": SPEC,
    }
    _, result = explain({"kind": "Deployment", "metadata": {"name": "w"}, "spec": {"template": template}})
    (item,) = result["items"]
    assert (item["requested"], item["engine"]) == (True, "none")


def test_several_documents_and_lists_are_explained_in_order(explain: Any):
    listed = {"kind": "List", "items": [pod("b"), {"kind": "Service", "metadata": {"name": "s"}}, pod("c")]}
    status, result = explain(pod("a"), listed, "# a comment only", pod("d"))
    assert status == 0
    assert [i["name"] for i in result["items"]] == ["a", "b", "c", "d"]
    assert result["ignored"] == [{"kind": "Service", "name": "s"}]


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(pod())))
    assert main(["explain-injection", "-f", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["decision"] == "injected"


def test_a_document_with_placeholders_does_not_hide_the_others(explain: Any):
    status, result = explain(pod("a"), "kind: Pod\nspec: {{- toYaml .Values.spec }}\n  x: [", pod("b"))
    assert status == 1
    assert [i["decision"] for i in result["items"]] == ["injected", "skipped", "injected"]
    assert result["items"][1]["reason"] == "malformed"
    assert "not valid YAML" in result["items"][1]["message"]


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [ENGINE | {"args": "{{ args }}"}]},
        {"containers": [ENGINE | {"args": [["x"]]}]},
        {"containers": [ENGINE | {"env": {"A": "b"}}]},
        {"containers": [ENGINE, None]},
        {"containers": [ENGINE], "volumes": ["x"]},
        {"containers": [ENGINE | {"resources": "x"}]},
    ],
)
def test_what_no_api_server_accepts_is_malformed(explain: Any, spec: dict[str, Any]):
    status, result = explain({"kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    (item,) = result["items"]
    assert (status, item["decision"], item["reason"]) == (1, "skipped", "malformed")
    assert item["message"]


def test_numbers_for_strings_are_evaluated_with_a_warning(explain: Any):
    numbers = pod(labels={"a": True}, containers=[ENGINE | {"args": [8000], "env": [{"name": "A", "value": 1}]}])  # type: ignore[dict-item]
    status, result = explain(numbers)
    (item,) = result["items"]
    assert (status, item["decision"]) == (0, "injected")
    assert item["pod"]["spec"]["containers"][0]["args"] == [8000]
    assert ["the API server rejects" in w for w in item["warnings"]] == [True, True]


def test_an_annotation_that_is_no_string_is_malformed(explain: Any):
    wrong = pod()
    wrong["metadata"]["annotations"] = {"kvpool.dev/pool": 7}
    status, result = explain(wrong)
    assert (status, result["items"][0]["reason"]) == (1, "malformed")


def test_null_fields_and_missing_names_are_accepted(explain: Any):
    container = ENGINE | {"args": None, "env": None, "resources": None, "volumeMounts": None, "name": None}
    empty = {"kind": "Pod", "metadata": None, "spec": {"containers": [container], "volumes": None, "tolerations": None}}
    status, result = explain(empty)
    assert (status, result["items"][0]["decision"]) == (0, "injected")


def test_aliases_are_bounded(explain: Any):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 9):
        bomb += f"{chr(97 + i)}: &{chr(97 + i)} [{', '.join(['*' + chr(96 + i)] * 9)}]\n"
    status, result = explain(bomb)
    assert status == 1
    assert "values" in result["items"][0]["message"]
    status, result = explain("&a [*a]")
    assert status == 1
    assert "nested" in result["items"][0]["message"]


@pytest.mark.parametrize("limit", ["MAX_TEXT", "MAX_DOCUMENTS"])
def test_a_file_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str
):
    monkeypatch.setattr(pod_templates, limit, 1)
    path = tmp_path / "p.yaml"
    path.write_text(f"{json.dumps(pod())}\n---\n{json.dumps(pod())}")
    assert main(["explain-injection", "-f", str(path)]) == 2
    assert "more than" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_an_unreadable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None):
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["explain-injection", "-f", str(path)]) == 2
    assert "p.yaml" in capsys.readouterr().err


POOL: dict[str, Any] = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "chat", "namespace": "kvpool-system"},
    "spec": {
        "tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "500Gi"}}],
        "injection": {"vllm": {"hostMemory": "8Gi"}},
    },
}


def test_a_pool_decides_with_its_settings(explain: Any, tmp_path: Path):
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(POOL))
    _, result = explain(pod(), flags=("--pool", str(path)))
    (item,) = result["items"]
    assert result["pool"] == item["pod"]["metadata"]["annotations"]["kvpool.dev/pool"] == "kvpool-system/chat"
    variables = {e["name"]: e["value"] for e in item["pod"]["spec"]["containers"][0]["env"]}
    connector = json.loads(variables["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
    assert connector["kv_connector_extra_config"]["cpu_bytes_to_use"] == 8 * 2**30
    assert item["warnings"] == []


def test_a_pool_that_does_not_allow_the_namespace_is_the_reason(explain: Any, tmp_path: Path):
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(POOL | {"spec": POOL["spec"] | {"injection": {"allowedNamespaces": {"from": "Same"}}}}))
    _, result = explain(pod(), flags=("--pool", str(path)))
    assert result["items"][0]["reason"] == "namespace-not-allowed"
    _, result = explain(pod(), flags=("--pool", str(path), "--namespace", "kvpool-system"))
    assert result["items"][0]["decision"] == "injected"


@pytest.mark.parametrize("text", ["kind: Pod", "{", json.dumps(POOL | {"spec": {"tiers": []}})])
def test_an_invalid_pool_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    assert main(["explain-injection", "-f", str(path), "--pool", str(path)]) == 2
    assert "pool.yaml" in capsys.readouterr().err


def test_the_help_describes_output_and_exit_status(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["explain-injection", "--help"])
    text = capsys.readouterr().out
    assert "exit status" in text
    assert all(key in text for key in KEYS)


def test_a_namespace_that_selects_its_engines_is_given_by_its_labels(explain: Any):
    flags = (
        "--namespace-labels",
        "kvpool.dev/inject=enabled,team=a",
        "--namespace-annotations",
        "kvpool.dev/pool=ns/chat",
    )
    other = pod("other", containers=[{"name": "c", "image": "redis"}])
    _, result = explain(pod(), other, flags=flags)
    engine, left = result["items"]
    assert (engine["decision"], engine["requested"]) == ("injected", False)
    annotations = engine["pod"]["metadata"]["annotations"]
    assert (annotations["kvpool.dev/selected-by"], annotations["kvpool.dev/pool"]) == ("namespace", "ns/chat")
    assert left["decision"] == "not-requested"
    _, result = explain(pod(), flags=("--namespace-labels", "team=a"))
    assert result["items"][0]["decision"] == "not-requested"
    with pytest.raises(SystemExit):
        explain(pod(), flags=("--namespace-labels", "team"))


def test_the_selector_of_a_pool_decides_about_pods_without_a_label(explain: Any, tmp_path: Path):
    injection = {"selector": {"matchLabels": {"app": "llm"}}, "allowedNamespaces": {"from": "Same"}}
    tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}]
    chosen = {"kind": "KVCachePool", "metadata": {"name": "p", "namespace": "default"}}
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(chosen | {"spec": {"tiers": tiers, "injection": injection}}))
    _, result = explain(pod("a", {"app": "llm"}), pod("b", {"app": "web"}), flags=("--pool", str(path)))
    assert [i["decision"] for i in result["items"]] == ["injected", "not-requested"]
