"""One client connection: handshake, dispatch of requests, lookups and reports. A protocol violation closes it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import wire
from kvpool.protocol.hint import Hint
from kvpool.stats import depth_label
from kvpool_sidecar.resilience.turn import end_turn
from kvpool_sidecar.serving.channel import PacketChannel
from kvpool_sidecar.serving.lookup_figures import LookupCounts
from kvpool_sidecar.serving.messages import MIN_DEADLINE_S, decode_report, decode_used, split_deadline
from kvpool_sidecar.serving.peer_streams import PeerStreams
from kvpool_sidecar.serving.reads import ReadHandler
from kvpool_sidecar.serving.request_queue import RequestTurn
from kvpool_sidecar.serving.writes import WriteHandler

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from kvpool.config import PoolConfig
    from kvpool_sidecar.peers.connection import PeerDialer
    from kvpool_sidecar.replication.session_hints import SessionHints
    from kvpool_sidecar.resilience.fair_queue import FairQueues
    from kvpool_sidecar.serving.block_service import BlockService
    from kvpool_sidecar.serving.block_tables import BlockTables
    from kvpool_sidecar.serving.fingerprints import Fingerprints
    from kvpool_sidecar.serving.lookup_figures import LookupFigures
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.serving.store_service import StoreService
    from kvpool_sidecar.serving.stream_exchange import StreamExchange
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["Session", "SessionContext"]

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 3.0


class _VersionError(ProtocolError):
    """The client uses another protocol version."""


@dataclass(frozen=True)
class SessionContext:
    """Parts of the process that every session uses."""

    node: str
    service: BlockService
    stores: StoreService
    dial: PeerDialer
    fingerprints: Fingerprints
    queues: FairQueues
    lookups: LookupFigures
    streams: StreamExchange
    hints: SessionHints
    tables: BlockTables


class Session:
    """Serves one client connection in a thread of its own. Tokens and peer streams end with the session."""

    def __init__(self, sock: socket.socket, pod: Pod, context: SessionContext) -> None:
        self._pod = pod
        self._context = context
        self._service = context.service
        self._readable: tuple[Tenant, ...] = (pod.tenant,)  # the pod's own tenant first
        self._channel = PacketChannel(sock, context.service.stats)
        opener = context.service.opener
        self._streams = PeerStreams(pod, context.dial, opener.fetcher, opener.resolver)
        self._reads = ReadHandler(self._channel, pod, context.service, self._streams, context.queues.reads)
        self._writes = WriteHandler(self._channel, pod, context.stores, context.queues.writes)
        self._turn = RequestTurn(context.queues.requests, pod.tenant.tag)
        self._rejections: dict[int, Callable[[wire.Head, memoryview], None]] = {
            wire.Op.LOOKUP: lambda head, _: self._channel.reply(head, bytes(head.items), count=head.items),
            wire.Op.OPEN: lambda head, _: self._reads.reject(head),
            wire.Op.BEGIN: lambda head, _: self._writes.reject(head),
        }
        self._began = 0.0  # arrival of the current request (time.monotonic())
        self._hello: wire.ClientHello | None = None
        self._has_found = False  # a block of this fingerprint
        self._stopped = False

    def run(self) -> None:
        """Serve until the client disconnects, violates the protocol, or `stop` is called."""
        buffer = bytearray(wire.MAX_PACKET + 1)
        try:
            self._channel.open(_HELLO_TIMEOUT_S)
            while True:
                size = self._channel.receive_into(buffer)
                if size == 0 or self._stopped:
                    return
                self._handle(memoryview(buffer)[:size])
                self._channel.clear_timeout()
        except ProtocolError as e:
            self._service.stats.add("refused", "protocol")
            log.warning("pod %s broke the protocol, its connection is closed: %s", self._pod.identity.uid, e)
        except TimeoutError:
            log.info("pod %s connected and sent no request in time", self._pod.identity.uid)
        except OSError as e:
            log.debug("pod %s: %s", self._pod.identity.uid, e)
        finally:
            self._end()

    def stop(self) -> None:
        """End after the current request, from another thread; later requests are not read."""
        self._stopped = True
        self._channel.shutdown_reads()

    def _forget_hello(self) -> None:
        if self._hello is not None:
            self._context.fingerprints.left(self._hello, self._pod.identity.uid)
            self._hello = None

    def _end(self) -> None:
        self._forget_hello()
        self._writes.close()
        self._reads.close()
        self._channel.close()

    def _handle(self, packet: memoryview) -> None:
        started = time.monotonic()
        request = 0
        try:
            head, body = wire.unpack(packet)
            request = head.request
            self._reads.end_grant()
            operation = self._operation(head.op)
            if not self._turn.begin(head, body):
                self._service.stats.add("refused", "busy-requests")
                operation = self._rejections[head.op]
            self._began = started
            operation(head, body)
        except ProtocolError as e:
            code = wire.ErrorCode.VERSION if isinstance(e, _VersionError) else wire.ErrorCode.BAD_REQUEST
            with contextlib.suppress(OSError):
                self._channel.reply_error(request, code, str(e))
            raise
        except KVPoolError as e:
            self._channel.reply_error(request, wire.ErrorCode.INTERNAL, str(e))
            return
        finally:
            end_turn()
        name = wire.Op(head.op).name.lower()
        self._service.stats.add("requests", name)
        self._service.stats.observe("request_seconds", name, time.monotonic() - started)

    def _operation(self, op: int) -> Callable[[wire.Head, memoryview], None]:
        if op == wire.Op.HELLO:
            return self._say_hello
        if self._hello is None:
            raise ProtocolError("HELLO comes first")
        operations: dict[int, Callable[[wire.Head, memoryview], None]] = {
            wire.Op.LOOKUP: self._lookup,
            wire.Op.OPEN: self._open,
            wire.Op.BEGIN: self._writes.begin,
            wire.Op.COMMIT: self._commit,
            wire.Op.REPORT: self._report,
            wire.Op.DONE: self._done,
            wire.Op.HINT: self._hint,
            wire.Op.MAP: self._map,
            wire.Op.USED: self._used,
            wire.Op.LOADED: self._loaded,
        }
        if op not in operations:
            raise ProtocolError(f"unknown operation {op}")
        return operations[op]

    def _say_hello(self, head: wire.Head, body: memoryview) -> None:
        hello = wire.ClientHello.unpack(body)
        if hello.version != wire.PROTOCOL_VERSION:
            raise _VersionError(f"version {hello.version} is not supported; this sidecar uses {wire.PROTOCOL_VERSION}")
        self._forget_hello()
        self._hello = hello
        self._context.fingerprints.entered(hello, self._pod.identity.uid)
        self._streams.exchange = self._context.streams if hello.dials_streams else None
        # a client without support for grants would take other tenants' blocks for corrupt ones
        granted = self._pod.readable if hello.reads_granted else ()
        self._readable = (self._pod.tenant, *granted)
        config = self._service.config.current
        answer = wire.ServerHello(
            tenant_tag=self._pod.tenant.tag,
            max_block_bytes=config.cache.max_block_bytes,
            pool=f"{config.namespace}/{config.pool}",
            node=self._context.node,
            deadlines=asdict(config.deadlines),
            events=config.events.enabled,
            router_blocks=config.events.enabled and config.events.hashes == "Int64",
            prompt_tokens=self._publishes_prompts(config),
            readable_tags=tuple(tenant.tag for tenant in granted),
            salt_key=self._pod.tenant.salt_key if config.salt_tags else b"",
            session_key=self._pod.tenant.session_key if config.hints.enabled else b"",
            block_tables=True,
            load_reports=True,
        )
        self._channel.reply(head, answer.pack())

    def _publishes_prompts(self, config: PoolConfig) -> bool:
        """Return whether the token ids of this pod's blocks are published."""
        tokens_of, identity = config.events.prompt_tokens_of, self._pod.identity
        if not config.events.enabled or not tokens_of:
            return False
        return self._service.config.tenancy.display_name(identity.namespace) == tokens_of

    def _lookup(self, head: wire.Head, body: memoryview) -> None:
        timeout, rest = split_deadline(body)
        block_ids = wire.split_block_ids(rest, head.items, wire.MAX_LOOKUP)
        timeout = max(self._began + timeout - time.monotonic(), MIN_DEADLINE_S)
        exhaustive = bool(head.flags & wire.Flag.EXHAUSTIVE)
        began = time.monotonic()
        located = self._service.locator.locate(self._readable, block_ids, timeout, exhaustive=exhaustive)
        tiers = located.tiers
        found = len(tiers) - tiers.count(wire.Tier.MISS)
        self._service.stats.add("lookup", "asked", len(block_ids))
        self._service.stats.add("lookup", "found", found)
        cause = self._cause_of_miss(block_ids, tiers, (time.monotonic() - began) / timeout)
        self._channel.reply(head, self._with_cause(tiers, cause), count=len(tiers))
        self._count_lookup(len(tiers), found, cause)
        self._service.on_lookup(self._pod.tenant, block_ids, located)

    def _cause_of_miss(self, block_ids: Sequence[bytes], tiers: bytes, used_share: float) -> wire.MissCause:
        """Explain the first missing block; ABSENT if none is missing."""
        hello, first = self._hello, tiers.find(wire.Tier.MISS)
        if first != 0:
            self._record_found()
        if hello is None or first < 0:
            return wire.MissCause.ABSENT
        ungranted = () if hello.reads_granted else self._pod.readable
        return self._service.causes.of_lookup(hello, self._readable, ungranted, block_ids[first], used_share)

    def _record_found(self) -> None:
        if self._hello is not None and not self._has_found:
            self._has_found = True
            self._context.fingerprints.found(self._hello)

    def _with_cause(self, tiers: bytes, cause: wire.MissCause) -> bytes:
        """Return the reply's entries, for a client that accepts causes with that of the first miss."""
        first = tiers.find(wire.Tier.MISS)
        if first < 0 or self._hello is None or not self._hello.lookup_reports:
            return tiers
        return tiers[:first] + bytes([wire.MISS_CAUSE + cause]) + tiers[first + 1 :]

    def _count_lookup(self, asked: int, found: int, cause: wire.MissCause) -> None:
        """Count a lookup of a client that does not report them."""
        if self._hello is None or self._hello.lookup_reports:
            return
        misses = {cause.label: asked - found} if found < asked else {}
        self._record_lookups(LookupCounts(asked, found, misses, 1, int(found == asked)))
        if misses:
            self._service.stats.add("client_lookup_depth", depth_label(found))

    def _record_lookups(self, in_blocks: LookupCounts) -> None:
        if self._hello is not None and in_blocks.requests:
            tokens = self._hello.tokens_per_block or self._service.config.current.cache.block_tokens
            self._context.lookups.record(self._hello.model, in_blocks.in_tokens(tokens), self._pod.tenant.tag)

    def _open(self, head: wire.Head, body: memoryview) -> None:
        self._reads.open(head, body, self._readable, self._began)

    def _commit(self, head: wire.Head, body: memoryview) -> None:
        statuses, stored = self._writes.commit(head, body)
        if stored and self._hello is not None:
            self._context.fingerprints.stored(self._hello, stored, self._pod.tenant.tag)
        self._channel.reply(head, statuses, count=head.items)

    def _done(self, _head: wire.Head, _body: memoryview) -> None:
        """Do nothing: every request ends the read grant."""

    def _hint(self, head: wire.Head, body: memoryview) -> None:
        if (hint := Hint.unpack(body, head.items)) is not None:
            self._context.hints.submit(self._pod.tenant, hint)

    def _map(self, head: wire.Head, _body: memoryview) -> None:
        """Answer with the descriptor of the block table, or without one."""
        descriptor = -1
        if self._hello is not None and self._channel.peer_buffer_empty():
            descriptor = self._context.tables.open_for(self._pod.tenant.tag, self._hello.fingerprint)
        try:
            if descriptor < 0 or not self._channel.reply_with_fds(head, b"", 0, [descriptor]):
                self._channel.reply(head, b"")
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _used(self, head: wire.Head, body: memoryview) -> None:
        """Count a lookup that the client answered from the table, and publish what is still here of it."""
        block_ids, unlisted = decode_used(head, body)
        self._service.stats.add("lookup", "asked", len(block_ids) + unlisted)
        self._service.stats.add("lookup", "found", len(block_ids) + unlisted)
        if block_ids:
            self._record_found()
            self._service.on_local_lookup(self._pod.tenant, block_ids)

    def _loaded(self, head: wire.Head, body: memoryview) -> None:
        """Count blocks that the client read again by descriptors that it had, and record their uses."""
        block_ids, unlisted = decode_used(head, body)
        self._service.opener.record_loaded(self._pod.tenant, block_ids, unlisted)

    def _report(self, head: wire.Head, body: memoryview) -> None:
        report = decode_report(body)
        for family, label, n in report.counts:
            self._service.stats.add(f"client_{family}", label, n)
        for label, packed in report.seconds.items():
            self._service.stats.observe_packed("client_seconds", label, packed)
        self._record_lookups(report.lookups)
        if report.problem:
            self._context.fingerprints.report_problem(self._pod.identity.uid, report.problem)
        self._service.report_corrupt(self._readable, report.corrupt)
        self._channel.reply(head, b"")
