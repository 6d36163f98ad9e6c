"""Where an operation stands, and what is next. Pure.

What the nodes said is kept by step and node. Nothing else is remembered: an operator that starts anew asks the nodes
again, by the same ids, and they tell what they have done already.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_operator.api.operation import (
    MAX_FAILURES,
    NodeFailure,
    OperationNodes,
    OperationResults,
    OperationStatus,
    Phase,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool_operator.operations.steps import Step
    from kvpool_operator.sidecars.operation import OperationProgress, SidecarAddress

__all__ = ["NodeResult", "OperationState"]

_CANCELLED = "cancelled"
_ACCUMULATES = "purge"
"""The kind of order of which a second run counts only what the first one left."""
_MAX_FAILED_NODES = 3
"""Nodes that may fail at what one does for all, before that has failed."""
_MAX_UNANSWERED = 5
"""Times in a row that a node must be silent for another one to be asked in its place."""


@dataclass(frozen=True)
class NodeResult:
    """The latest of a node on a step: how it stands, or why it could not be asked (`problem`), for good or not."""

    progress: OperationProgress | None = None
    problem: str = ""
    is_final: bool = False
    unanswered: int = 0
    """Times in a row that it could not be asked."""
    earlier: Mapping[str, int] = field(default_factory=dict)
    """What was counted before its sidecar restarted and began this step anew."""

    @property
    def is_done(self) -> bool:
        return self.progress is not None and self.progress.state == "Succeeded"

    @property
    def failure(self) -> str:
        """Why this node will not be done; empty while it may be.

        One that says that it was cancelled was ended by its sidecar's end: it is asked again when that is back.
        """
        if self.is_final:
            return self.problem
        if self.progress is None or self.progress.state != "Failed" or self.progress.message == _CANCELLED:
            return ""
        return self.progress.message or "failed"


@dataclass
class OperationState:
    """Of one operation: `steps`, and what was said so far."""

    steps: tuple[Step, ...]
    said: dict[tuple[int, str], NodeResult] = field(default_factory=dict)
    assigned_node: dict[int, str] = field(default_factory=dict)
    """Of steps for one node: which."""
    note: str = ""
    """What a reader of the end's message should know besides."""

    def step(self, nodes: Sequence[str]) -> int:
        """Number of the step that is under way; the number of steps when all have ended."""
        for number in range(len(self.steps)):
            if not nodes or any(not self._has_ended(number, node) for node in self.target_nodes(number, nodes)):
                return number
        return len(self.steps)

    def target_nodes(self, number: int, nodes: Sequence[str]) -> list[str]:
        """Nodes that a step is for. Those that failed before are left alone."""
        if self.steps[number].node:
            return [self.steps[number].node]
        if self.steps[number].everywhere:
            return [node for node in nodes if not self._failed_before(number, node)]
        done = [node for node in nodes if self._is_done_with(number, node)]
        if done:
            return done[:1]
        able = [node for node in nodes if not self._failed_before(number, node)]
        failed = [node for node in able if self.said.get((number, node), NodeResult()).failure]
        if len(failed) >= _MAX_FAILED_NODES or failed == able:
            return failed
        able = [node for node in able if node not in failed]
        assigned_node = self.assigned_node.get(number)
        if assigned_node not in able or self._is_silent(number, assigned_node):
            after = [node for node in able if assigned_node is None or node > assigned_node]
            assigned_node = next(iter(after or able), None)
        if assigned_node is None:
            return []
        self.assigned_node[number] = assigned_node
        return [assigned_node]

    def requests(self, targets: Iterable[SidecarAddress]) -> list[tuple[int, SidecarAddress]]:
        """What to ask now: of the step under way, those that have not ended and can be asked."""
        by_node = {t.node: t for t in targets}
        nodes = sorted(by_node)
        number = self.step(nodes)
        if number == len(self.steps):
            return []
        waiting = [node for node in self.target_nodes(number, nodes) if not self._has_ended(number, node)]
        return [(number, by_node[node]) for node in waiting if node in by_node and by_node[node].address]

    def failures(self, nodes: Sequence[str], *, late: bool) -> dict[str, str]:
        """Nodes that are not done and will not be, and why; when it is `late`, also those that only were not yet."""
        found: dict[str, str] = {}
        for (number, node), said in sorted(self.said.items()):
            if said.failure and not self._was_done_by_another(number):
                found.setdefault(node, f"{self.steps[number].what}: {said.failure}")
        number = self.step(nodes)
        if late and number < len(self.steps):
            for node in self.target_nodes(number, nodes):
                if not self._has_ended(number, node):
                    found.setdefault(node, f"{self.steps[number].what}: {self._why_not(number, node)}")
        return found

    def results(self) -> OperationResults:
        """All that was counted."""
        tiers: dict[str, Counter[str]] = {"local": Counter(), "shared": Counter()}
        for (number, _), said in self.said.items():
            if self.steps[number].kind == _ACCUMULATES:
                tiers[self.steps[number].tier].update(said.earlier)
            if said.progress is not None:
                tiers[self.steps[number].tier].update(said.progress.counts)
        return OperationResults(
            local=dict(sorted(tiers["local"].items())), shared=dict(sorted(tiers["shared"].items()))
        )

    def status(self, nodes: Sequence[str], *, late: bool) -> OperationStatus:
        """Without times and conditions."""
        nodes = sorted({step.node for step in self.steps if step.node}) or nodes
        number = self.step(nodes)
        failures = self.failures(nodes, late=late)
        done = [node for node in nodes if node not in failures and self._is_done(node)]
        told = [NodeFailure(node=node[:253], message=why[:600]) for node, why in sorted(failures.items())]
        ended = late or number == len(self.steps)
        phase: Phase = "Running" if not ended else ("Failed" if failures or not nodes else "Succeeded")
        return OperationStatus(
            phase=phase,
            message=self._message(phase, number, nodes, failures),
            nodes=OperationNodes(
                total=len(nodes), done=len(done), failed=len(failures), summary=f"{len(done)}/{len(nodes)}"
            ),
            results=self.results(),
            failures=told[:MAX_FAILURES],
        )

    def _message(self, phase: str, number: int, nodes: Sequence[str], failures: Mapping[str, str]) -> str:
        if phase == "Succeeded":
            return f"done on every node{self.note}"[:1024]
        if phase == "Failed":
            some = ", ".join(sorted(failures)[:8]) or "no node was there"
            return f"not done on {len(failures)} of {len(nodes)} nodes: {some}"[:1024]
        if not nodes:
            return "the pool has no sidecar yet"
        far = self._how_far(number, nodes)
        waiting = {node: why for node in self.target_nodes(number, nodes) if (why := self._unanswered(number, node))}
        told = f"; waiting for {', '.join(sorted(waiting)[:8])}: {next(iter(waiting.values()))}" if waiting else ""
        return f"{self.steps[number].what} (step {number + 1} of {len(self.steps)}){far}{told}"[:1024]

    def _how_far(self, number: int, nodes: Sequence[str]) -> str:
        """All nodes together, as far as they tell."""
        told = [
            s.progress for n in self.target_nodes(number, nodes) if (s := self.said.get((number, n))) and s.progress
        ]
        done, total = sum(p.done for p in told), sum(p.total for p in told)
        return f", {done} of {total} {told[0].unit}" if total else ""

    def _unanswered(self, number: int, node: str) -> str:
        said = self.said.get((number, node))
        return said.problem if said is not None and not said.is_final else ""

    def _has_ended(self, number: int, node: str) -> bool:
        said = self.said.get((number, node))
        return said is not None and (said.is_done or bool(said.failure))

    def _is_silent(self, number: int, node: str) -> bool:
        said = self.said.get((number, node))
        return said is not None and said.unanswered >= _MAX_UNANSWERED

    def _failed_before(self, number: int, node: str) -> bool:
        """What one node does for all says nothing of a node: its mount may be its only trouble."""
        wide = (n for n in range(number) if self.steps[n].everywhere and (n, node) in self.said)
        return any(self.said[n, node].failure for n in wide)

    def _was_done_by_another(self, number: int) -> bool:
        return not self.steps[number].everywhere and any(
            said.is_done for (n, _), said in self.said.items() if n == number
        )

    def _is_done(self, node: str) -> bool:
        wide = (n for n, step in enumerate(self.steps) if step.everywhere or step.node == node)
        return all(self._is_done_with(n, node) for n in wide)

    def _is_done_with(self, number: int, node: str) -> bool:
        return (number, node) in self.said and self.said[number, node].is_done

    def _why_not(self, number: int, node: str) -> str:
        said = self.said.get((number, node))
        if said is None:
            return "its sidecar has no address"
        if said.progress is None:
            return f"does not answer: {said.problem}"
        progress = said.progress
        return f"at {progress.done} of {progress.total or '?'} {progress.unit}".rstrip() + " when the time was over"
