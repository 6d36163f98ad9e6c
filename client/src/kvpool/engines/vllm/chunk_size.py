"""Chunks of the pool for models whose cache blocks do not divide the configured size. Needs no vLLM to be imported.

vLLM raises in its scheduler if `block_size` of the connector is not a multiple of the cache groups' block size, or if
the groups' sizes differ, as with hybrid models. That is known once the model is loaded; then a chunk is one block.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from kvpool.engines.vllm.connector_config import offloading_extra

__all__ = ["accept_any_block_size"]

_log = logging.getLogger("vllm.kvpool")
_MARK = "_kvpool_accepts_any_block_size"


def accept_any_block_size() -> None:
    """Wrap the factory of connectors, so that the configuration's builder is wrapped before the first one is made.

    Raises ImportError or AttributeError if this vLLM has none.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original = KVConnectorFactory.create_connector
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def create_connector(config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            transfer = getattr(config, "kv_transfer_config", None)
            if transfer is not None and offloading_extra(vars(transfer)):
                _wrap_builder()
        except Exception as e:
            _log.debug("kvpool: the size of chunks stays as configured: %s: %s", type(e).__name__, e)
        return original(config, *args, **kwargs)

    setattr(create_connector, _MARK, True)
    KVConnectorFactory.create_connector = staticmethod(create_connector)


def _wrap_builder() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector

    original = offloading_connector.build_offloading_config
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def build(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(vllm_config, *args, **kwargs)
        except (AssertionError, ValueError) as e:
            transfer = vllm_config.kv_transfer_config
            extra = transfer.kv_connector_extra_config
            if "block_size" not in extra or not offloading_extra(vars(transfer)):
                raise
            _log.warning("kvpool: a chunk of the pool is one cache block of this model: %s", e)
            rest = {key: value for key, value in extra.items() if key != "block_size"}
            transfer.kv_connector_extra_config = {**rest, "blocks_per_chunk": 1}
            return original(vllm_config, *args, **kwargs)

    setattr(build, _MARK, True)
    offloading_connector.build_offloading_config = build
