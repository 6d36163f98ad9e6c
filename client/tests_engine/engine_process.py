"""A real vLLM engine on the CPU that obeys lines of JSON on its standard input. Run with the engine's own Python.

    python engine_process.py MODEL_DIRECTORY CONNECTOR_JSON [OPTIONS_JSON]     ("" as connector: an engine without any)

"" as model: no engine yet; {"open": {"model": ..., "connector": ..., "options": {...}}} makes one in place of the last,
with the dummy weights of loud_weights.py.

OPTIONS_JSON are arguments of vllm.LLM. Commands: {"prompt": [token, ...], "max_tokens": n, "salt": text, "seed": n,
"logprobs": n, "adapter": path, "transfer": the request's kv_transfer_params} (without a seed greedy, with one sampled),
{"batch": [such prompts]} (all at once), {"reset": true} (drops the engine's own prefix cache), {"reset_all": true} (the
connector's, too), {"pause": true} (pauses as sleep does before it frees memory, and resumes), {"rpc": method} (calls
the workers), {"stats": true}, {"metrics": prefix} (counters whose names begin so), {"quit": true}. Answers are lines
that start with `@@`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def say(**answer: object) -> None:
    print("@@" + json.dumps(answer), flush=True)


def make(model: str, connector: str, options: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig

    options = dict(options)
    if connector:
        options["kv_transfer_config"] = json.loads(connector)
    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "dtype": "float32",  # another split of a prompt rounds to the same token
        "seed": 0,
        "max_num_seqs": 4,
        "block_size": 32,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    return LLM(model=model, **{**defaults, **options})


def close(engine: Any) -> None:
    """End an engine, so that another can be made in this process. The caller drops its reference first."""
    import gc

    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from kvpool.engines.vllm import tier

    engine.llm_engine.engine_core.shutdown()
    del engine
    tier._tiers.clear()  # those of the engine that ended
    gc.collect()
    cleanup_dist_env_and_memory()


def main(model: str, connector: str, options: dict[str, Any]) -> None:
    seeded_sampling_in_pieces()
    if model:
        engine = make(model, connector, options)
        say(ready=True, algo=str(engine.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo))
    else:
        import loud_weights

        loud_weights.install()
        engine = None
        say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("quit"):
            break
        if command.get("open"):
            if engine is not None:
                old, engine = engine, None
                close(old)
                del old
            try:
                engine = make(**command["open"])
                say(opened=True)
            except Exception as e:
                say(opened=False, error=f"{type(e).__name__}: {e}"[-2000:])
            continue
        if command.get("reset"):
            say(reset=engine.reset_prefix_cache())
        elif command.get("reset_all"):
            say(reset=engine.reset_prefix_cache(reset_connector=True))
        elif command.get("pause"):
            core = engine.llm_engine.engine_core.engine_core
            core.pause_scheduler(mode="abort", clear_cache=True)
            core.resume_scheduler()
            say(paused=True)
        elif command.get("rpc"):
            say(results=len(engine.collective_rpc(command["rpc"])))
        elif command.get("metrics"):
            from prometheus_client import REGISTRY

            found = [s for m in REGISTRY.collect() if m.name.startswith(command["metrics"]) for s in m.samples]
            say(metrics=[[s.name, s.labels, s.value] for s in found])
        elif command.get("stats"):
            from kvpool.engines.vllm.tier import last_stats

            say(stats=last_stats())
        else:
            began = time.monotonic()
            answers = generate(engine, command.get("batch", [command]))
            seconds = round(time.monotonic() - began, 3)
            if "batch" in command:
                say(batch=answers, seconds=seconds)
            else:
                say(**answers[0], seconds=seconds)


def seeded_sampling_in_pieces() -> None:
    """What a GPU's generator can and the CPU's cannot: take back the draw for a prompt that is not whole yet.

    vLLM draws a token after each piece of a prompt and winds the request's generator back by one draw.
    """
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    if torch.cuda.is_available():
        return

    class Generator(torch.Generator):  # type: ignore[misc]
        before: Any = None

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            assert offset == -4, "one draw back, as vLLM 0.32 does"
            self.set_state(self.before)

    draw = topk_topp_sampler.TopKTopPSampler.forward_cpu

    def remembering(self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> Any:
        for generator in generators.values():
            generator.before = generator.get_state()
        return draw(self, logits, generators, k, p)

    torch.Generator = Generator
    topk_topp_sampler.TopKTopPSampler.forward_cpu = remembering


def generate(engine: Any, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts, parameters, adapters = [], [], []
    for one in wanted:
        prompts.append({"prompt_token_ids": one["prompt"], **({"cache_salt": one["salt"]} if one.get("salt") else {})})
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": one["seed"]} if "seed" in one else {"temperature": 0}
        if "transfer" in one:
            sampled["extra_args"] = {"kv_transfer_params": one["transfer"]}
        parameters.append(
            SamplingParams(
                max_tokens=one.get("max_tokens", 8),
                detokenize=False,
                ignore_eos=True,
                logprobs=one.get("logprobs"),
                **sampled,
            )
        )
        adapters.append(LoRARequest("adapter", 1, one["adapter"]) if "adapter" in one else None)
    more = {"lora_request": adapters} if any(adapters) else {}
    out = engine.generate(prompts, parameters, use_tqdm=False, **more)
    return [
        {
            "tokens": list(o.outputs[0].token_ids),
            "cached": o.num_cached_tokens or 0,
            "logprob": o.outputs[0].cumulative_logprob,
            "transfer": o.kv_transfer_params,
        }
        for o in out
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
