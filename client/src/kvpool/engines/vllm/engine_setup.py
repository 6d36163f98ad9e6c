"""Client of a vLLM engine: its fingerprint and its labels. Needs vLLM."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from kvpool.client import Client
from kvpool.engines.common.prompt_files import prompt_digests
from kvpool.engines.tested_versions import is_tested
from kvpool.engines.vllm.fingerprint import find_engine_config, fingerprint_inputs, sharing_blocker
from kvpool.engines.vllm.hash_probe import hash_probe
from kvpool.engines.vllm.pool_lookups import tokens_per_block
from kvpool.protocol import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.config import ClientConfig

__all__ = ["connect", "engine_inputs", "prompt_inputs"]

_log = logging.getLogger("vllm.kvpool")


def engine_inputs(spec: Any, slot_bytes: int, *, trust_lora_names: bool) -> dict[str, Any]:
    """Return the fingerprint inputs of this engine; a random one if it must not share its blocks.

    `spec`: the OffloadingSpec under construction. Call it from the constructor of a tier.
    """
    import vllm
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    engine = find_engine_config()
    inputs = fingerprint_inputs(
        spec.config,
        slot_bytes,
        vllm.__version__,
        engine,
        device,
        platform=current_platform,
        canonical_format=_canonical_format(spec.config),
    )
    if probe := hash_probe(str(inputs["hash_algorithm"])):
        inputs["hash_probe"] = probe
    blocker = sharing_blocker(engine, trust_lora_names=trust_lora_names)
    if blocker:
        _log.warning("kvpool: this engine shares blocks with no other engine: %s", blocker)
        inputs["private"] = os.urandom(16).hex()
    return inputs


def _canonical_format(config: Any) -> str:
    """Return vLLM's name of the format of canonical blocks, "" without them."""
    if not getattr(config, "canonical_layout", False):
        return ""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

        return str(canonical_format_id(config.kv_cache_layout))
    except Exception:
        _log.warning("kvpool: vLLM does not name the format of its canonical blocks; other sizes share none of them")
        return ""


def prompt_inputs() -> dict[str, str]:
    """Return digests of the engine's tokenizer and chat template. Call it from the constructor of a tier.

    The scheduler does not know `--chat-template`, which is an argument of the API server.
    """
    model = getattr(find_engine_config(), "model_config", None)
    tokenizer = str(getattr(model, "tokenizer", None) or getattr(model, "model", None) or "")
    return prompt_digests(tokenizer, getattr(model, "tokenizer_revision", None))


def connect(
    config: ClientConfig,
    inputs: dict[str, Any],
    model_name: str,
    tokens_of_groups: Sequence[int],
    prompt: dict[str, str] | None = None,
) -> Client:
    """Return a client for the fingerprint of `inputs`. It connects in the background.

    `prompt`: what the pool's status compares besides, of `prompt_inputs`.
    """
    import vllm

    fingerprint = keys.fingerprint(inputs)
    model = os.path.basename(model_name.rstrip("/"))
    _log.info("kvpool: model %s, fingerprint %s, socket %s", model, fingerprint.hex()[:16], config.socket)
    _log.debug("kvpool: fingerprint inputs %s", inputs)
    tested = is_tested("vllm", vllm.__version__)
    labels = {"engine": f"vllm {vllm.__version__}", "model": model, "tested": tested}
    return Client(
        config,
        fingerprint=fingerprint,
        labels=labels,
        fingerprint_inputs={**inputs, "prompt": prompt} if prompt else inputs,
        tokens_per_block=tokens_per_block(tokens_of_groups),
    )
