"""The pool as a secondary tier of vLLM's native KV offloading.

vLLM copies blocks between its device and a pinned region of host memory; `PoolTier` moves them between that region and
the pool, without a copy in Python. One offloaded chunk of vLLM is one block of the pool. Engine configuration:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
      "cpu_bytes_to_use": 34359738368, "block_size": 256, "offload_prompt_only": false,
      "secondary_tiers": [{"type": "PoolTier", "module_path": "kvpool.engines.vllm"}]}}'

Further keys of the `secondary_tiers` entry are fields of kvpool.config.ClientConfig (`socket`, `deadlines` ...) and win
over the environment. Without a sidecar, or after any error, vLLM computes as if there were no pool.

The interface is vLLM's `SecondaryTierManager` (vllm/v1/kv_offload/tiering/base.py), which is documented as
unstable: see kvpool.engines.tested_versions. The code that needs no vLLM is in the other modules of this package and in
kvpool.engines.common.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.engines.common.jobs import TransferJobs, TransferResult
from kvpool.engines.common.lookups import LookupTable
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.tested_versions import described, is_tested_release
from kvpool.engines.vllm.cache_salt import record_salts, salt_of
from kvpool.engines.vllm.engine_blocks import engine_blocks
from kvpool.engines.vllm.pool_lookups import PoolLookups
from kvpool.engines.vllm.prefill_meter import PrefillMeter
from kvpool.engines.vllm.request_params import is_promised, traceparent_of
from kvpool.engines.vllm.request_tokens import RequestTokens
from kvpool.protocol import keys

try:
    import vllm
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        RequestOffloadingContext,
        get_offload_block_hash,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    from kvpool.engines.vllm.counters import Counters, counter_definitions
    from kvpool.engines.vllm.engine_setup import connect, engine_inputs
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.vllm needs the tiered KV offloading of vLLM {described('vllm')}, which cannot be "
        f"imported here ({e}); run the engine without the PoolTier in its --kv-transfer-config"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool.client import Client
    from kvpool.protocol.block import EngineBlock

__all__ = ["PoolTier", "last_stats"]

_log = logging.getLogger("vllm.kvpool")  # under vLLM's own logger, so that the engine's log shows it

_MAX_EVENTS = 4096  # not yet taken by vLLM, which takes them at every step
_SHUTDOWN_S = 2.0


class PoolTier(SecondaryTierManager):  # type: ignore[misc]
    """Secondary tier, created by vLLM in its scheduler's process. No method blocks or raises into the engine."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._memory = primary_kv_view.cast("B")
        self._slot_bytes = self._block_size_bytes
        self._config = client_config(settings)
        self._lock = threading.Lock()
        self._inflight: dict[int, tuple[str, list[bytes]]] = {}  # job -> request, offload keys
        self._counters = Counters()
        self._failed: list[Any] = []
        self._events: list[Any] | None = [] if offloading_spec.config.enable_kv_cache_events else None
        self._tokens_of_groups = [n * offloading_spec.blocks_per_chunk for n in offloading_spec.tokens_per_block]
        self._tokens = RequestTokens(self._tokens_of_groups)
        self._client: Client | None = None
        self._jobs = TransferJobs(max(1, self._config.connections - 2), self._config.max_inflight_stores)
        self._prefill = PrefillMeter(lambda: self._client, self._tokens_of_groups)
        self._lookups = LookupTable(PoolLookups(lambda: self._client, _block_ids, self._tokens_of_groups))
        self._inputs: dict[str, Any] = {}
        self._no_salts = ""  # why the salts of stores are unknown, until it was logged
        if _is_supported():
            self._no_salts = record_salts()
            try:
                trust = self._config.trust_lora_names
                self._inputs = engine_inputs(offloading_spec, self._slot_bytes, trust_lora_names=trust)
                self._client = self._connect(self._inputs)
            except Exception:
                _log.exception("kvpool: the setup failed; this engine runs without the pool")
                report_without_pool("the setup failed; see the engine's log", "vllm")
        _tiers.add(self)

    # -- vLLM's interface -------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Return no options: vLLM offers new blocks as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT, MISS, or RETRY while the lookup is pending, at most until its deadline."""
        client = self._client
        if client is None or not client.reachable or is_promised(req_context):
            return LookupResult.MISS
        try:
            is_present = self._lookups.lookup(key, req_context.req_id)
        except Exception:
            _log.exception("kvpool: lookup failed")
            return LookupResult.MISS
        if is_present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_present else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Load blocks into slots of the pinned region, in the background."""
        self._submit(job_metadata, list(job_metadata.keys), is_load=True)

    def submit_store(self, job_metadata: Any) -> None:
        """Store slots of the pinned region, in the background."""
        self._prefill.offered(len(job_metadata.keys))
        self._submit(job_metadata, list(job_metadata.keys), is_load=False)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return results since the last call. A block that failed to load is a miss for all current requests."""
        with self._lock:
            results, self._failed = self._failed, []
        return results + [self._result(done) for done in self._jobs.take_finished()]

    def has_pending_work(self) -> bool:
        """Return whether a job is running, so that vLLM keeps polling for results."""
        return self._jobs.pending > 0

    def take_events(self) -> Iterable[Any]:
        """Return blocks stored since the last call, for vLLM's own KV events if enabled."""
        events = self._events
        if not events:
            return ()
        self._events = []
        return events

    def on_request_finished(self, req_context: Any) -> None:
        """Discard the lookup results of a request."""
        self._lookups.finish(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Send the lookups of this step."""
        self._lookups.flush()
        self._prefill.step_ended()

    def drain_jobs(self) -> None:
        """Finish all jobs and stop sharing blocks: vLLM resets its cache, for instance after a change of weights.

        vLLM gives no reason. After a change of weights the same tokens give other bytes, so from now on this engine
        uses a namespace of its own: it may miss, but is never wrong. A restart ends this.
        """
        self._jobs.drain()
        old, self._client = self._client, None
        if old is None:
            return
        old.close()
        _log.warning("kvpool: the engine's cache was reset; it shares no blocks with other engines until it restarts")
        self._inputs = {**self._inputs, "reset": os.urandom(16).hex()}
        self._client = self._connect(self._inputs)

    def shutdown(self) -> None:
        """Wait at most two seconds for running stores, then release everything."""
        self._lookups.close()
        self._jobs.drain(_SHUTDOWN_S)
        if self._client is not None:
            self._client.close()
        self._jobs.close()
        with contextlib.suppress(BufferError):
            self._memory.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Define the counters that vLLM exports at /metrics."""
        return counter_definitions()

    def get_stats(self) -> Any:
        """Return the growth of the counters since the last call, None if there is none."""
        if self._client is None:
            return None
        return self._counters.grown(self._tokens.totals(), self._client.stats())

    # -- internals ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return tokens by tier, in total and for the last requests, and the client's counters, for display."""
        client = self._client
        return {
            "connected": client is not None and client.connected,
            "fingerprint": client.fingerprint.hex() if client is not None else "",
            "fingerprint_inputs": self._inputs,
            "tokens": self._tokens.totals(),
            "requests": self._tokens.by_request(),
            "late_lookups": self._lookups.deadline_misses,
            "dropped_stores": self._jobs.dropped,
            "client": client.stats() if client is not None else {},
        }

    def _connect(self, inputs: dict[str, Any]) -> Client:
        return connect(self._config, inputs, str(self._offloading_spec.config.model.name), self._tokens_of_groups)

    def _submit(self, job: Any, offload_keys: list[bytes], *, is_load: bool) -> None:
        client = self._client
        if client is None:
            self._refuse(job, offload_keys, is_load=is_load)
            return
        try:
            n = self._slot_bytes
            slots = [self._memory[int(c) * n : (int(c) + 1) * n] for c in job.chunk_ids]
            with self._lock:
                self._inflight[job.job_id] = (job.req_context.req_id, offload_keys)
            block_ids = _block_ids(client.fingerprint, offload_keys)
            if is_load:
                self._jobs.submit_load(job.job_id, client, block_ids, slots, traceparent_of(job.req_context))
                return
            identities: Sequence[EngineBlock | None] = ()
            if client.wants_engine_blocks:
                identities = engine_blocks(offload_keys, job.req_context, self._tokens_of_groups)
            salts = self._salts_of(job, len(offload_keys)) if client.wants_salts else ()
            self._jobs.submit_store(job.job_id, client, block_ids, slots, identities, salts)
        except Exception:
            _log.exception("kvpool: a job could not be started; its blocks count as misses")
            self._refuse(job, offload_keys, is_load=is_load)

    def _salts_of(self, job: Any, count: int) -> Sequence[str | None]:
        """Return one salt per block: a job belongs to one request, and a request has one salt."""
        why, self._no_salts = self._no_salts, ""
        if why:
            _log.warning("kvpool: blocks are stored without their salts; a purge by salt will not find them: %s", why)
        return [salt_of(job.req_context)] * count

    def _refuse(self, job: Any, offload_keys: list[bytes], *, is_load: bool) -> None:
        if is_load:
            self._lookups.mark_miss(offload_keys)
        with self._lock:
            self._inflight.pop(job.job_id, None)
            self._failed.append(JobResult(job_id=job.job_id, success=False))

    def _result(self, done: TransferResult) -> Any:
        all_ok = all(done.ok)
        with self._lock:
            request, offload_keys = self._inflight.pop(done.job)
        succeeded = [key for key, ok in zip(offload_keys, done.ok, strict=True) if ok]
        if not done.is_load:
            self._record_stored(succeeded)
            return JobResult(done.job, all_ok, transfer_time=done.seconds, transfer_bytes=done.bytes)
        if not all_ok:
            self._lookups.mark_miss([key for key, ok in zip(offload_keys, done.ok, strict=True) if not ok])
        grown = self._tokens.add(request, offload_keys, done.ok, done.tiers)
        if self._client is not None and grown:
            self._client.count_tokens(grown)
        return JobResult(
            done.job,
            all_ok,
            successful_keys=None if all_ok else tuple(succeeded) or None,
            transfer_time=done.seconds,
            transfer_bytes=done.bytes,
        )

    def _record_stored(self, offload_keys: list[bytes]) -> None:
        # subscribers of the engine's events learn where blocks went; evictions are published by the pool's sidecars
        if self._events is not None and offload_keys and len(self._events) < _MAX_EVENTS:
            where = self.locality or Locality.REMOTE
            self._events.append(OffloadingEvent(keys=offload_keys, medium=self.medium, removed=False, locality=where))


def _is_supported() -> bool:
    if is_tested_release("vllm", tuple(getattr(vllm, "__version_tuple__", ())[:2])):
        return True
    known = described("vllm")
    _log.error(
        "kvpool: vLLM %s is supported, this is %s: the engine runs without the pool. Use a KVPool release that "
        "supports this vLLM.",
        known,
        vllm.__version__,
    )
    report_without_pool(f"vLLM {known} is supported, this is {vllm.__version__}", "vllm")
    return False


def _block_ids(fingerprint: bytes, offload_keys: Sequence[bytes]) -> list[bytes]:
    # a vLLM offload key is the block's hash followed by the number of its cache group
    return [
        keys.block_id(fingerprint, engine_hash := get_offload_block_hash(key), key[len(engine_hash) :])
        for key in offload_keys
    ]


_tiers: weakref.WeakSet[PoolTier] = weakref.WeakSet()


def last_stats() -> list[dict[str, Any]]:
    """Return `PoolTier.stats()` of every tier in this process (if vLLM runs in one process: the engine's)."""
    return [tier.stats() for tier in _tiers]
