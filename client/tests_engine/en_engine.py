"""One real vLLM engine as a process of its own, driven line by line."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import xxhash

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cl_nodes import end_with_parent

ROOT = Path(__file__).parent.parent.parent
START_S, ANSWER_S = 300, 300
CPU_SPEC = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvpool_cpu_worker"}
GPU_PYTHON = os.environ.get("KVPOOL_GPU_PYTHON", "")  # of an environment with a vLLM for a GPU (make test-gpu)


def connector(socket: str, *, host_bytes: int = 16 << 20, extra: dict[str, Any] | None = None, **settings: Any) -> str:
    """The connector's configuration with vLLM's tiering; on the CPU with our copies, for vLLM's want a GPU.

    `extra`: more of vLLM's settings of the connector; `settings`: those of PoolTier.
    """
    tier = {"type": "PoolTier", "module_path": "kvpool.engines.vllm", "socket": socket, **settings}
    extra = {
        **(extra or {}),
        **({"spec_name": "TieringOffloadingSpec"} if GPU_PYTHON else CPU_SPEC),
        "cpu_bytes_to_use": host_bytes,  # 16 MiB: 512 blocks of the tiny model in float32
        "offload_prompt_only": False,
        "secondary_tiers": [tier],
    }
    return json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )


class Engine:
    """`engine_process.py` in the engine's own Python. Every call has a time limit. `options`: arguments of vllm.LLM."""

    def __init__(
        self, home: Path, model: Path | None, log: Path, text: str, options: dict[str, Any] | None = None, **env: str
    ) -> None:
        log.with_suffix(".path").mkdir()
        package = Path(xxhash.__file__).parent  # as an injected pod gets it: the engine's environment has none
        (log.with_suffix(".path") / "xxhash").symlink_to(package)
        # this clone's, whichever clone made the environment last
        (log.with_suffix(".path") / "kvpool_cpu_worker.py").symlink_to(ROOT / "e2e/engine/kvpool_cpu_worker.py")
        path = [str(ROOT / "client/src"), str(log.with_suffix(".path"))]
        options = dict(options or {})
        if GPU_PYTHON:
            options.setdefault("gpu_memory_utilization", 0.15)  # a few engines share it
        else:
            path += [str(home / "testing"), str(home / "site-packages")]
        if "EXTRA_PYTHONPATH" in env:
            path.insert(0, env.pop("EXTRA_PYTHONPATH"))
        settings = {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(home / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
            **env,
        }
        self._log = log.open("wb")
        self.log = log
        python = GPU_PYTHON or (home / "interpreter").read_text().strip()
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / "engine_process.py"), str(model or ""), text, json.dumps(options)],
            env={**{k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=end_with_parent,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @functools.cached_property
    def ready(self) -> dict[str, Any]:
        """What it says of itself once it is up: engines that are made one after the other start side by side."""
        return self._next(START_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                self._answers.put(json.loads(line[2:]))
            else:
                self._log.write(line.encode())
        self._answers.put(None)

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            answer = None
        if answer is None:
            self._log.flush()
            raise RuntimeError(f"the engine does not answer: {self.log.read_text(errors='replace')[-3000:]}")
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.ready
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._next(ANSWER_S)

    def open(self, model: Path, text: str, options: dict[str, Any]) -> str:
        """Another model in the same process, started without one. Returns the engine's error, "" without any."""
        answer = self.ask(open={"model": str(model), "connector": text, "options": options})
        return "" if answer["opened"] else str(answer["error"])

    def generate(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        return self.ask(prompt=prompt, **options)

    def batch(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All at once; answers in the order of `wanted`."""
        answers: list[dict[str, Any]] = self.ask(batch=wanted)["batch"]
        return answers

    def counter(self, name: str) -> float:
        """A counter that vLLM shows at /metrics, over all its labels."""
        return sum(value for sample, _, value in self.ask(metrics=name)["metrics"] if sample == f"{name}_total")

    def settle(self) -> None:
        """In one process vLLM hands over the last stores in the next step: give it one."""
        self.generate([5, 6, 7], max_tokens=2)

    def stats(self) -> dict[str, Any]:
        (stats,) = self.ask(stats=True)["stats"]
        return stats

    def quit(self) -> None:
        """Ask it to end; close() waits for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone; closed before
            self.process.stdin.write('{"quit": true}\n')
            self.process.stdin.close()

    def close(self) -> None:
        self.quit()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
