"""Client of one storage backend of SGLang: connected, renewed when the engine's bytes change, and tested."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from kvpool.client import Client
from kvpool.engines.common.self_test import SelfTest, is_trusted
from kvpool.engines.tested_versions import is_tested
from kvpool.protocol import keys as protocol_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.config import ClientConfig
    from kvpool.engines.sglang import server

__all__ = ["PoolConnection"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it


class PoolConnection:
    """Holds the client, or None while there is none. Thread-safe.

    `sample`: memory of the engine whose bytes the self-test stores.
    """

    def __init__(
        self, settings: ClientConfig, resets: server.ResetDetector, version: str, sample: Callable[[], memoryview]
    ) -> None:
        self._settings = settings
        self._resets = resets
        self._version = version
        self._self_test = SelfTest(sample)
        self._lock = threading.Lock()
        self._closed = False
        self._model = ""
        self._page_size = 1
        self.client: Client | None = None
        self.inputs: dict[str, Any] = {}
        self._prompt: dict[str, str] = {}

    def connect(self, inputs: dict[str, Any], model: str, page_size: int, prompt: dict[str, str] | None = None) -> None:
        """Connect with these fingerprint inputs, instead of an earlier connection.

        `prompt`: digests of tokenizer and chat template, which the pool's status compares besides.
        """
        self.inputs, self._page_size, self._prompt = inputs, page_size, prompt or {}
        self._model = os.path.basename(model.rstrip("/"))
        fingerprint = protocol_keys.fingerprint(inputs)
        _log.info(
            "kvpool: model %s, fingerprint %s, socket %s", self._model, fingerprint.hex()[:16], self._settings.socket
        )
        _log.debug("kvpool: fingerprint inputs %s", inputs)
        old, self.client = self.client, None
        if old is not None:
            old.close()
        tested = is_tested("sglang", self._version)
        labels = {"engine": f"sglang {self._version}", "model": self._model, "tested": tested}
        self.client = Client(
            self._settings,
            fingerprint=fingerprint,
            labels=labels,
            fingerprint_inputs={**inputs, "prompt": self._prompt} if self._prompt else inputs,
            tokens_per_block=page_size,
        )

    def current(self) -> Client | None:
        """Return the client, renewed if SGLang flushed its cache or changed its weights since the last call."""
        if self._resets.change():
            with self._lock:
                if reason := self._resets.change():
                    self._resets.rearm()
                    self._renew(reason)
        return self.client

    def verified(self) -> Client | None:
        """Return the client for lookups; None where an SGLang that is not tested has not passed the self-test."""
        client = self.current()
        if client is None or is_trusted(self._self_test, client, "sglang", self._version):
            return client
        return None

    def renew(self, reason: str) -> None:
        """Continue in a namespace of this engine alone."""
        with self._lock:
            self._renew(reason)

    def close(self) -> None:
        """Disconnect; there is no client from now on. Safe to call twice."""
        with self._lock:
            self._closed = True
            client, self.client = self.client, None
        if client is not None:
            client.close()

    def _renew(self, reason: str) -> None:
        old, self.client = self.client, None
        if old is None or self._closed:
            return
        old.close()
        _log.warning("kvpool: %s; it shares no pages with other engines until it restarts", reason)
        self.connect({**self.inputs, "reset": os.urandom(16).hex()}, self._model, self._page_size, self._prompt)
