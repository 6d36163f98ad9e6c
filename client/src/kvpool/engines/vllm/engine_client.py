"""The client of a vLLM engine and its namespace, which changes with the engine's weights. Needs vLLM."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.tested_versions import is_tested
from kvpool.engines.vllm import interface, weight_changes
from kvpool.engines.vllm.engine_setup import connect, engine_inputs, prompt_inputs
from kvpool.engines.vllm.fingerprint import find_engine_config, loading_blocker
from kvpool.engines.vllm.self_test import BackgroundSelfTest, region_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.client import Client
    from kvpool.config import ClientConfig

__all__ = ["EngineClient"]

_log = logging.getLogger("vllm.kvpool")


class EngineClient:
    """None of the methods raises. `client` may be read by any thread; the rest is for the engine's thread.

    Without a client the engine runs without the pool, and one sentence was reported.
    """

    def __init__(self, config: ClientConfig, tokens_of_groups: Sequence[int]) -> None:
        self._config = config
        self._tokens_of_groups = tokens_of_groups
        self._model = ""
        self._self_test = BackgroundSelfTest(None, _off, is_needed=True)
        self.client: Client | None = None
        self.inputs: dict[str, Any] = {}
        self._prompt: dict[str, str] = {}
        self.has_foreign_workers = False

    @property
    def is_ready(self) -> bool:
        """Whether the client may be asked: it is connected, and the self-test is over."""
        client = self.client
        return client is not None and client.reachable and self._self_test.is_passed

    def set_up(self, spec: Any, region: memoryview, slot_bytes: int) -> None:
        """Connect in the background, unless something is against it. Call it from the constructor of a tier."""
        try:
            import vllm

            version = str(vllm.__version__)
            problem = (
                interface.strict_problem(version)
                or interface.interface_problem()
                or region_problem(region, slot_bytes)
                or loading_blocker(find_engine_config())
            )
            if problem:
                _off(problem)
                return
            self._model = str(spec.config.model.name)
            self.inputs = engine_inputs(spec, slot_bytes, trust_lora_names=self._config.trust_lora_names)
            self.has_foreign_workers = weight_changes.has_foreign_workers(find_engine_config())
            self._prompt = prompt_inputs()
            self.client = connect(self._config, self.inputs, self._model, self._tokens_of_groups, self._prompt)
            self._self_test = BackgroundSelfTest(self.client, self._fail, is_needed=not is_tested("vllm", version))
        except Exception as e:
            _log.exception("kvpool: the setup failed")
            self._fail(f"the setup failed: {type(e).__name__}: {e}")

    def renew(self, reason: str) -> None:
        """Leave the namespace for one of this engine alone, until it restarts."""
        old, self.client = self.client, None
        if old is None:
            return
        old.close()
        _log.warning("kvpool: this engine shares no blocks with other engines until it restarts: %s", reason)
        self.inputs = {**self.inputs, "reset": os.urandom(16).hex()}
        try:
            self.client = connect(self._config, self.inputs, self._model, self._tokens_of_groups, self._prompt)
        except Exception as e:
            _off(f"the namespace could not be renewed: {type(e).__name__}: {e}")

    def close(self) -> None:
        """Stop the self-test and close the client."""
        self._self_test.close()
        if self.client is not None:
            self.client.close()

    def _fail(self, problem: str) -> None:
        old, self.client = self.client, None
        if old is not None:
            old.close()
        _off(problem)


def _off(problem: str) -> None:
    _log.error("kvpool: the engine runs without the pool: %s", problem)
    report_without_pool(problem, "vllm")
