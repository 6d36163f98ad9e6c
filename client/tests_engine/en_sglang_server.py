"""SGLang's real server on the CPU, configured as an injected pod is: by the client's start-up module and variables."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from cl_nodes import end_with_parent, free_port
from en_overlay import overlay
from en_sglang import PATIENT

from kvpool.engines.sglang.guard import DEFAULTS
from kvpool_sidecar.commands.install_client import install_client

START_S, ANSWER_S = 600, 200
EXTRA = "hicache_storage_backend_extra_config"
PAGE = DEFAULTS["page_size"]  # tokens
HERE = Path(__file__).parent
POOL = {
    "hicache_storage_prefetch_policy": "wait_complete",  # the wait is bounded by the client's own deadlines
    EXTRA: {**DEFAULTS[EXTRA], "prefetch_threshold": PAGE},  # SGLang's own: 256 tokens
}


class SGLangServer:
    """One server. `client`: folder with an installed client, made if it is missing. Every call has a time limit."""

    def __init__(self, engine: Path, model: Path, home: Path, socket: str, client: Path | None = None) -> None:
        python, folders = overlay("sglang", engine)
        if client is None:
            client = home / "client"
            install_client(str(client), "")
        self.port = free_port()
        self.log = home / "server.log"
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, [client, HERE / "sglang_on_path", *folders])),
            "PATH": f"{engine / 'site-packages/bin'}{os.pathsep}{os.environ['PATH']}",  # ninja
            "TORCH_EXTENSIONS_DIR": str(folders[0].parent / "extensions"),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "llama_only",
            "KVPOOL_SGLANG_HICACHE": json.dumps(POOL),
            "KVPOOL_CLIENT_CONFIG": json.dumps({"socket": socket, **PATIENT}),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
        }
        options = {
            "--model-path": model, "--port": self.port, "--device": "cpu", "--attention-backend": "torch_native",
            "--dtype": "float32", "--max-total-tokens": 4096, "--hicache-ratio": 8, "--log-level": "warning",
        }  # fmt: skip
        flags = ["--skip-tokenizer-init", "--enable-metrics", "--skip-server-warmup"]
        arguments = [str(item) for pair in options.items() for item in pair] + flags
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "sglang.launch_server", *arguments],
                env={**{k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}, **settings},
                stdout=log, stderr=log, preexec_fn=end_with_parent,
            )  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.ask("/health", seconds=10)
            except OSError:
                time.sleep(0.3)
            else:
                return
        raise RuntimeError(f"SGLang's server is not ready: {self.log.read_text(errors='replace')[-3000:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None, *, seconds: float = ANSWER_S) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return str(answer.read().decode())

    def generate(self, prompt: list[int], tokens: int = 16, salt: str = "") -> dict[str, Any]:
        """The answer's tokens, and the prompt's cached tokens by source: device, host and storage."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        wish = {"input_ids": prompt, "sampling_params": sampling, **({"extra_key": salt} if salt else {})}
        answer = json.loads(self.ask("/generate", wish))
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return {"tokens": answer["output_ids"], **{source: details.get(source, 0) for source in SOURCES}}

    def flush(self) -> None:
        """Empty SGLang's own caches. It refuses while a request ends, so it may wait."""
        self.ask("/flush_cache?timeout=60", {})

    def update_weights(self, model: Path, *, flush_cache: bool = True) -> bool:
        """Load other weights of the same shapes, as reinforcement learning does."""
        answer = self.ask("/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush_cache})
        return bool(json.loads(answer)["success"])

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value over all samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.ask("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


SOURCES = ("device", "host", "storage")
