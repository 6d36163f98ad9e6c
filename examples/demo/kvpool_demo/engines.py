"""The demo's side of its engines: the process that has imported vLLM, and the engines forked from it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool_demo.messages import Channel, Done, Generate, Generated, Idle, Ready, Start, Started, Stop
from kvpool_demo.processes import Child, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_MODEL_LEN", "Engine", "EngineHost", "EngineSpec", "Environment"]

BATCH_TOKENS = 2048  # a prefill is computed in pieces of so many tokens
MAX_MODEL_LEN = 6144
KV_BYTES_PER_TOKEN = {"bfloat16": 16 * 1024, "float32": 32 * 1024}  # of e2e/engine/model.py
IMPORT_SECONDS = 180.0
INIT_SECONDS = 180.0
ANSWER_SECONDS = 180.0
IDLE_SECONDS = 30.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Environment:
    """What e2e/engine/make.sh made."""

    directory: Path

    @property
    def interpreter(self) -> str:
        return (self.directory / "interpreter").read_text().strip()

    def variables(self, client_source: Path) -> dict[str, str]:
        """Of a process that runs vLLM from it, with the client's code as the webhook brings it: by PYTHONPATH."""
        here = Path(__file__).resolve().parent.parent
        path = [client_source, self.directory / "site-packages", self.directory / "testing", here]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPOOL_"))},
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONHASHSEED": "0",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "VLLM_CACHE_ROOT": str(self.directory / "vllm-cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


@dataclass(frozen=True)
class EngineSpec:
    """One engine: what is asked of vLLM, the same for all but what the fields say."""

    name: str
    block_tokens: int
    dtype: str = "bfloat16"
    prefix_caching: bool = True
    kv_tokens: int = MAX_MODEL_LEN  # room of the engine's own KV cache
    connector: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of vllm.LLM."""
        # one block more than the tokens need: vLLM keeps one empty
        blocks = -(-self.kv_tokens // self.block_tokens) + 1
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 2,
            "max_num_batched_tokens": BATCH_TOKENS,
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": blocks * self.block_tokens * KV_BYTES_PER_TOKEN[self.dtype],
            "enable_prefix_caching": self.prefix_caching,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": True,
            **({"kv_transfer_config": self.connector} if self.connector is not None else {}),
        }


class Engine:
    """One engine, in a process of its own."""

    def __init__(self, name: str, pid: int, channel: Channel) -> None:
        self.name = name
        self.pid = pid
        self._channel = channel

    def wait_ready(self) -> float:
        """Seconds that it took to start. StartError if it did not."""
        try:
            answer = self._channel.receive(INIT_SECONDS)
        except (OSError, TimeoutError) as e:
            raise StartError(f"the engine {self.name} did not start: {e}") from e
        if not isinstance(answer, Ready):
            raise StartError(f"the engine {self.name} did not start: {getattr(answer, 'reason', answer)}")
        return answer.seconds

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Generated:
        return self._channel.ask(Generate(list(prompt), max_tokens), Generated, ANSWER_SECONDS)

    def idle(self) -> dict[str, Any]:
        """Wait until its stores are done; what its plug-in has counted so far."""
        return self._channel.ask(Idle(IDLE_SECONDS), Done, IDLE_SECONDS + 10).stats

    def ask_to_stop(self) -> None:
        """Begin to shut down; `end` waits for it."""
        with contextlib.suppress(OSError):
            self._channel.send(Stop())

    def end(self) -> None:
        """Wait until it has shut down, and end it if it does not. The kernel reaps it: it is the host's child."""
        with contextlib.suppress(OSError, RuntimeError):
            self._channel.receive(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class EngineHost:
    """The process that has imported vLLM; it forks engines."""

    def __init__(self, environment: Environment, client_source: Path, logs: Path) -> None:
        self._logs = logs
        self._model = environment.directory / "model"
        self._channel, theirs = Channel.pair()
        command = [environment.interpreter, "-m", "kvpool_demo.engine_host", str(theirs.fileno())]
        self._child = Child(
            "engine-host", command, logs / "engine-host.log", environment.variables(client_source), [theirs.fileno()]
        )
        theirs.close()

    def wait_ready(self) -> float:
        """Seconds that the import took."""
        try:
            return self._channel.receive(IMPORT_SECONDS).seconds  # type: ignore[no-any-return]
        except (OSError, TimeoutError) as e:
            raise StartError(f"vLLM cannot be imported ({e}); {self._child.log} ends:\n{self._child.tail()}") from e

    def start(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        """Engines that serve; they start side by side."""
        engines = []
        for spec in specs:
            channel, theirs = Channel.pair()
            log = str(self._logs / f"{spec.name}.log")
            start = Start(spec.name, log, spec.arguments(self._model), spec.environment)
            self._channel.send(start, theirs.fileno())
            theirs.close()
            started: Started = self._channel.receive(30)
            engines.append(Engine(spec.name, started.pid, channel))
        for engine in engines:
            engine.wait_ready()
        return engines

    def stop(self) -> None:
        """The engines that are still there go with it."""
        self._channel.close()
        self._child.stop()
