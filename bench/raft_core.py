"""The Raft core alone: three cores in memory exchange appends and acks, and their disks finish at once.

Every message that a core is stepped with counts. The row with the target is the strict one: each message pays for a
harvest of effects of its own. The driver steps all that has arrived and harvests once: the row `in rounds`. With
16 proposals a round a message carries 16 entries and costs that much more. Figures are the best of many short slices on
the wall clock, each with a snapshot in it; processor time stands beside the first, since on a shared machine the two
differ by what others take.

Also the wire: how long one message takes to become bytes and back.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator

from bench.harness import Result, at_least, best_seconds
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft import wire
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import HardState, Role
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    AppendRequest,
    AppendResponse,
    Entry,
    EntryKind,
    Event,
    Message,
    Persisted,
    Propose,
    SnapshotId,
    SnapshotTaken,
    Tick,
)

MESSAGES = 1_000
SLICES = 100
PAYLOAD = b"x" * 100
SNAPSHOT_EVERY = 200
TARGET = 100_000


class Trio:
    """Three cores and the messages between them."""

    def __init__(self) -> None:
        keys = [VoterKey(NodeId(node), bytes([node]) * 16) for node in (1, 2, 3)]
        membership = Membership(tuple(Member(key.node, key.directory) for key in keys))
        nothing = HardState(Epoch(0), None), SnapshotId(Offset(0), Epoch(0)), membership, Offset(0), Epoch(0), ()
        config = RaftConfig(kept_behind_snapshot_bytes=0)
        self.cores = {key.node: RaftCore(key, BootState(*nothing), config, random.Random(key.node), 0) for key in keys}
        self.queue: deque[tuple[NodeId, Message]] = deque()
        self.stepped = 0
        self.now_ms = 0
        self.elect()

    def step(self, node: NodeId, event: Message | Event) -> None:
        core, now_ms = self.cores[node], self.now_ms
        core.step(event, now_ms)
        out = core.effects(now_ms)
        self.queue += out.messages
        while out.persist is not None:
            core.step(Persisted(out.persist.number), now_ms)
            out = core.effects(now_ms)
            self.queue += out.messages

    def deliver_all(self) -> None:
        queue, step = self.queue, self.step
        while queue:
            self.stepped += 1
            step(*queue.popleft())

    def elect(self) -> None:
        first = self.cores[NodeId(1)]
        self.now_ms = first.deadline_ms
        self.step(NodeId(1), Tick())
        self.deliver_all()
        assert first.role is Role.LEADER

    def exchange(self, count: int, *, batch: int) -> None:
        """Propose and replicate until `count` messages have been stepped; `batch` proposals share a round."""
        end = self.stepped + count
        leader = self.cores[NodeId(1)]
        since_snapshot = 0
        while self.stepped < end:
            for token in range(batch - 1):
                leader.step(Propose(token, PAYLOAD), self.now_ms)
            self.step(NodeId(1), Propose(batch, PAYLOAD))
            self.deliver_all()
            since_snapshot += batch
            if since_snapshot >= SNAPSHOT_EVERY:
                since_snapshot = 0
                for node, core in self.cores.items():
                    epoch = core.log.epoch_before(core.commit)
                    assert epoch is not None
                    self.step(node, SnapshotTaken(SnapshotId(core.commit, epoch)))
        assert all(core.log.end == leader.log.end for core in self.cores.values()), "all of it arrived"

    def exchange_in_rounds(self, count: int) -> None:
        """As the driver does it: each core takes all that has arrived, also of its disk, and is harvested once."""
        end = self.stepped + count
        inboxes: dict[NodeId, list[Message | Event]] = {node: [] for node in self.cores}
        rounds = 0
        while self.stepped < end:
            inboxes[NodeId(1)].append(Propose(0, PAYLOAD))
            rounds += 1
            for node, core in self.cores.items():
                events, inboxes[node] = inboxes[node], []
                for event in events:
                    core.step(event, self.now_ms)
                    self.stepped += isinstance(event, AppendRequest | AppendResponse)
                out = core.effects(self.now_ms)
                if out.persist is not None:
                    inboxes[node].append(Persisted(out.persist.number))
                for to, message in out.messages:
                    inboxes[to].append(message)
                if rounds % SNAPSHOT_EVERY == 0 and core.commit > core.log.snapshot.offset:
                    epoch = core.log.epoch_before(core.commit)
                    assert epoch is not None
                    core.step(SnapshotTaken(SnapshotId(core.commit, epoch)), self.now_ms)


def run() -> Iterator[Result]:
    strict, many, rounds = Trio(), Trio(), Trio()
    taken = best_seconds(lambda: strict.exchange(MESSAGES, batch=1), repeat=SLICES)
    yield at_least("core alone, a harvest each message", MESSAGES / taken, "messages/s", target=TARGET)
    cpu = min(_cpu_seconds(strict) for _ in range(SLICES))
    yield Result("core alone, a harvest each message, processor time", MESSAGES / cpu, "messages/s")
    taken = best_seconds(lambda: rounds.exchange_in_rounds(MESSAGES), repeat=SLICES)
    yield Result("core alone, in rounds", MESSAGES / taken, "messages/s")
    taken = best_seconds(lambda: many.exchange(MESSAGES, batch=16), repeat=SLICES)
    yield Result("core alone, 16 proposals a round", MESSAGES / taken, "messages/s")
    entries = (Entry(Epoch(3), EntryKind.DATA, PAYLOAD),) * 16
    append = AppendRequest(Epoch(3), NodeId(1), Offset(100), Epoch(3), entries, Offset(90), 0)
    ack = AppendResponse(Epoch(3), NodeId(2), b"d" * 16, Offset(116), False, Epoch(0), Offset(0), 0, True)
    for name, message in (("ack", ack), ("append of 16 entries", append)):
        taken = best_seconds(lambda message=message: _round_trips(message, 5_000))  # type: ignore[misc]
        yield Result(f"wire round trip, {name}", 5_000 / taken, "messages/s")


def _cpu_seconds(trio: Trio) -> float:
    began = time.process_time()
    trio.exchange(MESSAGES, batch=1)
    return time.process_time() - began


def _round_trips(message: Message, count: int) -> None:
    for _ in range(count):
        wire.decode(wire.encode(message))
