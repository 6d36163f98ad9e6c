"""pytest plug-in: vLLM's tests of its file system tier run with PoolTier in that tier's place.

Loaded with `-p kvpool_upstream` in the engine's Python, for tests of vLLM's source archive that are not changed. It
needs a sidecar: KVPOOL_UPSTREAM_SOCKET, and for tests that look at files KVPOOL_UPSTREAM_BLOCKS (the directory `blocks`
of its drive), KVPOOL_UPSTREAM_SECRET and KVPOOL_UPSTREAM_TENANT. Outcomes go to KVPOOL_UPSTREAM_REPORT, one JSON line
each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import get_offload_block_hash
from vllm.v1.kv_offload.tiering.fs import manager as fs

from kvpool.engines.vllm.tier import PoolTier
from kvpool.protocol import keys

if TYPE_CHECKING:
    import pytest

_CONNECT_S = 20.0


class PoolTierForFiles(PoolTier):
    """PoolTier with the constructor of vLLM's file system tier; each `root_dir` is a namespace of its own.

    It adds what those tests read from the outside: paths of blocks, and whether lookups are pending. Nothing of what
    PoolTier does is replaced.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 1,
        n_write_threads: int = 1,
        enable_kv_events: bool = False,
        **settings: Any,
    ) -> None:
        self._asked: set[tuple[bytes, str]] = set()
        patient = {"deadlines": {"lookup_ms": 5000, "load_min_ms": 20000}}
        socket = os.environ["KVPOOL_UPSTREAM_SOCKET"]
        super().__init__(
            _specification(offloading_spec, root_dir), primary_kv_view, tier_type, socket=socket, **patient, **settings
        )
        self.file_mapper = _Files(self)
        self._lookup_manager = _Pending(self)
        deadline = time.monotonic() + _CONNECT_S
        while not self.stats()["connected"]:
            assert time.monotonic() < deadline, "the sidecar does not answer"
            time.sleep(0.02)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        self._asked.add((key, req_context.req_id))
        return super().lookup(key, req_context)

    def on_request_finished(self, req_context: Any) -> None:
        self._asked = {(key, request) for key, request in self._asked if request != req_context.req_id}
        super().on_request_finished(req_context)


def _specification(given: Any, root_dir: str) -> Any:
    """The tests' stand-in for an OffloadingSpec, with a group, and with a model's name for each directory."""
    model = dataclasses.replace(given.config.model, name=f"{given.config.model.name}-{root_dir}")
    return types.SimpleNamespace(
        config=dataclasses.replace(given.config, model=model),
        blocks_per_chunk=given.blocks_per_chunk,
        tokens_per_block=(16,),
        tokens_per_hash=16,
        kv_events_config=given.kv_events_config,
    )


class _Files:
    """Where a block lies on the drive, in the words of vLLM's FileMapper."""

    def __init__(self, tier: PoolTierForFiles) -> None:
        self._tier = tier

    @property
    def base_path(self) -> str:
        return str(self._tier.stats()["fingerprint"])

    def get_file_name(self, key: bytes) -> str:
        engine_hash = get_offload_block_hash(key)
        block_id = keys.block_id(bytes.fromhex(self.base_path), engine_hash, key[len(engine_hash) :])
        secret = Path(os.environ["KVPOOL_UPSTREAM_SECRET"]).read_text().strip().encode()
        name = keys.block_key(secret, os.environ["KVPOOL_UPSTREAM_TENANT"], block_id).hex()
        return f"{os.environ['KVPOOL_UPSTREAM_BLOCKS']}/{name[:2]}/{name[2:4]}/{name}"


class _Pending:
    """Whether results of lookups have arrived, in the words of vLLM's lookup manager."""

    def __init__(self, tier: PoolTierForFiles) -> None:
        self._tier = tier

    @property
    def _pending_results(self) -> _Pending:
        return self

    @property
    def _lookup_batch(self) -> list[bytes]:
        return [key for verdicts in self._tier._lookups._fresh.values() for key in verdicts]

    def empty(self) -> bool:
        return any(self._tier._lookups.lookup(key, request) is None for key, request in self._tier._asked)


fs.FileSystemTierManager = PoolTierForFiles


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason}
    with Path(os.environ["KVPOOL_UPSTREAM_REPORT"]).open("a") as out:
        out.write(json.dumps(line) + "\n")
