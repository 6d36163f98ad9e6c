"""The pool as a secondary tier of vLLM's native KV offloading.

vLLM copies blocks between its device and a pinned region of host memory; `PoolTier` moves them between that region and
the pool, without a copy in Python. One offloaded chunk of vLLM is one block of the pool. Engine configuration:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
      "cpu_bytes_to_use": 34359738368, "block_size": 256, "offload_prompt_only": false,
      "secondary_tiers": [{"type": "PoolTier", "module_path": "kvpool.engines.vllm"}]}}'

Further keys of the `secondary_tiers` entry are fields of kvpool.config.ClientConfig (`socket`, `deadlines` ...) and win
over the environment; `discard_after_reset`: true treats every reset of vLLM's connector as a change of weights. Without
a sidecar, or after any error, vLLM computes as if there were no pool.

The interface is vLLM's `SecondaryTierManager` (vllm/v1/kv_offload/tiering/base.py), which is documented as
unstable: see kvpool.engines.vllm.interface. The code that needs no vLLM is in the other modules of this package and in
kvpool.engines.common.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.engines.common.jobs import TransferJobs, TransferResult
from kvpool.engines.common.lookups import LookupTable
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.tested_versions import described
from kvpool.engines.vllm import weight_changes
from kvpool.engines.vllm.cache_salt import record_salts, salt_of
from kvpool.engines.vllm.engine_blocks import BlockLayout, engine_blocks
from kvpool.engines.vllm.hints import SessionHintSender
from kvpool.engines.vllm.pool_lookups import PoolLookups
from kvpool.engines.vllm.prefill_meter import PrefillMeter
from kvpool.engines.vllm.recorded_request import record_requests
from kvpool.engines.vllm.request_params import is_promised, traceparent_of
from kvpool.engines.vllm.request_tokens import RequestTokens
from kvpool.protocol import keys

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        RequestOffloadingContext,
        get_offload_block_hash,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    from kvpool.engines.vllm.counters import Counters, counter_definitions
    from kvpool.engines.vllm.engine_client import EngineClient
    from kvpool.engines.vllm.stored_events import StoredEvents
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.vllm needs the tiered KV offloading of vLLM {described('vllm')}, which cannot be "
        f"imported here ({e}); run the engine without the PoolTier in its --kv-transfer-config"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpool.client import Client
    from kvpool.protocol.block import EngineBlock

__all__ = ["PoolTier", "last_stats"]

_log = logging.getLogger("vllm.kvpool")  # under vLLM's own logger, so that the engine's log shows it

_SHUTDOWN_S = 2.0
_WAITING_SHARE = 4  # part of the host memory that waiting stores may hold: a long prompt is computed in a few steps
# since vLLM 0.31
_TAKES_DETECTOR = "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters
_REPORTS_BYTES = "transfer_bytes" in getattr(JobResult, "__dataclass_fields__", {})


def _guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return `otherwise()` instead of raising into the engine; the first error of a method is logged."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        failures = 0

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal failures
            try:
                return method(*args, **kwargs)
            except Exception:
                failures += 1
                _log.log(
                    logging.ERROR if failures == 1 else logging.DEBUG, "kvpool: %s", method.__name__, exc_info=True
                )
                return otherwise()

        return call

    return decorate


class PoolTier(SecondaryTierManager):  # type: ignore[misc]
    """Secondary tier, created by vLLM in its scheduler's process. No method raises into the engine.

    None blocks but `drain_jobs` and `shutdown`. vLLM 0.33 calls `get_finished_jobs` from a thread of its own, too.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    tolerates_off_thread_polling: ClassVar[bool] = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        self._lock = threading.Lock()
        self._failed: list[Any] = []
        self._inflight: dict[int, tuple[str, list[bytes]]] = {}  # job -> request, offload keys
        self._is_built = False
        try:
            detector = (backpressure_detector,) if _TAKES_DETECTOR else ()
            super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
            self._build(offloading_spec, primary_kv_view, locality, settings)
            self._is_built = True
        except Exception as e:
            _log.exception("kvpool: the tier could not be built; the engine runs without the pool")
            report_without_pool(f"the tier could not be built: {type(e).__name__}: {e}", "vllm")
            self._offloading_spec, self._primary_kv_view, self.tier_type = offloading_spec, primary_kv_view, tier_type
            self._block_size_bytes, self._bp_detector, self.locality = 0, backpressure_detector, None

    def _build(self, spec: Any, region: memoryview, locality: str | None, settings: dict[str, Any]) -> None:
        self.locality = Locality(locality) if locality in {known.value for known in Locality} else None
        self._memory = region.cast("B")
        self._slot_bytes = int((region.strides or (0,))[0])
        discards = settings.pop("discard_after_reset", False) is True
        self._config = client_config(settings)
        enabled = bool(spec.config.enable_kv_cache_events)
        self._events = StoredEvents(self.medium, self.locality, is_enabled=enabled)
        self._counters = Counters()
        self._layout = BlockLayout.of(spec)
        self._tokens_of_groups = self._layout.chunk_tokens
        self._tokens = RequestTokens(self._tokens_of_groups)
        self._engine = EngineClient(self._config, self._tokens_of_groups)
        waiting = max(self._config.max_inflight_stores, len(self._memory) // max(1, self._slot_bytes) // _WAITING_SHARE)
        self._jobs = TransferJobs(max(1, self._config.connections - 2), waiting)
        self._prefill = PrefillMeter(lambda: self._client, self._tokens_of_groups)
        self._lookups = LookupTable(PoolLookups(lambda: self._client, _block_ids, self._tokens_of_groups))
        self._hints = SessionHintSender(lambda: self._client, _block_ids, self._jobs)
        record_requests()
        self._no_salts = record_salts()  # why the salts of stores are unknown, until it was logged
        self._is_stale = False  # the weights may have changed since the last reset
        self._engine.set_up(spec, region, self._slot_bytes)
        unwatched = weight_changes.watch(self)
        if unwatched:
            _log.warning("kvpool: changes of weights are unknown, so every reset counts as one: %s", unwatched)
        foreign = self._engine.has_foreign_workers
        self._always_renews = bool(unwatched) or foreign or discards
        _tiers.add(self)

    # -- vLLM's interface -------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Return no options: vLLM offers new blocks as they are computed."""
        if self._is_built:
            self._hints.request_started(req_context)
        return RequestOffloadingContext()

    @_guarded(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT, MISS, or RETRY while the lookup is pending, at most until its deadline."""
        if not self._is_built or not self._engine.is_ready or is_promised(req_context):
            return LookupResult.MISS
        is_present = self._lookups.lookup(key, req_context.req_id)
        if is_present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_present else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Load blocks into slots of the pinned region, in the background."""
        self._submit(job_metadata, is_load=True)

    def submit_store(self, job_metadata: Any) -> None:
        """Store slots of the pinned region, in the background."""
        self._submit(job_metadata, is_load=False)

    @_guarded(tuple)
    def get_finished_jobs(self) -> Iterable[Any]:
        """Return results since the last call. A block that failed to load is a miss for all current requests."""
        with self._lock:
            results, self._failed = self._failed, []
        finished = self._jobs.take_finished() if self._is_built else []
        return results + [self._result(done) for done in finished]

    @_guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Return whether a job is running or its result was not taken, so that vLLM keeps polling for results."""
        return self._jobs.pending > 0 or bool(self._failed)

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return blocks stored since the last call, for vLLM's own KV events if enabled."""
        return self._events.take()

    @_guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Discard the lookup results of a request, and send what it says of its session."""
        self._lookups.finish(req_context.req_id)
        self._hints.request_finished(req_context)

    @_guarded(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Send the lookups of this step."""
        self._lookups.flush()
        self._prefill.step_ended()

    @_guarded(lambda: None)
    def drain_jobs(self) -> None:
        """Finish all jobs. The blocks stay shared, unless the engine's weights may have changed.

        vLLM calls it whenever it resets its caches and gives no reason: see kvpool.engines.vllm.weight_changes.
        """
        self._jobs.drain()
        if self._is_stale or self._always_renews:
            self._is_stale = False
            self._engine.renew("its cache was reset")

    @_guarded(lambda: None)
    def weights_may_change(self, reason: str) -> None:
        """Finish all jobs and leave the namespace. Called by vLLM's engine before it changes its weights."""
        self._jobs.drain()
        self._is_stale = True  # what is in the host tier is still of the old weights
        self._engine.renew(reason)

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        """Wait at most two seconds for running stores, then release everything."""
        self._lookups.close()
        self._jobs.drain(_SHUTDOWN_S)
        self._engine.close()
        self._jobs.close()
        with contextlib.suppress(BufferError):
            self._memory.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Define the counters that vLLM exports at /metrics."""
        return counter_definitions()

    @_guarded(lambda: None)
    def get_stats(self) -> Any:
        """Return the growth of the counters since the last call, None if there is none."""
        client = self._client
        return None if client is None else self._counters.grown(self._tokens.totals(), client.stats())

    # -- internals ----------------------------------------------------------------------------------------------

    @property
    def _client(self) -> Client | None:
        return self._engine.client if self._is_built else None

    def stats(self) -> dict[str, Any]:
        """Return tokens by tier, in total and for the last requests, and the client's counters, for display."""
        client = self._client
        return {
            "connected": client is not None and client.connected,
            "fingerprint": client.fingerprint.hex() if client is not None else "",
            "fingerprint_inputs": self._engine.inputs,
            "tokens": self._tokens.totals(),
            "requests": self._tokens.by_request(),
            "late_lookups": self._lookups.deadline_misses,
            "dropped_stores": self._jobs.dropped,
            "client": client.stats() if client is not None else {},
        }

    def _submit(self, job: Any, *, is_load: bool) -> None:
        offload_keys: list[bytes] = []
        try:
            offload_keys = list(job.keys)
            client = self._client
            if client is None:
                self._refuse(job.job_id, offload_keys, is_load=is_load)
                return
            if not is_load:
                self._prefill.offered(len(offload_keys))
            slots = [self._slot(int(number)) for number in job.chunk_ids]
            with self._lock:
                self._inflight[job.job_id] = (job.req_context.req_id, offload_keys)
            block_ids = _block_ids(client.fingerprint, offload_keys)
            if is_load:
                self._jobs.submit_load(job.job_id, client, block_ids, slots, traceparent_of(job.req_context))
                return
            identities: Sequence[EngineBlock | None] = ()
            if client.wants_engine_blocks:
                with_tokens = client.wants_prompt_tokens
                identities = engine_blocks(offload_keys, job.req_context, self._layout, with_tokens=with_tokens)
            salts = self._salts_of(job, len(offload_keys)) if client.wants_salts else ()
            self._jobs.submit_store(job.job_id, client, block_ids, slots, identities, salts)
        except Exception:
            _log.exception("kvpool: a job could not be started; its blocks count as misses")
            self._refuse(job.job_id, offload_keys, is_load=is_load)

    def _slot(self, number: int) -> memoryview:
        start = number * self._slot_bytes
        if number < 0 or start + self._slot_bytes > len(self._memory):
            raise ValueError(f"chunk {number} is outside of the host tier")
        return self._memory[start : start + self._slot_bytes]

    def _salts_of(self, job: Any, count: int) -> Sequence[str | None]:
        """Return one salt per block: a job belongs to one request, and a request has one salt."""
        why, self._no_salts = self._no_salts, ""
        if why:
            _log.warning("kvpool: blocks are stored without their salts; a purge by salt will not find them: %s", why)
        return [salt_of(job.req_context)] * count

    def _refuse(self, job: int, offload_keys: list[bytes], *, is_load: bool) -> None:
        if is_load and self._is_built:
            self._lookups.mark_miss(offload_keys)
        with self._lock:
            self._inflight.pop(job, None)
            self._failed.append(JobResult(job_id=job, success=False))

    def _result(self, done: TransferResult) -> Any:
        """Return the result of a job. A job that cannot be accounted for has failed: vLLM waits for every result."""
        try:
            return self._settled(done)
        except Exception:
            _log.exception("kvpool: the result of a job is unknown; it counts as failed")
            return JobResult(job_id=done.job, success=False)

    def _settled(self, done: TransferResult) -> Any:
        all_ok = all(done.ok)
        with self._lock:
            request, offload_keys = self._inflight.pop(done.job)
        measured = {"transfer_time": done.seconds, **({"transfer_bytes": done.bytes} if _REPORTS_BYTES else {})}
        succeeded = [key for key, ok in zip(offload_keys, done.ok, strict=True) if ok]
        if not done.is_load:
            self._events.add(succeeded)
            return JobResult(job_id=done.job, success=all_ok, **measured)
        if not all_ok:
            self._lookups.mark_miss([key for key, ok in zip(offload_keys, done.ok, strict=True) if not ok])
        grown = self._tokens.add(request, offload_keys, done.ok, done.tiers)
        client = self._client
        if client is not None and grown:
            client.count_tokens(grown)
        loaded = None if all_ok else tuple(succeeded) or None
        return JobResult(job_id=done.job, success=all_ok, successful_keys=loaded, **measured)


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
