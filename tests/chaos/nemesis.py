"""Carries out the faults of a plan, one at a time, and knows since when the cluster has been healthy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.plan import ANY, CONTROLLER, COORDINATOR, FREEZE, FULL_DISK, KILL, LEADER, QUIET, RESTART, Fault
from chaos.scene import NODES, READY_S, Scene
from tidelog.model.errors import TidelogError

SYNC_S = 180.0
TICK_S = 0.5

Pause = Callable[[], None]
"""Called every `TICK_S` while the nemesis waits."""


class Timeline:
    """What happened when, as text."""

    def __init__(self, path: Path) -> None:
        self._began_s = time.monotonic()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self.lines: list[str] = []

    @property
    def at_s(self) -> float:
        return time.monotonic() - self._began_s

    def note(self, text: str) -> None:
        line = f"{self.at_s:8.1f} s  {time.strftime('%H:%M:%S')}  {text}"
        self.lines.append(line)
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class Nemesis:
    def __init__(self, scene: Scene, groups: Sequence[str], timeline: Timeline, pause: Pause) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._scene, self._groups = scene, groups
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

    def strike(self, fault: Fault) -> None:
        """Begins and ends a fault. All nodes are ready again when it returns."""
        if fault.kind == QUIET:
            self._timeline.note(str(fault))
            self.counts[QUIET] += 1
            self.wait(fault.seconds)
            return
        node, why = self._choose(fault)
        if fault.kind == FULL_DISK and node not in self._scene.disks:
            return
        self._timeline.note(f"{fault} node={node} ({why})")
        self.counts[fault.kind] += 1
        if why != ANY:
            self.counts[f"{fault.kind} of {why}"] += 1
        self._healthy_since_s = None
        _STRIKES[fault.kind](self, node, fault.seconds)
        self.recover()
        if fault.waits_for_sync:
            self.wait_for_sync()
        self.wait(fault.pause_s)

    def recover(self) -> None:
        """All nodes run and are ready. A node that has ended by itself is a failure, and is started again."""
        cluster = self._scene.cluster
        for number, code in cluster.ended().items():
            self.failures.append(f"node-ended: node {number} ended by itself with code {code}")
            self._timeline.note(self.failures[-1])
            cluster.forget(number)
            cluster.start(number, is_awaited=False)
        for number in NODES:
            try:
                cluster.wait_ready(number, timeout_s=READY_S)
            except TidelogError as error:
                self.failures.append(f"node-not-ready: {str(error).splitlines()[0]}")
                self._timeline.note(self.failures[-1])
        self._healthy_since_s = time.monotonic()

    def wait_for_sync(self) -> None:
        """Until all replicas are in sync, or it has taken too long."""
        end_s = time.monotonic() + SYNC_S
        while time.monotonic() < end_s:
            try:
                if self._scene.is_whole():
                    return
            except TidelogError:
                pass  # nobody has answered yet; the deadline counts
            self.wait(TICK_S)
        self.failures.append(f"not-in-sync: replicas were not in sync {SYNC_S:.0f} s after a fault")
        self._timeline.note(self.failures[-1])

    def _choose(self, fault: Fault) -> tuple[int, str]:
        """A node, and why; any if the one that is looked for is not known now."""
        found: int | None = None
        if fault.target == LEADER:
            found = self._scene.leader(fault.pick)
        elif fault.target == COORDINATOR:
            found = self._scene.coordinator(self._groups[fault.pick % len(self._groups)])
        elif fault.target == CONTROLLER:
            found = self._scene.controller()
        if found is None:
            return NODES[fault.pick % len(NODES)], ANY
        return found, fault.target

    def _kill(self, node: int, seconds: float) -> None:
        self._scene.cluster.kill(node)
        self.wait(seconds)
        self._scene.cluster.start(node, is_awaited=False)

    def _freeze(self, node: int, seconds: float) -> None:
        self._scene.cluster.freeze(node)
        try:
            self.wait(seconds)
        finally:
            self._scene.cluster.thaw(node)

    def _restart(self, node: int, seconds: float) -> None:
        self._scene.cluster.stop(node)
        self.wait(seconds)
        self._scene.cluster.start(node, is_awaited=False)

    def _fill(self, node: int, seconds: float) -> None:
        with self._scene.disks[node].full():
            self.wait(seconds)


_STRIKES: dict[str, Callable[[Nemesis, int, float], None]] = {
    KILL: Nemesis._kill,
    FREEZE: Nemesis._freeze,
    RESTART: Nemesis._restart,
    FULL_DISK: Nemesis._fill,
}
