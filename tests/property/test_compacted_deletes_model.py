"""No life of a compacted partition brings a deleted key back: a model of replicas that clean on their own.

Replicas write, follow, leave, come back, clean as far as they like and whenever they like, lose the end of their log,
lead in turn. `ReplicaDeletes` decides for the leader; the rest is the model's: what is in sync, what is committed,
which records a cleaning keeps. Checked after every step: for each key, an in-sync replica has the latest record that
was written below its end, or that was a delete and the replica has no record of the key.
"""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidelog.model.ids import Offset
from tidelog.replication.deletes import ReplicaDeletes

REPLICAS = 3
KEYS = 2
RETENTION_MS = 2
HOLD_MS = 4
KINDS = (
    "put",
    "put",
    "delete",
    "delete",
    "copy",
    "copy",
    "follow",
    "leave",
    "clean",
    "wait",
    "age",
    "age",
    "lead",
    "cut",
)

Event = tuple[str, int, int]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, REPLICAS - 1),
        st.integers(0, 6),
    ),
    max_size=60,
)


@dataclass
class Replica:
    number: int
    records: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """By offset: key and value, None for a delete."""
    horizons: dict[int, int] = field(default_factory=dict)
    end: int = 0
    deletes_end: int = 0
    allowed: int = 0
    """As follower: what the leader has said."""
    is_subscribed: bool = False

    def latest(self, key: int) -> int | None:
        found = [offset for offset, (other, _) in self.records.items() if other == key]
        return self.records[max(found)][1] if found else None

    def clean(self, end: int, bound: int, now_ms: int) -> None:
        """Up to `end`; deletes below `bound` go when their time is over."""
        newest = {key: offset for offset, (key, _) in sorted(self.records.items()) if offset < end}
        for offset, (key, value) in sorted(self.records.items()):
            if offset >= end:
                continue
            if newest[key] != offset:
                del self.records[offset]
            elif value is None:
                horizon = self.horizons.setdefault(offset, now_ms + RETENTION_MS)
                if now_ms >= horizon and offset < bound:
                    self.deletes_end = max(self.deletes_end, offset + 1)
                    del self.records[offset]


class Life:
    def __init__(self) -> None:
        self.replicas = [Replica(number) for number in range(REPLICAS)]
        self.written: list[tuple[int, int | None]] = []
        """The committed log and what the leader has written after it."""
        self.now_ms = 0
        self.isr = {0}
        self.leader = self.replicas[0]
        self.deletes = ReplicaDeletes(0)
        self.next_value = 0

    @property
    def committed(self) -> int:
        return min(self.replicas[number].end for number in self.isr)

    def bound(self) -> int:
        others = [number for number in range(REPLICAS) if number != self.leader.number]
        return self.deletes.bound(others, log_end=Offset(self.leader.end), now_ms=self.now_ms, hold_ms=HOLD_MS)

    def write(self, key: int, *, is_delete: bool) -> None:
        self.next_value += 1
        record = (key % KEYS, None if is_delete else self.next_value)
        self.leader.records[self.leader.end] = record
        self.written.append(record)
        self.leader.end += 1

    def copy(self, replica: Replica, count: int) -> None:
        leader = self.leader
        if replica is leader:
            return
        if not replica.is_subscribed:
            is_safe = replica.number in self.isr
            wanted = {"has_records": bool(replica.end), "deletes_end": leader.deletes_end}
            if not is_safe and self.deletes.must_copy(replica.number, next_offset=replica.end, **wanted):  # type: ignore[arg-type]
                replica.records.clear()
                replica.horizons.clear()
                replica.end = 0
                wanted["has_records"] = False
            replica.deletes_end = max(replica.deletes_end, leader.deletes_end)
            self.deletes.subscribed(replica.number, replica.end, **wanted)  # type: ignore[arg-type]
            replica.is_subscribed = True
        end = min(replica.end + count, leader.end)
        for offset in range(replica.end, end):
            if offset in leader.records:
                replica.records[offset] = leader.records[offset]
        replica.end = end
        replica.allowed = leader.deletes_end
        self.deletes.acked(replica.number, end)
        if end == leader.end:
            self.isr.add(replica.number)

    def leave(self, replica: Replica) -> None:
        if replica is not self.leader:
            self.isr.discard(replica.number)
            replica.is_subscribed = False
            self.deletes.left(replica.number, self.now_ms)

    def cut(self, replica: Replica, count: int) -> None:
        """Damage: out of the in-sync set first, then cut."""
        if replica is self.leader:
            return
        self.leave(replica)
        replica.end = max(0, replica.end - count)
        for offset in [offset for offset in replica.records if offset >= replica.end]:
            del replica.records[offset]

    def clean(self, replica: Replica, back: int) -> None:
        is_leader = replica is self.leader
        bound = self.bound() if is_leader else max(replica.deletes_end, min(replica.allowed, replica.end))
        replica.clean(max(0, min(self.committed, replica.end) - back), bound, self.now_ms)

    def age(self, amount: int) -> None:
        """Every replica but one cleans as far as it can, before and after some time has passed."""
        for _ in range(2):
            for replica in self.replicas:
                if replica.number != amount:
                    self.clean(replica, 0)
            self.now_ms += amount

    def lead(self, replica: Replica) -> None:
        """Only who is in sync; what was not committed goes."""
        if replica.number not in self.isr or replica is self.leader:
            return
        for other in self.replicas:
            other.is_subscribed = False
            other.allowed = 0
            if other is not replica and other.end > replica.end:
                other.end = replica.end
                other.records = {at: record for at, record in other.records.items() if at < replica.end}
        del self.written[replica.end :]
        self.isr.discard(self.leader.number)
        self.leader = replica
        replica.deletes_end = min(replica.deletes_end, replica.end)
        self.deletes = ReplicaDeletes(self.now_ms)

    def does(self, kind: str, number: int, amount: int) -> None:
        replica = self.replicas[number]
        if kind in ("put", "delete"):
            self.write(amount, is_delete=kind == "delete")
        elif kind == "copy":
            self.copy(replica, amount)
        elif kind == "follow":
            self.copy(replica, self.leader.end)
        elif kind == "leave":
            self.leave(replica)
        elif kind == "clean":
            self.clean(replica, amount if amount % 2 else 0)
        elif kind == "cut":
            self.cut(replica, amount)
        elif kind == "wait":
            self.now_ms += amount
        elif kind == "age":
            self.age(amount)
        else:
            self.lead(replica)

    def check(self) -> None:
        for number in self.isr:
            replica = self.replicas[number]
            for key in range(KEYS):
                below = [value for other, value in self.written[: replica.end] if other == key]
                expected = below[-1] if below else None
                assert replica.latest(key) == expected, f"replica {number} has {replica.latest(key)} for {key}"


COPY_LEADS: list[Event] = [
    *(("put", 0, 0), ("follow", 1, 0), ("leave", 1, 0), ("delete", 0, 0), ("age", 0, 6)),
    *(("put", 0, 1), ("follow", 2, 0), ("lead", 2, 0), ("follow", 1, 0)),
]
"""Replica 2 is copied when the delete is gone, leads, and replica 1 comes back to it, which never saw the delete."""


@settings(max_examples=5 * settings().max_examples)
@given(EVENTS)
@example(events=COPY_LEADS)
def test_a_deleted_key_never_reappears(events: list[Event]) -> None:
    life = Life()
    for event in events:
        life.does(*event)
        life.check()
