"""Runs all preflight checks of a node in bounded time: tiers, index, RDMA and kernel in parallel.

Tiers on one device are measured one after the other. A check that does not end in time is a finding of its own; its
thread is left behind, because a thread that hangs in the kernel cannot be cancelled.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_sidecar.preflight.drive import check_drive, device_of
from kvpool_sidecar.preflight.finding import Report, failed, fine, warned
from kvpool_sidecar.preflight.index import check_index
from kvpool_sidecar.preflight.kernel import check_kernel
from kvpool_sidecar.preflight.rdma import check_rdma
from kvpool_sidecar.preflight.shared import check_directory, check_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvpool.config import LocalTier, PoolConfig
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["MAX_S", "Check", "PreflightSettings", "checks", "run"]

log = logging.getLogger(__name__)

MAX_S = 10.0
"""Time limit of all checks; without problems they take about 2 s per device."""

Check = tuple[str, "Callable[[], Iterable[Finding]]"]


@dataclass(frozen=True)
class PreflightSettings:
    """Configuration and credentials of the checks."""

    config: PoolConfig
    node: str
    index_passwords: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False)
    """Returns the valid passwords, newest first (kvpool_sidecar.index.credentials)."""
    index_files: Mapping[str, str] = field(default_factory=dict)
    object_secret_dir: str = ""


def checks(settings: PreflightSettings, *, measure: bool = True) -> list[Check]:
    """Return name and function of each check; they run in parallel. An index without a URL is not checked."""
    config = settings.config
    devices = defaultdict(list)
    # the pod of a preflight run has no such volume; that of a sidecar, which runs the checks as well, has it
    later = [t.name for t in config.local if t.is_ephemeral and not os.path.isdir(t.path)]
    for tier in (t for t in config.local if t.name not in later):
        devices[device_of(tier.path) or tier.path].append(tier)
    selected: list[Check] = [("Kernel", check_kernel), ("Rdma", functools.partial(check_rdma, config.peer))]
    selected += [("Drive", functools.partial(_drives, settings, tiers, measure)) for tiers in devices.values()]
    if later:
        selected.append(("Volume", functools.partial(_volumes, later)))
    if config.shared is not None:
        selected.append(
            ("SharedDirectory", functools.partial(check_directory, config.shared, config.uid, measure=measure))
        )
    if config.fsspec is not None:
        objects = functools.partial(check_objects, config.fsspec, config.uid, settings.object_secret_dir)
        selected.append(("ObjectStore", objects))
    if config.index.url:
        index = functools.partial(check_index, config.index, settings.index_passwords, settings.index_files)
        selected.append(("Index", index))
    return selected


def run(
    settings: PreflightSettings, *, measure: bool = True, selected: list[Check] | None = None, max_s: float = MAX_S
) -> Report:
    """Run all checks, or only `selected`. Problems are findings, never exceptions."""
    started = time.monotonic()
    running: list[tuple[str, list[Finding], threading.Thread]] = []
    for name, work in checks(settings, measure=measure) if selected is None else selected:
        findings: list[Finding] = []
        thread = threading.Thread(target=_collect, args=(name, work, findings), name=f"check {name}", daemon=True)
        thread.start()
        running.append((name, findings, thread))
    collected: list[Finding] = []
    for name, findings, thread in running:
        thread.join(max(0.0, started + max_s - time.monotonic()))
        collected += list(findings)
        if thread.is_alive():
            collected.append(
                failed(name, f"no result within {max_s:.0f} s", "check for a mount, drive or server that hangs")
            )
    return Report(settings.node, time.monotonic() - started, tuple(collected))


def _collect(name: str, work: Callable[[], Iterable[Finding]], findings: list[Finding]) -> None:
    try:
        findings.extend(work())
    except Exception as e:  # an error of the check itself is a finding
        log.exception("preflight check %s failed", name)
        findings.append(failed(name, f"the check itself failed: {type(e).__name__}", "see the log of this pod"))


def _volumes(tiers: list[str]) -> Iterable[Finding]:
    for tier in tiers:
        yield fine("Volume", "not checked: the volume is created with the sidecar's pod", tier=tier)


def _drives(settings: PreflightSettings, tiers: list[LocalTier], measure: bool) -> Iterable[Finding]:
    if len(tiers) > 1:
        yield warned(
            "SameDevice",
            f"tiers {', '.join(t.name for t in tiers)} are on one device: they share its bandwidth and its space",
            "mount a drive for each, or make them one tier",
            tier=tiers[0].name,
        )
    for tier in tiers:
        yield from check_drive(
            tier,
            settings.config.uid,
            expected_mb_s=settings.config.deadlines.load_expected_mb_s,
            max_block_bytes=settings.config.cache.max_block_bytes,
            measure=measure,
        )
