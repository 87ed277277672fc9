"""Observers of a Raft group: they tail it through `raft.observer`, from any node, and are checked at each delivery.

    no gap, never back   entries begin where the last ones ended, a snapshot is ahead of what is there
    a prefix             what is delivered is committed, and is what stands there in the committed log: entry by entry,
                         or, for a snapshot, its state and epoch
    catches up           once faults end, or without those that are gone for good, an observer has all that is committed
                         within `catch_up_s`

An observer keeps its state in memory and stores it now and then, as a broker does. A new life goes on from what was
stored, or, with a new disk, from nothing; what holds, holds in one life, and from its first offset on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from simulation.checkers import RaftChecker
from simulation.cluster import Context, Program
from simulation.machine import ChainMachine
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.messages import Entry, SnapshotId
from tidelog.raft.observer import ObserverConfig, RaftObserver

OBSERVER_NODES = (NodeId(201), NodeId(202))
STORES = 0.1
"""How often the state is stored after a delivery."""
FORGETS = 0.2
"""How often a new life has a new disk."""

Fail = Callable[[str, str], None]


class ObserverMachine(ChainMachine):
    """What an observer delivers to; see the module's docstring for what it checks. `ChainMachine` checks the state."""

    def __init__(self, name: str, checker: RaftChecker, fail: Fail, offset: Offset, chain: int) -> None:
        super().__init__(name, checker)
        self.offset, self.chain = offset, chain
        self._history = checker.history
        self._fail = fail

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        history = self._history
        if first != self.offset:
            self._fail(self.name, f"is given entries from {first} on, after those up to {self.offset}")
        for offset, entry in enumerate(entries, first):
            if offset >= len(history):
                self._fail(self.name, f"is given {entry} at {offset}, but only {len(history)} entries are committed")
                break
            if history[offset] != entry:
                self._fail(self.name, f"is given {entry} at {offset}, where {history[offset]} is committed")
        super().apply(first, entries)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        offset, epoch = snapshot
        if offset <= self.offset:
            self._fail(self.name, f"is given a snapshot at {offset}, after entries up to {self.offset}")
        if offset > len(self._history) or self._history[offset - 1].epoch != epoch:
            self._fail(self.name, f"is given a snapshot {snapshot} of what was not committed so")
        super().load_snapshot(snapshot, data)


class StoringMachine(ObserverMachine):
    """Stores its state now and then where the next life finds it."""

    def __init__(self, context: Context, checker: RaftChecker, fail: Fail) -> None:
        durable, self._random = context.station.durable, context.node.random
        if self._random.random() < FORGETS:
            durable.pop("stored", None)
        offset, self.epoch, chain = durable.get("stored", (Offset(0), Epoch(0), 0))
        super().__init__(context.station.name, checker, fail, offset, chain)
        self._durable: dict[str, Any] = durable

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        super().apply(first, entries)
        self._store(entries[-1].epoch)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        super().load_snapshot(snapshot, data)
        self._store(snapshot.epoch)

    def _store(self, epoch: Epoch) -> None:
        self.epoch = epoch
        if self._random.random() < STORES:
            self._durable["stored"] = (self.offset, epoch, self.chain)


class ObserverNode:
    """What checks and the nemesis see of an observer's process."""

    def __init__(self, observer: RaftObserver, machine: StoringMachine) -> None:
        self.observer = observer
        self.machine = machine


def observer_program(nodes: Sequence[NodeId], checker: RaftChecker, fail: Fail) -> Program:
    """Any Raft node may be asked, members or not: an observer has to find out who is of use."""

    async def run(context: Context) -> None:
        machine = StoringMachine(context, checker, fail)
        observer = RaftObserver(
            context.transport,
            lambda: nodes,
            machine,
            context.node.work,
            ObserverConfig(),
            context.node.random,
            offset=machine.offset,
            epoch=machine.epoch,
        )
        context.app = ObserverNode(observer, machine)
        await observer.run()

    return run


def catch_up_s(sources: int) -> float:
    """Within this time an observer finds one that is of use, even if it is the last of all: each of the others is
    silent at first, then says that it is behind, and is left after a while."""
    config = ObserverConfig()
    return sources * (config.silence_ms + config.stale_ms + config.retry_max_ms) / 1000 + 5.0
