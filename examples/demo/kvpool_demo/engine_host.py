"""Runs in the engine's environment: imports vLLM once, then forks one engine per node and phase.

    python -m kvpool_demo.engine_host DESCRIPTOR      (of the demo's channel)

Importing vLLM takes 10 s of CPU; a fork has it for nothing. Each engine is a process of its own, with its own
scheduler, KV cache, connector and log, driven over its own channel (kvpool_demo.messages). vLLM runs in that process
(no further processes), so the time to first token is from the request to the token with nothing in between.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from typing import Any

from kvpool_demo.messages import (
    Channel,
    Done,
    Failed,
    Generate,
    Generated,
    Idle,
    ProtocolError,
    Ready,
    Start,
    Started,
    Stop,
)
from kvpool_demo.tether import die_with_parent

POLL_S = 0.001  # as vLLM's own loop does while a step had nothing to run
TIERS = ("local", "peer", "shared")


class Engine:
    """One vLLM in this process. Requests run one at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = arguments.pop("kv_transfer_config", None)
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        self._engine = LLM(**arguments).llm_engine
        self._core = self._engine.engine_core.engine_core
        self._asked = 0

    def generate(self, request: Generate) -> Generated:
        from vllm import SamplingParams

        before = self._tokens_by_tier()
        sampling = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        self._asked += 1
        began, first = time.monotonic(), 0.0
        self._engine.add_request(str(self._asked), {"prompt_token_ids": request.prompt}, sampling)
        while True:
            outputs = self._engine.step()
            if not outputs:
                time.sleep(POLL_S)  # blocks are being loaded: let their threads run
                continue
            if not first:
                first = time.monotonic()
            if outputs[0].finished:
                break
        after = self._tokens_by_tier()
        return Generated(
            ttft_ms=(first - began) * 1000,
            total_ms=(time.monotonic() - began) * 1000,
            tokens=[int(t) for t in outputs[0].outputs[0].token_ids],
            cached=int(outputs[0].num_cached_tokens or 0),
            tiers={tier: after[tier] - before[tier] for tier in TIERS},
        )

    def idle(self, timeout_s: float) -> bool:
        """Step until no request and no transfer is under way: finished requests still have blocks to store."""
        until = time.monotonic() + timeout_s
        while self._core.scheduler.has_requests():
            if time.monotonic() > until:
                return False
            self._engine.step()
            time.sleep(POLL_S)
        return True

    def stats(self) -> dict[str, Any]:
        """What the pool's plug-in counts in this process; empty without one."""
        plugin: Any = sys.modules.get("kvpool.engines.vllm.tier")
        found = plugin.last_stats() if plugin is not None else []
        return {**found[0], "requests": {}} if found else {}

    def _tokens_by_tier(self) -> dict[str, int]:
        tokens = self.stats().get("tokens", {})
        return {tier: int(tokens.get(tier, 0)) for tier in TIERS}

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()


def serve(channel: Channel, engine: Engine) -> None:
    """Answer questions until Stop, or until the demo is gone."""
    while True:
        request = channel.receive()
        if isinstance(request, Generate):
            channel.send(engine.generate(request))
        elif isinstance(request, Idle):
            well = engine.idle(request.timeout_s)
            channel.send(Done(engine.stats()) if well else Failed("transfers are still under way"))
        elif isinstance(request, Stop):
            stats = engine.stats()
            engine.shutdown()
            channel.send(Done(stats))
            return
        else:
            raise ProtocolError(f"{type(request).__name__} is no question")


def engine_process(start: Start, channel: Channel) -> None:
    """The life of a forked engine, from its log file to its last answer."""
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(start.environment)
    began = time.monotonic()
    try:
        engine = Engine(dict(start.engine))
        # the first request of a process pays for what is set up lazily; far shorter than a block, it stores nothing
        engine.generate(Generate(list(range(3, 19)), 2))
        gc.collect()
        gc.freeze()  # a collection in the middle of a request would be measured as its time
        channel.send(Ready(time.monotonic() - began))
        serve(channel, engine)
    except ConnectionError:
        pass  # the demo is gone, and so is whoever would read an answer
    except Exception as e:
        import traceback

        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send(Failed(f"{start.name}: {type(e).__name__}: {str(e)[:500]} (log: {start.log})"))


def fork_engine(control: Channel, start: Start, descriptor: int) -> int:
    """The pid of a new process that runs one engine."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        engine_process(start, Channel(socket.socket(fileno=descriptor)))
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the parent's may run at this exit


def main(descriptor: int) -> None:
    """Import, say Ready, then fork on demand until the demo is gone."""
    began = time.monotonic()
    control = Channel(socket.socket(fileno=descriptor))
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    gc.collect()
    gc.freeze()
    control.send(Ready(time.monotonic() - began))
    # children are reaped by the kernel; nothing of vLLM's in this process waits for one of its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            request, end = control.receive_with_descriptor()
        except ConnectionError:
            return
        if not isinstance(request, Start) or end is None:
            raise ProtocolError(f"{type(request).__name__} is no Start with a descriptor")
        control.send(Started(fork_engine(control, request, end)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
