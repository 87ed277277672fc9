"""A copy of a compacted log answers a follower's question about divergence as the log that it was copied from.

The original is a history of epochs, some led in vain, and its batches. Compaction takes any batches away but the last.
The copy is a real log: it takes what is left in pushes, and in between it is checkpointed, crashes (with what was not
synced), is restarted, cut, or moves on to a second leader that goes on from where it is. Whenever the copy is whole,
every question gets the same answer from both.
"""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from support.logs.single_log import SMALL, Lab, batch, open_log, stamped

from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage
from tidelog.log.log import Log
from tidelog.model.ids import Offset
from tidelog.replication.divergence import divergence
from tidelog.world.simulated import Loss, SimNode, SimWorld

REIGNS = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=6)
"""Of each leader: how many epochs after the last, and how many batches it writes; 0 is an epoch led in vain."""
EVENTS = st.sampled_from(["push", "push", "push", "checkpoint", "crash", "restart", "cut"])


@dataclass
class Original:
    entries: list[tuple[int, int]]
    batches: list[tuple[int, int, int]]
    """(base offset, records, epoch)"""

    @property
    def end(self) -> int:
        return self.batches[-1][0] + self.batches[-1][1]


def written(reigns: list[tuple[int, int]], sizes: list[int]) -> Original:
    """The last leader writes at least once, so that it stands in every whole copy."""
    original = Original([], [])
    epoch, end, number = -1, 0, 0
    for at, (step, count) in enumerate(reigns):
        epoch += step
        original.entries.append((epoch, end))
        for _ in range(count or int(at + 1 == len(reigns))):
            size = sizes[number % len(sizes)]
            original.batches.append((end, size, epoch))
            end, number = end + size, number + 1
    return original


class Copy:
    """The follower's side, as `replication.follower_replica` does it."""

    def __init__(self, lab: Lab, original: Original, kept: list[bool]) -> None:
        self.lab = lab
        self.leader_epoch = original.entries[-1][0]
        self.said = Lineage(Offset(0), self.leader_epoch, tuple(original.entries))
        last = len(original.batches) - 1
        self.left = [row for at, row in enumerate(original.batches) if at == last or kept[at % len(kept)]]
        self.log: Log

    def open(self) -> None:
        async def main(node: SimNode) -> None:
            self.log = await open_log(node, SMALL)
            await self.log.allow_gaps()
            await self.subscribe()

        self.lab.run(main)

    async def subscribe(self) -> None:
        log = self.log
        log.forget_empty_epochs()
        if log.lineage.leader_epoch != self.leader_epoch:
            await log.forget_leader()
        if not log.lineage.covers(self.said, log_end=log.end_offset):
            await log.take_over_lineage(self.said)

    def push(self, count: int) -> None:
        async def main(_: SimNode) -> None:
            for base, size, epoch in [row for row in self.left if row[0] >= self.log.end_offset][:count]:
                self.log.append_replicated(stamped(batch(size), base_offset=base, leader_epoch=epoch))
            await self.log.flush()
            self.log.validate()

        self.lab.again(main)

    def does(self, event: str, number: int) -> None:
        async def main(_: SimNode) -> None:
            if event == "checkpoint":
                await self.log.checkpoint()
            elif event == "cut":
                await self.log.truncate(max(self.log.start_offset, self.log.end_offset - number))
                await self.subscribe()
            elif event == "restart":
                await self.log.close()

        if event == "push":
            self.push(number)
            return
        if event != "crash":
            self.lab.again(main)
        if event in ("crash", "restart"):
            self.lab.crash(Loss.ALL)
            self.open()


@given(
    reigns=REIGNS,
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kept=st.lists(st.booleans(), min_size=1, max_size=8),
    events=st.lists(st.tuples(EVENTS, st.integers(1, 6)), max_size=8),
)
def test_a_copy_of_a_compacted_log_has_the_epochs_of_the_original(
    reigns: list[tuple[int, int]], sizes: list[int], kept: list[bool], events: list[tuple[str, int]]
) -> None:
    original = written(reigns, sizes)
    with SimWorld(seed=1) as world:
        copy = Copy(Lab(world), original, kept)
        copy.open()
        for event, number in events:
            copy.does(event, number)
        copy.push(len(copy.left))
        assert copy.log.end_offset == original.end
        history = EpochHistory(original.entries)
        assert copy.log.epochs == history
        copy.does("crash", 0)
        assert copy.log.epochs == history, "after a crash"
        for last_epoch in range(-1, original.entries[-1][0] + 2):
            for next_offset in range(original.end + 2):
                answers = [
                    divergence(epochs, Offset(0), Offset(original.end), last_epoch=last_epoch, next_offset=next_offset)
                    for epochs in (history, copy.log.epochs)
                ]
                assert answers[0] == answers[1], (last_epoch, next_offset)


@given(
    reigns=REIGNS,
    later=REIGNS,
    kept=st.lists(st.booleans(), min_size=1, max_size=8),
    events=st.lists(st.tuples(EVENTS, st.integers(1, 6)), max_size=6),
    taken=st.integers(0, 10),
)
def test_a_copy_that_changes_its_leader_names_the_epochs_of_the_new_one(
    reigns: list[tuple[int, int]],
    later: list[tuple[int, int]],
    kept: list[bool],
    events: list[tuple[str, int]],
    taken: int,
) -> None:
    """The first leader's log goes on with records that are never committed: the second has other ones there."""
    second = written([*reigns, *later], [1, 3])
    common = written(reigns, [1, 3])
    first = Original(list(common.entries), list(common.batches))
    lost_epoch = first.entries[-1][0] + 1
    if (second.entries[len(reigns)][0], 0) == (lost_epoch, 0):
        second.entries = [(e + (e >= lost_epoch), start) for e, start in second.entries]
        second.batches = [(base, size, e + (e >= lost_epoch)) for base, size, e in second.batches]
    first.entries.append((lost_epoch, first.end + 2))  # it begins past where the logs part
    first.batches += [(first.end, 2, first.entries[-2][0]), (first.end + 2, 1, lost_epoch)]
    with SimWorld(seed=1) as world:
        copy = Copy(Lab(world), first, kept)
        copy.open()
        copy.push(taken)

        async def part(_: SimNode) -> None:
            await copy.log.truncate(min(copy.log.end_offset, common.end))

        copy.lab.again(part)
        moved_on = Copy(copy.lab, second, kept)
        moved_on.log = copy.log

        async def subscribe(_: SimNode) -> None:
            await moved_on.subscribe()

        moved_on.lab.again(subscribe)
        for event, number in events:
            moved_on.does(event, number)
        moved_on.push(len(moved_on.left))
        moved_on.does("crash", 0)
        log = moved_on.log
        assert log.end_offset == second.end
        truth = EpochHistory(second.entries)
        assert [log.epochs.epoch_for(at) for at in range(second.end)] == [
            truth.epoch_for(at) for at in range(second.end)
        ]
