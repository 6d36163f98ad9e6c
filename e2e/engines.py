"""Real engines on the cluster, and conversations with them over HTTP."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubectl import ROOT, Proxy, apply, get, kubectl, until

NAMESPACE = "team-a"
PORT = 8000
IMAGE = os.environ.get("KVPOOL_BASE_IMAGE", "python:3.11-slim-bookworm")
MOUNT = "/opt/kvpool-engine"
ARGS = [
    "--model", f"{MOUNT}/model", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", str(PORT),
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--block-size", "128",
    "--max-num-seqs", "2", "--max-num-batched-tokens", "2048", "--enable-prompt-tokens-details",
]  # fmt: skip
# vLLM refuses to copy between "GPU" and host memory on a CPU: the tests bring a worker that can
CPU_WORKER = {
    "kv_connector_extra_config": {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "kvpool_cpu_worker",
        "cpu_bytes_to_use": 256 * 1024 * 1024,
    }
}


def start(name: str, node: str, *, pool: str | None, shell: bool = False) -> None:
    """One engine pod on `node`; with `pool` it opts in; `shell` starts it the way many manifests do, by `sh -c`."""
    made = yaml.safe_load((Path(__file__).parent / "manifests" / "engine.yaml").read_text())
    meta, spec = made["metadata"], made["spec"]
    engine = spec["containers"][0]
    meta["name"] = name
    spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    engine["image"] = IMAGE
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    if shell:
        engine["command"] = ["sh", "-c", " ".join(["exec", *command, *ARGS])]
    else:
        engine.update(command=command, args=ARGS)
    if pool is not None:
        meta["labels"]["kvpool.dev/inject"] = "true"
        meta["annotations"] = {"kvpool.dev/pool": pool, "kvpool.dev/connector-config": json.dumps(CPU_WORKER)}
    else:  # what vLLM asks of any pod; for the others the injection brings it
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
        engine["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    apply(json.dumps(made))


def wait_serving(name: str, timeout: float = 300) -> None:
    def ready() -> bool:
        pod = get("pod", "-n", NAMESPACE, name)
        return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))

    until(f"engine {name} serves", ready, timeout, every=1)


def delete(name: str) -> None:
    kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=true", "--timeout=60s")


@dataclass(frozen=True)
class Turn:
    """One answer: the tokens, and how many tokens of the prompt the engine did not have to compute."""

    tokens: list[int]
    cached: int
    prompt: int


def ask(proxy: Proxy, name: str, prompt: list[int], max_tokens: int = 48) -> Turn:
    """Greedy completion of exactly `max_tokens` tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = json.loads(proxy.request(NAMESPACE, name, PORT, "/v1/completions", body))
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(answer["choices"][0]["token_ids"], cached, usage["prompt_tokens"])


def pool_counters(proxy: Proxy, name: str) -> list[str]:
    """What the engine has counted of the pool: tokens loaded by tier, blocks missed by reason, bytes stored."""
    lines = proxy.request(NAMESPACE, name, PORT, "/metrics").splitlines()
    return [line for line in lines if line.startswith("kvpool:") and "_created" not in line]


def text_tokens(text: str) -> list[int]:
    """The tests' model has one token per byte: e2e/engine/model.py."""
    return [byte + 3 for byte in text.encode()]


def document(start: int, size: int) -> str:
    """Real text: the project's own pages."""
    text = "".join(
        (ROOT / p).read_text()
        for p in ("README.md", "docs/contribute/architecture.md", "docs/contribute/design/contracts.md")
    )
    return text[start : start + size]
