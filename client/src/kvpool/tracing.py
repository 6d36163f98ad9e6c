"""OpenTelemetry spans of the client's calls: kvpool.lookup, kvpool.load with one child by tier, kvpool.store.

Off unless the environment variable KVPOOL_TRACING is `true`; while off, no package is imported and a call costs one
comparison. Spans go to the engine's tracer provider if it has set one, else by OTLP to the endpoint of the standard
variables OTEL_EXPORTER_OTLP_*. Their parent is the current span, or the `traceparent` given to `parent`. Attributes are
counts and reasons: no prompt, key, tenant or address. Thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpool.results import LoadResult, StoreResult
    from kvpool.transport.pending import PendingRead

__all__ = ["TRACING_ENV", "configure", "end_load", "end_lookup", "end_store", "is_on", "parent", "start"]

TRACING_ENV = "KVPOOL_TRACING"
_log = logging.getLogger("kvpool")
_MAX_TRACEPARENT = 128
_lock = threading.Lock()
_configured = False
_tracer: Any = None  # None: off


def configure(environment: Mapping[str, str] = os.environ) -> bool:
    """Turn spans on if the environment asks for them; once in a process. Never raises. Return whether they are on."""
    global _configured, _tracer
    with _lock:
        if not _configured:
            _configured = True
            if environment.get(TRACING_ENV, "").lower() == "true":
                _tracer = _make_tracer()
    return _tracer is not None


def is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


@contextlib.contextmanager
def parent(traceparent: object) -> Iterator[None]:
    """Make the spans of this block children of a W3C `traceparent`; anything else is ignored."""
    token = None
    if _tracer is not None and isinstance(traceparent, str) and len(traceparent) <= _MAX_TRACEPARENT:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


def start(name: str, blocks: int) -> Any:
    """Return a new span, or None while spans are off."""
    return None if _tracer is None else _tracer.start_span(name, attributes={"kvpool.blocks": blocks})


def end_lookup(span: Any, found: int, reason: str) -> None:
    """End the span of a lookup."""
    span.set_attribute("kvpool.found_blocks", found)
    if reason:
        span.set_attribute("kvpool.reason", reason)
    span.end()


def end_load(span: Any, results: Sequence[LoadResult], loads: Sequence[PendingRead], began: float) -> None:
    """End the span of a load, with a child for each tier that delivered a block. `began`: time.monotonic()."""
    context = _child_context(span)
    done: dict[str, float] = {}
    for load in loads:
        if load.ok:
            name = load.tier.name.lower()
            done[name] = max(done.get(name, 0.0), load.done)
    to_wall_ns = time.time_ns() - time.monotonic_ns()
    for tier, at in done.items():
        mine = [result for result in results if result.ok and result.tier.name.lower() == tier]
        attributes = {
            "kvpool.tier": tier,
            "kvpool.blocks": len(mine),
            "kvpool.bytes": sum(result.bytes for result in mine),
        }
        begin_ns = int(began * 1e9) + to_wall_ns
        child = _tracer.start_span("kvpool.load.tier", context=context, attributes=attributes, start_time=begin_ns)
        child.end(int(at * 1e9) + to_wall_ns)
    _end_with_reasons(span, [str(result.reason) for result in results if not result.ok])


def end_store(span: Any, results: Sequence[StoreResult]) -> None:
    """End the span of a store."""
    span.set_attribute("kvpool.stored_blocks", sum(result.stored for result in results))
    span.set_attribute("kvpool.bytes", sum(result.bytes for result in results))
    _end_with_reasons(span, [str(result.reason) for result in results if not result.ok])


def _end_with_reasons(span: Any, reasons: Sequence[str]) -> None:
    for reason, count in Counter(reasons).items():
        span.set_attribute(f"kvpool.misses.{reason}", count)
    span.end()


def _child_context(span: Any) -> Any:
    from opentelemetry import trace

    return trace.set_span_in_context(span)


def _make_tracer() -> Any:
    """Return a tracer of the engine's provider, or of one that exports by OTLP; None if the packages are missing."""
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider = _otlp_provider()
        return provider.get_tracer("kvpool")
    except Exception as e:
        _log.warning("kvpool: %s is set, but no spans are recorded: %s", TRACING_ENV, e)
        return None


def _otlp_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "kvpool-client")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
