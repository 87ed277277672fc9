"""The operations of Raft's storage, of a broker's copy of the metadata and of its lifecycle.

Steps of `story` are what a core asks its storage for. A start finds the state before the step or after it, and entries
in between that were being written; what was synced in an epoch is not taken back in it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from support.crashes.trials import Operation, Outcome
from support.raft.storage import OTHER, THREE, Parts, Steps, install, parts_of, run_of, snapshot_id
from tidelog.metadata.broker_lifecycle import CLEAN_STOP_KEY, store_clean_stop
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import DiskFullError, UnformattedDirectoryError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.messages import Entry, EntryKind
from tidelog.raft.seen_peers import SeenPeers
from tidelog.raft.snapshots import Snapshot
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import SimNode


@dataclass(frozen=True)
class Expected:
    """What a node may hold: snapshot offset and the log from there on."""

    hard_state: HardState
    start: int
    entries: tuple[Entry, ...]

    @property
    def epoch(self) -> int:
        return self.hard_state.epoch

    @property
    def end(self) -> int:
        return self.start + len(self.entries)


def apply_step(before: Expected, persist: Persist) -> Expected:
    start, entries = before.start, before.entries
    if persist.reset_to is not None:
        start, entries = persist.reset_to, ()
    if persist.truncate_to is not None:
        entries = entries[: persist.truncate_to - start]
    return Expected(persist.hard_state, start, entries + persist.entries)


def check_boot(boot: BootState, before: Expected, after: Expected) -> None:
    """The power went while the change from `before` to `after` was under way."""
    assert boot.recovering_until is None, "a crash alone never looks like a loss of synced data"
    assert before.epoch <= boot.hard_state.epoch <= after.epoch
    if boot.hard_state not in (before.hard_state, after.hard_state):
        # Raised by entries or a snapshot of that epoch, in which nothing was said yet.
        assert boot.hard_state.epoch > before.epoch
        assert boot.hard_state.voted_for is None
    if boot.hard_state.epoch == before.epoch < after.epoch:
        # Seed 5492 (driver): a cut that a new epoch demanded was kept, and the epoch was not.
        assert boot.start + len(boot.entries) >= before.end, "what was acknowledged in an epoch is not taken back in it"
    assert boot.start in (before.start, after.start)
    common = 0
    if boot.start == before.start:
        if after.start == before.start:
            pairs = zip(before.entries, after.entries, strict=False)
            shorter = min(len(before.entries), len(after.entries))
            common = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        assert boot.entries[:common] == before.entries[:common], "what stays is never lost"
    rest = boot.entries[common:]
    candidates = [x.entries[common:] for x in (before, after) if x.start == boot.start]
    assert any(rest == candidate[: len(rest)] for candidate in candidates), "nothing else is found there"


def story() -> list[tuple[list[Persist], Snapshot | None]]:
    """Appends, votes, cuts at and between batches, in the same epoch and together with a later one, a snapshot taken
    and one received, a reset."""
    step = Steps()
    return [
        ([step(run_of(1, 0, 6), epoch=1)], None),
        ([step((), epoch=2, vote=OTHER)], None),
        ([step(run_of(2, 6, 4)), step(run_of(2, 10, 3))], None),
        ([step(run_of(3, 9, 2), epoch=3, truncate_to=9)], None),  # inside of a batch
        ([step(run_of(4, 6, 5), epoch=4, truncate_to=6)], None),  # between two
        ([step((), epoch=5, vote=OTHER)], None),
        ([step(run_of(5, 9, 3), truncate_to=9)], None),  # by the leader that it has voted for
        ([step(run_of(6, 10, 2), epoch=6, truncate_to=10), step((), epoch=7, vote=OTHER)], None),
        ([step(run_of(7, 12, 1))], Snapshot(snapshot_id(200, 8), THREE, b"s" * 5000)),
        ([step(run_of(9, 200, 2), epoch=9, reset_to=200)], None),
        # A snapshot inside of the log that contradicts it.
        ([step(run_of(9, 202, 3))], Snapshot(snapshot_id(203, 11), THREE, b"t" * 5000)),
        ([step(run_of(12, 203, 1), epoch=12, reset_to=203)], None),
    ]


def expected_states() -> list[Expected]:
    states = [Expected(HardState(Epoch(0), None), 0, ())]
    for persists, _ in story():
        state = states[-1]
        for persist in persists:
            state = apply_step(state, persist)
        states.append(state)
    return states


@dataclass
class RaftStory:
    """One step of the story, by its number."""

    number: int
    labels: list[str] = field(default_factory=lambda: ["data"])
    done: bool = False
    rest: Callable[[], Coroutine[Any, Any, None]] | None = None
    left: BootState | None = None

    async def prepare(self, node: SimNode) -> None:
        parts = parts_of(node)
        await parts.formatted()
        storage, _ = await parts.opened()
        for persists, snapshot in story()[: self.number]:
            await _step(storage, persists, snapshot)

    async def change(self, node: SimNode, arm: Callable[[], None]) -> None:
        storage, _ = await parts_of(node).opened()
        persists, snapshot = _numbered(self.number)
        arm()
        try:
            await storage.persist(persists)
        except DiskFullError:
            self.rest = partial(_step, storage, persists, snapshot)
            raise
        self.done = True
        if snapshot is not None:
            await install(storage, snapshot.id, snapshot.membership, snapshot.data)

    async def go_on(self) -> None:
        """Effects that found no space are stored when there is some."""
        if self.rest is not None:
            await self.rest()
            self.done = True

    async def reopen(self, node: SimNode) -> None:
        await parts_of(node).opened()

    async def check(self, node: SimNode, outcome: Outcome) -> None:
        storage, boot = await parts_of(node).opened()
        storage.log.validate()
        states = expected_states()
        # A start that finds a received snapshot does what the core would do next.
        is_ahead = self.done and _numbered(self.number)[1] is not None
        before, after = states[self.number + self.done], states[self.number + 1 + is_ahead]
        check_boot(boot, before, after)
        end = boot.start + len(boot.entries)
        epoch = Epoch(boot.hard_state.epoch + 1)
        added = run_of(epoch, end, 2)
        await storage.persist([Persist(1, HardState(epoch, None), None, None, Offset(end), added, False)])
        self.left = replace(boot, hard_state=HardState(epoch, None), entries=(*boot.entries, *added))

    async def again(self, node: SimNode) -> None:
        _, boot = await parts_of(node).opened()
        assert self.left is not None, "checked"
        assert (boot.hard_state, boot.start, boot.entries) == (
            self.left.hard_state,
            self.left.start,
            self.left.entries,
        )
        assert boot.recovering_until is None


def _numbered(number: int) -> tuple[list[Persist], Snapshot | None]:
    return story()[number]


async def _step(storage: RaftStorage, persists: list[Persist], snapshot: Snapshot | None) -> None:
    await storage.persist(persists)
    if snapshot is not None:
        await install(storage, snapshot.id, snapshot.membership, snapshot.data)


Act = Callable[[Parts], Coroutine[Any, Any, None]]


@dataclass
class StorageStory:
    """An operation beside the log: all that was there before is there afterwards."""

    act: Act
    fill: Act
    look: Callable[[Parts], Coroutine[Any, Any, Any]]
    """What may be one of two: before the operation, or after it."""
    labels: list[str] = field(default_factory=lambda: ["data"])
    seen: list[Any] = field(default_factory=list)

    async def prepare(self, node: SimNode) -> None:
        await self.fill(parts_of(node))

    async def change(self, node: SimNode, arm: Callable[[], None]) -> None:
        arm()
        await self.act(parts_of(node))

    async def go_on(self) -> None:
        return None

    async def reopen(self, node: SimNode) -> None:
        await self.look(parts_of(node))

    async def check(self, node: SimNode, outcome: Outcome) -> None:
        parts = parts_of(node)
        await self.look(parts)
        await self.act(parts)  # it can be done, or done again
        self.seen.append(await self.look(parts))

    async def again(self, node: SimNode) -> None:
        assert await self.look(parts_of(node)) == self.seen[-1]


async def _nothing(_parts: Parts) -> None:
    return None


async def _format(parts: Parts) -> None:
    """As the operator does: until it is formatted."""
    try:
        await parts.opened()
    except UnformattedDirectoryError:
        await parts.formatted()


async def _look_formatted(parts: Parts) -> object:
    try:
        _, boot = await parts.opened()
    except UnformattedDirectoryError:
        return None
    assert (boot.membership, boot.start, boot.entries) == (THREE, 0, ())
    return boot.hard_state


async def _fill_storage(parts: Parts) -> None:
    await parts.formatted()
    storage, _ = await parts.opened()
    step = Steps()
    for at in range(0, 60, 6):
        await storage.persist([step(run_of(1, at, 6), epoch=1)])
    await storage.write_snapshot(snapshot_id(10, 1), THREE, b"s" * 500)
    await storage.write_snapshot(snapshot_id(20, 1), THREE, b"s" * 500)


async def _snapshot_and_drop(parts: Parts) -> None:
    storage, boot = await parts.opened()
    if boot.snapshot.offset < 50:
        await storage.write_snapshot(snapshot_id(50, 1), THREE, b"t" * 900)
    await storage.drop_before(Offset(50))
    await storage.close()


async def _look_storage(parts: Parts) -> object:
    storage, boot = await parts.opened()
    assert boot.start in (20, 50), "the snapshot before, or the new one"
    assert boot.start + len(boot.entries) == 60
    assert boot.recovering_until is None
    first = boot.start
    assert boot.entries == run_of(1, 0, 60)[first:]
    storage.log.validate()
    return boot


async def _fill_uncatalogued(parts: Parts) -> None:
    """The process that received a snapshot past the end of the log ended before it could rely on it."""
    await _fill_storage(parts)
    storage, _ = await parts.opened()
    await storage.snapshots.write(snapshot_id(80, 1), THREE, b"u" * 700)


async def _open_and_close(parts: Parts) -> None:
    storage, _ = await parts.opened()
    await storage.close()


async def _look_uncatalogued(parts: Parts) -> object:
    storage, boot = await parts.opened()
    assert (boot.start, boot.start + len(boot.entries)) in ((20, 60), (80, 80)), "without the snapshot, or after it"
    assert boot.recovering_until is None
    storage.log.validate()
    return boot


async def _hear(parts: Parts) -> None:
    peers = SeenPeers(parts.store)
    for node in (2, 3):
        await peers.add(NodeId(node))


async def _look_peers(parts: Parts) -> object:
    nodes = SeenPeers(parts.store).nodes
    assert nodes is not None
    assert set(nodes) <= {2, 3}
    return nodes


async def _stop_clean(parts: Parts) -> None:
    await store_clean_stop(parts.store, 17)


async def _look_clean_stop(parts: Parts) -> object:
    return parts.store.get(CLEAN_STOP_KEY)


def _tail(parts: Parts) -> MetadataTail:
    from random import Random

    return MetadataTail(
        disk=parts.disk,
        path="metadata",
        transport=None,  # type: ignore[arg-type]
        sources=tuple,
        work=parts.work,
        random=Random(1),
    )


ENTRIES = tuple(Entry(Epoch(1), EntryKind.NO_OP, b"") for _ in range(12))


async def _fill_tail(parts: Parts) -> None:
    tail = _tail(parts)
    await tail.open()
    tail.apply(tail.offset, ENTRIES[:6])
    await tail._take_snapshot()
    tail.apply(tail.offset, ENTRIES[6:])
    tail.close()


async def _snapshot_tail(parts: Parts) -> None:
    tail = _tail(parts)
    await tail.open()
    tail.apply(tail.offset, ENTRIES[:3])
    await tail._take_snapshot()
    tail.close()


async def _look_tail(parts: Parts) -> object:
    """A copy: what was not synced may be gone, what a snapshot has is there."""
    tail = _tail(parts)
    await tail.open()
    assert tail.offset >= 6
    tail.close()
    return tail.offset


NAMES = (
    "Raft: append",
    "Raft: vote",
    "Raft: appends together",
    "Raft: truncation in a batch, and its epoch",
    "Raft: truncation between batches, and its epoch",
    "Raft: vote in the next epoch",
    "Raft: truncation for the leader",
    "Raft: truncation and a vote after it",
    "Raft: append and a snapshot received",
    "Raft: reset to a snapshot, and its epoch",
    "Raft: append and a snapshot inside of the log",
    "Raft: reset inside of the log",
)


def operations() -> list[Operation]:
    assert len(NAMES) == len(story()), "each step has its name"
    steps = [Operation(name, partial(RaftStory, number)) for number, name in enumerate(NAMES)]
    others = {
        "Raft: format": partial(StorageStory, _format, _nothing, _look_formatted),
        "Raft: snapshot, removal of the log's prefix, close": partial(
            StorageStory, _snapshot_and_drop, _fill_storage, _look_storage
        ),
        "Raft: start with a snapshot that is not in the catalogue": partial(
            StorageStory, _open_and_close, _fill_uncatalogued, _look_uncatalogued
        ),
        "Raft: a node is heard of": partial(StorageStory, _hear, _format, _look_peers),
        "clean stop of a broker": partial(StorageStory, _stop_clean, _nothing, _look_clean_stop),
        "snapshot of a broker's metadata": partial(StorageStory, _snapshot_tail, _fill_tail, _look_tail),
    }
    return [*steps, *(Operation(name, make) for name, make in others.items())]
