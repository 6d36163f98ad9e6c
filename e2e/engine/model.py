"""Makes the small model that the demo and the cluster tests run: a Llama with random weights and byte-level tokens.

    python model.py DIR        (with the engine's environment on PYTHONPATH)

Nothing is downloaded. The same parameters give the same files; DIR/made-from says what it was made from, and a
directory that was made from this is left alone.

The weights are scaled so that the model is a good witness. In a stack whose every matrix keeps the variance of its
input, queries and keys that are `ATTENTION_GAIN` times louder make attention pick single tokens, and quiet embeddings
let what was attended to outweigh the last token. So one changed token, 3,000 tokens back, changes the answer within its
first ten tokens, and greedy answers do not run into a short loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from pathlib import Path

SEED = 20_261_120
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 1024, 2816, 16, 8, 64
MAX_POSITION = 16_384
ATTENTION_GAIN = 2.0
EMBEDDING_SCALE = 0.3
SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY = len(SPECIAL) + 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
MARK = "made-from"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def digest() -> str:
    """What the model is made from: its parameters and this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE shows for each byte 0-255 (the scheme GPT-2 introduced)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(directory: Path) -> None:
    """One token per byte: token id = byte + 3, so whoever drives the engine needs no tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    vocabulary = {symbol: i for i, symbol in enumerate([*SPECIAL, *byte_symbols()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    sample = "Where is a block? Überall: 块\n"
    if fast.encode(sample) != [b + len(SPECIAL) for b in sample.encode()]:
        raise RuntimeError("the tokenizer is not one token per byte")
    fast.save_pretrained(directory)


def write_weights(directory: Path) -> None:
    """bfloat16 safetensors of about 190 MB."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        scale = gain / math.sqrt(columns)
        return (torch.empty(rows, columns).normal_(generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, EMBEDDING_SCALE * math.sqrt(HIDDEN)),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones.clone(),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": ones.clone(),
            layer + "post_attention_layernorm.weight": ones.clone(),
            layer + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, ATTENTION_GAIN),
            layer + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, ATTENTION_GAIN),
            layer + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # pods of another user read it


def main(target: Path) -> None:
    mark = target / MARK
    if mark.exists() and mark.read_text() == digest():
        return
    making = target.with_name(f"{target.name}.making-{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    (making / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    write_tokenizer(making)
    write_weights(making)
    (making / MARK).write_text(digest())
    shutil.rmtree(target, ignore_errors=True)
    making.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
