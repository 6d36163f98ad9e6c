"""Weights of any architecture that make an answer depend on every block, for `load_format` dummy, in an engine.

vLLM's own dummy weights are so small that an answer follows from the last token alone. Here matrices keep the variance
of their input, queries and keys are loud enough for attention to pick single tokens, and embeddings are quiet, as in
en_model.py. A tensor's values follow from its name and shape, so two processes make the same model.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

ATTENTION_GAIN = 2.0
EMBEDDING_SCALE = 0.3
_ATTENTION = ("q_proj", "k_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")


def install() -> None:
    """Make vLLM's loader of dummy weights write these."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda _, model, __: _fill(model)


def _fill(model: Any) -> None:
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        random = torch.Generator().manual_seed(zlib.crc32(f"{name} {tuple(tensor.shape)}".encode()))
        if "norm" in name and name.endswith("weight"):
            tensor.fill_(1.0)
        elif tensor.ndim < 2:
            tensor.copy_(torch.empty(tensor.shape).uniform_(-1e-3, 1e-3, generator=random))
        else:
            width = tensor.shape[-1]
            gain = ATTENTION_GAIN if any(part in name for part in _ATTENTION) or "qkv" in name else 1.0
            gain = EMBEDDING_SCALE * math.sqrt(width) if "embed" in name else gain
            tensor.copy_(torch.empty(tensor.shape).normal_(generator=random) * gain / math.sqrt(width))
