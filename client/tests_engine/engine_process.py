"""A real vLLM engine on the CPU that obeys lines of JSON on its standard input. Run with the engine's own Python.

    python engine_process.py MODEL_DIRECTORY CONNECTOR_JSON      ("" as connector: an engine without any)

Commands: {"prompt": [token, ...], "max_tokens": n, "salt": text}, {"reset": true} (drops the engine's own prefix
cache), {"reset_all": true} (the connector's, too), {"stats": true}, {"metrics": true} (ours at /metrics),
{"quit": true}. Answers are lines that start with `@@`.
"""

from __future__ import annotations

import json
import sys
import time


def say(**answer: object) -> None:
    print("@@" + json.dumps(answer), flush=True)


def main(model: str, connector: str) -> None:
    from vllm import LLM, SamplingParams

    options = {"kv_transfer_config": json.loads(connector)} if connector else {}
    engine = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **options,
    )
    say(ready=True, algo=str(engine.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo))
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("quit"):
            break
        if command.get("reset"):
            say(reset=engine.reset_prefix_cache())
        elif command.get("reset_all"):
            say(reset=engine.reset_prefix_cache(reset_connector=True))
        elif command.get("metrics"):
            from prometheus_client import REGISTRY

            found = [s for m in REGISTRY.collect() if m.name.startswith("kvpool") for s in m.samples]
            say(metrics=[[s.name, s.labels, s.value] for s in found])
        elif command.get("stats"):
            from kvpool.engines.vllm import last_stats

            say(stats=last_stats())
        else:
            prompt = {"prompt_token_ids": command["prompt"]}
            if command.get("salt"):
                prompt["cache_salt"] = command["salt"]
            began = time.monotonic()
            (out,) = engine.generate(
                [prompt],
                SamplingParams(
                    max_tokens=command.get("max_tokens", 8), temperature=0, detokenize=False, ignore_eos=True
                ),
                use_tqdm=False,
            )
            say(
                tokens=list(out.outputs[0].token_ids),
                cached=out.num_cached_tokens or 0,
                seconds=round(time.monotonic() - began, 3),
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
