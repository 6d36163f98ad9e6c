"""Engine pods for tests of the injection, and what becomes of them."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonpatch as reference
import kubernetes_validate
import pytest

from kvpool.config import ClientConfig
from kvpool_operator.injection.annotations import parse_annotations
from kvpool_operator.injection.connector import client_config
from kvpool_operator.injection.mutator import InjectionSettings, inject, is_injected
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.json_patch import diff

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "engines"
GIB = 2**30
INJECTION = InjectionSettings(
    pool="kvpool-system/chat",
    block_tokens=256,
    host_memory_bytes=4 * GIB,
    client_config=client_config(ClientConfig(pool="kvpool-system/chat")),
    sidecar_image="kvpool-sidecar:0.1.0",
)
EXAMPLES = ["vllm", "lmcache", "sglang", "dynamo", "prefill-decode"]
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_producer","engine_id":"p-1","kv_port":"5600"}'
SGLANG = ["python3", "-m", "sglang.launch_server", "--model-path", "m"]
KVBM = '{"kv_connector":"DynamoConnector","kv_connector_module_path":"kvbm.vllm_integration.connector"}'


def pod_of(*containers: dict[str, Any], engine: str = "", **spec: Any) -> dict[str, Any]:
    notes = {"kvpool.dev/pool": "chat"} | ({"kvpool.dev/engine": engine} if engine else {})
    made = [{"name": f"c{i}", "image": "registry.example/i"} | c for i, c in enumerate(containers)]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "e", "labels": {"kvpool.dev/inject": "true"}, "annotations": notes},
        "spec": {"containers": made} | spec,
    }
    decoded: dict[str, Any] = json.loads(json.dumps(pod))  # no part of it is in two places
    return decoded


def injected(pod: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What becomes of the pod: valid, a patch away, the input untouched, and the same after a second pass."""
    before = copy.deepcopy(pod)
    result = inject(pod, parse_annotations(pod), INJECTION)
    assert pod == before, "the input was changed"
    kubernetes_validate.validate(result.pod, "1.34", strict=True)
    assert reference.apply_patch(pod, diff(pod, result.pod)) == result.pod
    assert is_injected(result.pod)
    again = inject(result.pod, parse_annotations(result.pod), INJECTION)
    assert diff(result.pod, again.pod) == [], "a second pass changes the pod"
    assert again.warnings == []
    return result.pod, result.warnings


def skipped(pod: dict[str, Any]) -> tuple[SkipReason, str]:
    with pytest.raises(Skip) as e:
        inject(pod, parse_annotations(pod), INJECTION)
    return e.value.reason, e.value.message


def flags(container: dict[str, Any]) -> dict[str, str]:
    """Flags that were given as `--flag value`."""
    words = [*(container.get("command") or []), *(container.get("args") or []), ""]
    return {w: following for w, following in pairwise(words) if w.startswith("--")}


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env") or []}


def family(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["annotations"]["kvpool.dev/injected-engine"])
