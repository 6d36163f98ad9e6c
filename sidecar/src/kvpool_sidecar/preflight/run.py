"""A whole look at a node, in bounded time: every tier, the index, RDMA and the kernel side by side.

Tiers on one device are measured one after the other. What does not answer in time is a finding of its own: its thread
is left behind, for a thread that is stuck in the kernel cannot be cancelled.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_sidecar.preflight.drive import device_of, look_at_drive
from kvpool_sidecar.preflight.finding import Report, failed, warned
from kvpool_sidecar.preflight.index import look_at_index
from kvpool_sidecar.preflight.kernel import look_at_kernel
from kvpool_sidecar.preflight.rdma import look_at_rdma
from kvpool_sidecar.preflight.shared import look_at_directory, look_at_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvpool.config import LocalTier, PoolConfig
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["MOST_S", "Look", "PreflightSettings", "looks", "run"]

log = logging.getLogger(__name__)

MOST_S = 10.0
"""Longest time of a look; one that finds everything well takes about 2 s for each device."""

Look = tuple[str, "Callable[[], Iterable[Finding]]"]


@dataclass(frozen=True)
class PreflightSettings:
    """What is looked at, and with which credentials."""

    config: PoolConfig
    node: str
    index_passwords: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False)
    """Those that are good now, the newest first (kvpool_sidecar.index.credentials)."""
    index_files: Mapping[str, str] = field(default_factory=dict)
    object_secret_dir: str = ""


def looks(settings: PreflightSettings, *, measure: bool = True) -> list[Look]:
    """Name and work of each look; they run side by side. An index without a URL is not looked at."""
    config = settings.config
    devices = defaultdict(list)
    for tier in config.local:
        devices[device_of(tier.path) or tier.path].append(tier)
    wanted: list[Look] = [("Kernel", look_at_kernel), ("Rdma", functools.partial(look_at_rdma, config.peer))]
    wanted += [("Drive", functools.partial(_drives, settings, tiers, measure)) for tiers in devices.values()]
    if config.shared is not None:
        wanted.append(
            ("SharedDirectory", functools.partial(look_at_directory, config.shared, config.uid, measure=measure))
        )
    if config.fsspec is not None:
        objects = functools.partial(look_at_objects, config.fsspec, config.uid, settings.object_secret_dir)
        wanted.append(("ObjectStore", objects))
    if config.index.url:
        index = functools.partial(look_at_index, config.index, settings.index_passwords, settings.index_files)
        wanted.append(("Index", index))
    return wanted


def run(
    settings: PreflightSettings, *, measure: bool = True, wanted: list[Look] | None = None, most_s: float = MOST_S
) -> Report:
    """Everything of `looks`, or what is `wanted`. Never raises for what it finds."""
    started = time.monotonic()
    found: list[tuple[str, list[Finding], threading.Thread]] = []
    for name, work in looks(settings, measure=measure) if wanted is None else wanted:
        findings: list[Finding] = []
        thread = threading.Thread(target=_collect, args=(name, work, findings), name=f"look {name}", daemon=True)
        thread.start()
        found.append((name, findings, thread))
    told: list[Finding] = []
    for name, findings, thread in found:
        thread.join(max(0.0, started + most_s - time.monotonic()))
        told += list(findings)
        if thread.is_alive():
            told.append(failed(name, f"no answer within {most_s:.0f} s", "look for a hung mount, drive or server"))
    return Report(settings.node, time.monotonic() - started, tuple(told))


def _collect(name: str, work: Callable[[], Iterable[Finding]], findings: list[Finding]) -> None:
    try:
        findings.extend(work())
    except Exception as e:  # a look that fails is a finding, whatever it failed with
        log.exception("looking at %s", name)
        findings.append(failed(name, f"the look itself failed: {type(e).__name__}", "see the log of this pod"))


def _drives(settings: PreflightSettings, tiers: list[LocalTier], measure: bool) -> Iterable[Finding]:
    if len(tiers) > 1:
        yield warned(
            "SameDevice",
            f"tiers {', '.join(t.name for t in tiers)} are on one device: they share its speed and its room",
            "mount a drive for each, or make them one tier",
            tier=tiers[0].name,
        )
    for tier in tiers:
        yield from look_at_drive(
            tier,
            settings.config.uid,
            expected_mb_s=settings.config.deadlines.load_expected_mb_s,
            max_block_bytes=settings.config.cache.max_block_bytes,
            measure=measure,
        )
