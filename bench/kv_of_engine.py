"""A real engine that stores the KV of some texts through the pool. bench.compression runs it with the engine's Python.

python kv_of_engine.py MODEL CONNECTOR_JSON TEXT_FILE KV_DTYPE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

PROMPT_TOKENS, PROMPTS = 2048, 4
FIRST_BYTE_TOKEN = 3  # the model has a token for each byte


def store(model: str, connector: str, text: Path, kv_dtype: str) -> None:
    import json

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096, max_num_seqs=4, seed=0,
        dtype="bfloat16", block_size=32, kv_cache_memory_bytes=512 << 20, kv_cache_dtype=kv_dtype,
        kv_transfer_config=json.loads(connector),
    )  # fmt: skip
    tokens = [byte + FIRST_BYTE_TOKEN for byte in text.read_bytes()]
    for n in range(PROMPTS):
        prompt = tokens[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS]
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    core = engine.llm_engine.engine_core.engine_core
    until = time.monotonic() + 60
    while core.scheduler.has_requests() and time.monotonic() < until:
        engine.llm_engine.step()
        time.sleep(0.001)
    print("stored")


if __name__ == "__main__":
    store(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
