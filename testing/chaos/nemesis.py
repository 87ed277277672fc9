"""Carries out the faults of a plan, one at a time, and knows since when the cluster has been healthy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from tidelog.testing.chaos.plan import ANY, CONTROLLER, COORDINATOR, LEADER, QUIET, Fault
from tidelog.testing.chaos.spans import Span
from tidelog.testing.chaos.target import ClusterView, FaultError, Target
from tidelog.testing.chaos.timeline import Timeline

SYNC_S = 180.0
TICK_S = 0.5

Pause = Callable[[], None]
"""Called every `TICK_S` while the nemesis waits."""


class Nemesis:
    def __init__(
        self,
        target: Target,
        view: ClusterView,
        coordinated: Sequence[tuple[str, str]],
        timeline: Timeline,
        pause: Pause,
    ) -> None:
        """`coordinated`: what coordinators are chosen by, each a topic of coordinators and a key of it."""
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._target, self._view, self._coordinated = target, view, coordinated
        self._timeline, self._pause = timeline, pause
        self._healthy_since_s: float | None = time.monotonic()

    @property
    def healthy_s(self) -> float:
        """For how long all nodes have run without a fault; 0 if they do not."""
        return 0.0 if self._healthy_since_s is None else time.monotonic() - self._healthy_since_s

    def wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._pause()
            time.sleep(max(0.0, min(TICK_S, end_s - time.monotonic())))

    def detail(self, text: str) -> None:
        self._timeline.detail(text)

    def strike(self, fault: Fault) -> None:
        """Begins and ends a fault. All nodes are ready again when it returns."""
        if fault.kind == QUIET:
            self._timeline.note(str(fault))
            self.counts[QUIET] += 1
            self.wait(fault.seconds)
            return
        kind = self._target.kinds[fault.kind]
        node, why = self._choose(fault)
        self._timeline.note(f"{fault}" + (f" node={node} ({why})" if kind.has_node else ""))
        self.counts[fault.kind] += 1
        if why != ANY and kind.has_node:
            self.counts[f"{fault.kind} of {why}"] += 1
        span = Span(fault.kind, node if kind.has_node else None, why, self._timeline.at_s)
        span.loses_majority = kind.loses_majority
        self._timeline.spans.append(span)
        self._healthy_since_s = None
        try:
            self._target.strikes[fault.kind](node, fault, self)
        except FaultError as error:
            self._fail(f"fault-failed: {fault.kind}: {error}")
        span.end_s = self._timeline.at_s
        self.recover()
        span.ready_s = self._timeline.at_s
        if fault.waits_for_sync:
            self.wait_for_sync()
        self.wait(fault.pause_s)

    def recover(self) -> None:
        """All nodes run and are ready. A node that has ended by itself is a failure."""
        for failure in self._target.recover():
            self._fail(failure)
        self._healthy_since_s = time.monotonic()

    def wait_for_sync(self) -> None:
        """Until all replicas are in sync, or it has taken too long."""
        end_s = time.monotonic() + SYNC_S
        while not self._view.is_whole():
            if time.monotonic() > end_s:
                self._fail(f"not-in-sync: replicas were not in sync {SYNC_S:.0f} s after a fault")
                return
            self.wait(TICK_S)

    def _fail(self, failure: str) -> None:
        self.failures.append(failure)
        self._timeline.mark(failure)

    def _choose(self, fault: Fault) -> tuple[int, str]:
        """A node, and why; any if the one that is looked for is not known now."""
        found: int | None = None
        if fault.target == LEADER:
            found = self._view.leader(fault.pick)
        elif fault.target == COORDINATOR and self._coordinated:
            found = self._view.coordinator(*self._coordinated[fault.pick % len(self._coordinated)])
        elif fault.target == CONTROLLER:
            found = self._view.controller()
        if found is None or found not in self._target.nodes:
            return self._target.nodes[fault.pick % len(self._target.nodes)], ANY
        return found, fault.target
