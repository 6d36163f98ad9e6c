"""Progress of an operation over its steps and nodes, and the next requests. Pure.

The results are kept in memory only, by step and node. A restarted operator sends the same requests, with the same ids,
and the sidecars report what they have done already.
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
"""Kind of step of which a repeated run counts only what the first run left over."""
_MAX_FAILED_NODES = 3
"""Nodes that may fail a step that one node does for all, before the step has failed."""
_MAX_UNANSWERED = 5
"""Unanswered requests in a row after which another node is assigned."""


@dataclass(frozen=True)
class NodeResult:
    """Latest result of a node for a step: its progress, or why the request failed (`problem`)."""

    progress: OperationProgress | None = None
    problem: str = ""
    is_final: bool = False
    """The request failed permanently."""
    unanswered: int = 0
    """Requests in a row without an answer."""
    earlier: Mapping[str, int] = field(default_factory=dict)
    """Counts from before its sidecar restarted and began this step again."""

    @property
    def is_done(self) -> bool:
        return self.progress is not None and self.progress.state == "Succeeded"

    @property
    def failure(self) -> str:
        """Why this node will not finish the step; empty while it may.

        A result "cancelled" means that the sidecar shut down: the request is repeated when it is back.
        """
        if self.is_final:
            return self.problem
        if self.progress is None or self.progress.state != "Failed" or self.progress.message == _CANCELLED:
            return ""
        return self.progress.message or "failed"


@dataclass
class OperationState:
    """Steps of one operation, and the results so far."""

    steps: tuple[Step, ...]
    node_results: dict[tuple[int, str], NodeResult] = field(default_factory=dict)
    assigned_node: dict[int, str] = field(default_factory=dict)
    """Steps that one node does for all: which node does them."""
    caveat: str = ""
    """Restriction to add to the message of a successful end."""

    def current_step(self, nodes: Sequence[str]) -> int:
        """Index of the current step; the number of steps when all have ended."""
        for number in range(len(self.steps)):
            if not nodes or any(not self._has_ended(number, node) for node in self.target_nodes(number, nodes)):
                return number
        return len(self.steps)

    def target_nodes(self, number: int, nodes: Sequence[str]) -> list[str]:
        """Nodes that run a step. Nodes that failed an earlier step are left out."""
        if self.steps[number].node:
            return [self.steps[number].node]
        if self.steps[number].everywhere:
            return [node for node in nodes if not self._failed_before(number, node)]
        done = [node for node in nodes if self._finished_step(number, node)]
        if done:
            return done[:1]
        candidates = [node for node in nodes if not self._failed_before(number, node)]
        failed = [node for node in candidates if self.node_results.get((number, node), NodeResult()).failure]
        if len(failed) >= _MAX_FAILED_NODES or failed == candidates:
            return failed
        candidates = [node for node in candidates if node not in failed]
        assigned_node = self.assigned_node.get(number)
        if assigned_node not in candidates or self._is_unresponsive(number, assigned_node):
            after = [node for node in candidates if assigned_node is None or node > assigned_node]
            assigned_node = next(iter(after or candidates), None)
        if assigned_node is None:
            return []
        self.assigned_node[number] = assigned_node
        return [assigned_node]

    def requests(self, targets: Iterable[SidecarAddress]) -> list[tuple[int, SidecarAddress]]:
        """Requests to send now: the current step, for each reachable node that has not ended it."""
        by_node = {t.node: t for t in targets}
        nodes = sorted(by_node)
        number = self.current_step(nodes)
        if number == len(self.steps):
            return []
        waiting = [node for node in self.target_nodes(number, nodes) if not self._has_ended(number, node)]
        return [(number, by_node[node]) for node in waiting if node in by_node and by_node[node].address]

    def failures(self, nodes: Sequence[str], *, timed_out: bool) -> dict[str, str]:
        """Nodes that will not finish, and why; after the timeout also nodes that have not finished."""
        failures: dict[str, str] = {}
        for (number, node), result in sorted(self.node_results.items()):
            if result.failure and not self._was_finished_by_another(number):
                failures.setdefault(node, f"{self.steps[number].what}: {result.failure}")
        number = self.current_step(nodes)
        if timed_out and number < len(self.steps):
            for node in self.target_nodes(number, nodes):
                if not self._has_ended(number, node):
                    failures.setdefault(node, f"{self.steps[number].what}: {self._why_unfinished(number, node)}")
        return failures

    def results(self) -> OperationResults:
        """Counts of all nodes, by tier."""
        tiers: dict[str, Counter[str]] = {"local": Counter(), "shared": Counter()}
        for (number, _), result in self.node_results.items():
            if self.steps[number].kind == _ACCUMULATES:
                tiers[self.steps[number].tier].update(result.earlier)
            if result.progress is not None:
                tiers[self.steps[number].tier].update(result.progress.counts)
        return OperationResults(
            local=dict(sorted(tiers["local"].items())), shared=dict(sorted(tiers["shared"].items()))
        )

    def status(self, nodes: Sequence[str], *, timed_out: bool) -> OperationStatus:
        """The status without times and conditions."""
        nodes = sorted({step.node for step in self.steps if step.node}) or nodes
        number = self.current_step(nodes)
        failures = self.failures(nodes, timed_out=timed_out)
        done = [node for node in nodes if node not in failures and self._finished_all(node)]
        shown = [NodeFailure(node=node[:253], message=why[:600]) for node, why in sorted(failures.items())]
        ended = timed_out or number == len(self.steps)
        phase: Phase = "Running" if not ended else ("Failed" if failures or not nodes else "Succeeded")
        return OperationStatus(
            phase=phase,
            message=self._message(phase, number, nodes, failures),
            nodes=OperationNodes(
                total=len(nodes), done=len(done), failed=len(failures), summary=f"{len(done)}/{len(nodes)}"
            ),
            results=self.results(),
            failures=shown[:MAX_FAILURES],
        )

    def _message(self, phase: str, number: int, nodes: Sequence[str], failures: Mapping[str, str]) -> str:
        if phase == "Succeeded":
            return f"every node finished{self.caveat}"[:1024]
        if phase == "Failed":
            some = ", ".join(sorted(failures)[:8]) or "the pool has no node"
            return f"{len(failures)} of {len(nodes)} nodes did not finish: {some}"[:1024]
        if not nodes:
            return "the pool has no sidecar yet"
        progress = self._progress(number, nodes)
        waiting = {node: why for node in self.target_nodes(number, nodes) if (why := self._problem(number, node))}
        waiting_for = (
            f"; waiting for {', '.join(sorted(waiting)[:8])}: {next(iter(waiting.values()))}" if waiting else ""
        )
        return f"{self.steps[number].what} (step {number + 1} of {len(self.steps)}){progress}{waiting_for}"[:1024]

    def _progress(self, number: int, nodes: Sequence[str]) -> str:
        """Progress of all nodes that report it."""
        results = (self.node_results.get((number, node)) for node in self.target_nodes(number, nodes))
        reported = [result.progress for result in results if result and result.progress]
        done, total = sum(p.done for p in reported), sum(p.total for p in reported)
        return f", {done} of {total} {reported[0].unit}" if total else ""

    def _problem(self, number: int, node: str) -> str:
        result = self.node_results.get((number, node))
        return result.problem if result is not None and not result.is_final else ""

    def _has_ended(self, number: int, node: str) -> bool:
        result = self.node_results.get((number, node))
        return result is not None and (result.is_done or bool(result.failure))

    def _is_unresponsive(self, number: int, node: str) -> bool:
        result = self.node_results.get((number, node))
        return result is not None and result.unanswered >= _MAX_UNANSWERED

    def _failed_before(self, number: int, node: str) -> bool:
        """Whether the node failed a step that runs on every node. A step for all nodes says nothing about one node."""
        everywhere = (n for n in range(number) if self.steps[n].everywhere and (n, node) in self.node_results)
        return any(self.node_results[n, node].failure for n in everywhere)

    def _was_finished_by_another(self, number: int) -> bool:
        return not self.steps[number].everywhere and any(
            result.is_done for (n, _), result in self.node_results.items() if n == number
        )

    def _finished_all(self, node: str) -> bool:
        everywhere = (n for n, step in enumerate(self.steps) if step.everywhere or step.node == node)
        return all(self._finished_step(n, node) for n in everywhere)

    def _finished_step(self, number: int, node: str) -> bool:
        return (number, node) in self.node_results and self.node_results[number, node].is_done

    def _why_unfinished(self, number: int, node: str) -> str:
        result = self.node_results.get((number, node))
        if result is None:
            return "the sidecar has no address"
        if result.progress is None:
            return f"the sidecar does not answer: {result.problem}"
        progress = result.progress
        return f"at {progress.done} of {progress.total or '?'} {progress.unit}".rstrip() + " when the timeout passed"
