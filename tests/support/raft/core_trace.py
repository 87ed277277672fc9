"""What cores do, one line for each thing, as the golden traces of the scenarios show it.

1 -> 2 append 3/1 +2 commit 3     entries 3 and 4 follow the entry of epoch 1 that ends at offset 3
2 -> 1 ack 5                      everything below offset 5 is synced
2 -> 1 reject 9 have 5/1          no entry of that epoch ends at 9; here epoch 1 ends at 5
"""

from __future__ import annotations

from tidelog.model.ids import NodeId
from tidelog.raft.effects import Effects
from tidelog.raft.messages import (
    SNAPSHOT_HELD,
    AppendRequest,
    AppendResponse,
    Entry,
    EntryKind,
    Message,
    PreVoteRequest,
    PreVoteResponse,
    SnapshotAck,
    SnapshotChunk,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)


def describe(message: Message) -> str:
    """A message as a line of a trace; the epoch in brackets is the sender's."""
    match message:
        case PreVoteRequest():
            text = f"pre-vote? log {message.end}/{message.last_epoch}"
        case VoteRequest():
            text = f"vote? log {message.end}/{message.last_epoch}"
        case PreVoteResponse():
            text = f"pre-vote {'yes' if message.granted else 'no'}"
        case VoteResponse():
            text = f"vote {'yes' if message.granted else 'no'}"
        case AppendRequest():
            entries = f" +{len(message.entries)}" if message.entries else ""
            probe = f" probe {message.probe}" if message.probe else ""
            text = f"append {message.prev_offset}/{message.prev_epoch}{entries} commit {message.commit}{probe}"
        case AppendResponse(rejected=True):
            text = f"reject {message.match} have {message.hint_end}/{message.hint_epoch}{_extra(message)}"
        case AppendResponse():
            text = f"ack {message.match}{_extra(message)}"
        case SnapshotChunk():
            piece = f"{message.position}..{message.position + len(message.data)} of {message.total_bytes}"
            text = f"snapshot {message.snapshot.offset}/{message.snapshot.epoch} {piece}"
        case SnapshotAck():
            wanted = "held" if message.wanted == SNAPSHOT_HELD else f"wanted from {message.wanted}"
            text = f"snapshot {message.snapshot.offset}/{message.snapshot.epoch} {wanted}"
        case TimeoutNow():
            text = "campaign now"
    return f"{text} [{message.epoch}]"


def _extra(response: AppendResponse) -> str:
    return (f" probe {response.probe}" if response.probe else "") + ("" if response.counts else " recovering")


def describe_entry(entry: Entry) -> str:
    if entry.kind == EntryKind.DATA:
        return f"{entry.data.decode('utf-8', 'replace')[:12]}/{entry.epoch}"
    return f"{entry.kind.name.lower().replace('_', '-')}/{entry.epoch}"


class Trace:
    """Lines since the last `take`; nothing is kept while it is off."""

    def __init__(self) -> None:
        self.on = False
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        if self.on:
            self.lines.append(line)

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def delivery(self, sender: int, to: int, message: Message) -> None:
        if self.on:
            self.lines.append(f"{sender} -> {to} {describe(message)}")

    def effects(self, node: NodeId, out: Effects) -> None:
        if not self.on:
            return
        if out.role is not None:
            of = "" if out.role.leader in (None, node) else f" of {out.role.leader}"
            self.add(f"{node} {out.role.role.value}{of}, epoch {out.role.epoch}")
        if out.persist is not None:
            self.add(f"{node} persist #{out.persist.number}: {self._persist(out)}")
        if out.load_snapshot is not None:
            self.add(f"{node} loads snapshot {out.load_snapshot.offset}/{out.load_snapshot.epoch}")
        if out.drop_before is not None:
            self.add(f"{node} drops entries before {out.drop_before}")
        if out.committed:
            entries = " ".join(map(describe_entry, out.committed))
            self.add(f"{node} commits {out.committed_from}: {entries}")
        for token, offset, epoch in out.accepted:
            self.add(f"{node} accepts #{token} at {offset}/{epoch}")
        for token, rejection in out.rejected:
            self.add(f"{node} rejects #{token}: {rejection.value}")
        for token, offset in out.reads:
            self.add(f"{node} answers read #{token} at {offset}")

    @staticmethod
    def _persist(out: Effects) -> str:
        persist = out.persist
        assert persist is not None
        vote = persist.hard_state.voted_for
        parts = [f"epoch {persist.hard_state.epoch} vote {'none' if vote is None else vote.node}"]
        if persist.reset_to is not None:
            parts.append(f"reset to {persist.reset_to}")
        if persist.truncate_to is not None:
            parts.append(f"cut to {persist.truncate_to}")
        if persist.entries:
            parts.append(f"{persist.first}: {' '.join(map(describe_entry, persist.entries))}")
        if persist.recovered:
            parts.append("recovered")
        return ", ".join(parts)
