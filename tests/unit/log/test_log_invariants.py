"""A broken log is named: by `validate`, by an audit of its files, by the shadow of its replica."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from simulation.broker_checker import ReplicaChecker
from simulation.log_audit import LogAudit
from simulation.log_walk import device_of, image_of
from simulation.replica_shadow import ReplicaShadows
from support.brokers.leader_states import ack, leader, partition
from support.logs.single_log import LOG_ID, SMALL, idempotent, open_log

from tidelog.log.batch import read_header, stamp
from tidelog.log.damage import Damage
from tidelog.log.log import Log
from tidelog.log.segment import INDEX
from tidelog.model.ids import Offset
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.messages import Ended, Reason
from tidelog.replication.partition import FollowerState
from tidelog.replication.replica import Replica, ackable_end
from tidelog.world.simulated import SimNode


async def written(node: SimNode, count: int = 30) -> Log:
    """Synced, in several segments, with epochs of ten records and a stored recovery point."""
    log = await open_log(node)
    for sequence in range(count):
        log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=sequence // 10)
    await log.checkpoint()
    return log


def lower_end(log: Log) -> None:
    log.segments.end_offset -= 1


def lower_durable_end(log: Log) -> None:
    log.durability.durable_end -= 1


def forget_segment(log: Log) -> None:
    del log.segments.sealed[1]


def move_active(log: Log) -> None:
    log.segments.sealed.pop()


def add_epoch(log: Log) -> None:
    log.epochs._epochs.append(9)
    log.epochs._starts.append(99)


def repeat_epoch(log: Log) -> None:
    log.epochs._epochs[0] = log.epochs._epochs[1]


def raise_start(log: Log) -> None:
    log._offsets.set_start(31)


def lose_first_segment(log: Log) -> None:
    del log.segments.sealed[0]


def add_snapshot(log: Log) -> None:
    log.snapshots.append(99)


def raise_high_watermark(log: Log) -> None:
    log.durability.generation += 1
    log.segments.changed()
    log.set_high_watermark(Offset(31))


def keep_version(log: Log) -> None:
    log.durability.generation += 1


def index_past_end(log: Log) -> None:
    log.segments.active.index.largest_offset = 77


def damage_past_end(log: Log) -> None:
    log.damage_state.current = Damage(Offset(31), "a test")


def swap_producers(log: Log) -> None:
    log.producers._pending.append((3, 40))


BROKEN: tuple[tuple[Callable[[Log], None], str], ...] = (
    (lower_end, "past the end|durable|index entry"),
    (lower_durable_end, "durable up to 29"),
    (forget_segment, "is followed by"),
    (move_active, "is followed by|no segment"),
    (add_epoch, "past the log end 30"),
    (repeat_epoch, "epochs not ascending"),
    (raise_start, "start 31, end 30"),
    (lose_first_segment, "no segment for the start offset|is followed by"),
    (add_snapshot, "a snapshot past"),
    (raise_high_watermark, "the high watermark is 31"),
    (keep_version, "readers do not see that the log was truncated"),
    (index_past_end, "the largest timestamp is at 77 of 30"),
    (damage_past_end, "good up to 31 of 30"),
    (swap_producers, "a marker past the end"),
)


@pytest.mark.parametrize(("break_log", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
async def test_validate_names_a_broken_part_of_the_log(
    node: SimNode, break_log: Callable[[Log], None], message: str
) -> None:
    log = await written(node)
    log.validate()
    break_log(log)
    with pytest.raises(AssertionError, match=message):
        log.validate()


async def test_the_cheap_validation_sees_ends_that_disagree(node: SimNode) -> None:
    log = await written(node)
    log.validate(thorough=False)
    log.durability.durable_end -= 1
    with pytest.raises(AssertionError, match="durable up to 29"):
        log.validate(thorough=False)


async def test_an_idle_group_commit_with_a_waiting_log_is_named(node: SimNode) -> None:
    log = await written(node)
    log.group_commit.validate()
    log.group_commit._next.logs[log] = None
    with pytest.raises(AssertionError, match="no task runs"):
        log.group_commit.validate()


# Audits.


async def test_an_audit_continues_where_it_stopped(node: SimNode) -> None:
    log = await written(node)
    audit = LogAudit(log)
    assert (audit.run(), audit.run()) == (30, 0)
    log.append(idempotent(30), leader_epoch=3)
    assert audit.run() == 1
    await log.truncate(25)
    assert audit.run() == 25, "after a truncation it begins again"


def other_epoch(log: Log) -> None:
    log.epochs._starts[1] += 1


def add_producer(log: Log) -> None:
    data = bytearray(idempotent(7, producer=99))
    stamp(data, base_offset=29, leader_epoch=2)
    log.producers.apply(read_header(data), now_ms=0)


def lose_index_entry(log: Log) -> None:
    path = log.segments.file_path(log.segments.first_offset, INDEX)
    device_of(log).overwrite(path, 3, b"\x09")


def cut_file(log: Log) -> None:
    device_of(log).cut(log.segments.file_path(log.segments.first_offset), 100)


def forget_bytes_on_device(log: Log) -> None:
    del image_of(log, log.segments.active.base_offset, durable=True)[10:]


AUDITED: tuple[tuple[Callable[[Log], None], str], ...] = (
    (other_epoch, "is of epoch 1; the history says 0"),
    (add_producer, "knows producer 99, of whom it has nothing"),
    (lose_index_entry, "the index of 0 has"),
    (cut_file, "ends at 30, its files at"),
    (forget_bytes_on_device, "bytes are on the device"),
)


@pytest.mark.parametrize(("break_log", "message"), AUDITED, ids=[each.__name__ for each, _ in AUDITED])
async def test_an_audit_names_what_the_files_do_not_show(
    node: SimNode, break_log: Callable[[Log], None], message: str
) -> None:
    log = await written(node)
    LogAudit(log).run()
    break_log(log)
    with pytest.raises(AssertionError, match=message):
        LogAudit(log).run()


# Shadows.


class Broker:
    """What a shadow sees of a broker with one replica that follows."""

    def __init__(self, log: Log, broker: int = 1) -> None:
        self.name = f"b{broker}"
        self.agent = SimpleNamespace(broker=broker)
        self.logs = SimpleNamespace(recovering=0)
        self.looked: dict[Replica, tuple[object, int, int]] = {}
        self.findings: list[str] = []
        self.replica = self.new_replica(log)
        self.replicas = SimpleNamespace(all=lambda: [self.replica])

    def new_replica(self, log: Log) -> Replica:
        replica = self.replica = Replica(LOG_ID, "orders", partition((1, 2, 3), leader=2))
        replica.log = log
        state = FollowerState(
            leader=2, leader_epoch=5, log_end=log.end_offset, durable_end=ackable_end(log), high_watermark=Offset(0)
        )
        replica.role = FollowerReplica(None, replica, log, state)  # type: ignore[arg-type]  # it does not act
        return replica

    def shadows(self) -> ReplicaShadows:
        return ReplicaShadows(lambda _, what: self.findings.append(what), lambda _: None, {})


async def refilled(log: Log) -> Log:
    for sequence in range(30):
        log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=5)
    await log.checkpoint()
    return log


async def reopened(node: SimNode, log: Log, *, offset: int | None = None) -> Log:
    """The log of the next process, which finds it truncated without a word to anybody."""
    await log.close()
    if offset is not None:
        cut = await open_log(node)
        await cut.truncate(offset)
        await cut.close()
    return await open_log(node)


async def test_a_replica_that_comes_back_with_all_that_it_acknowledged_is_fine(node: SimNode) -> None:
    broker = Broker(await written(node))
    shadows = broker.shadows()
    shadows.look(broker, broker.replica)  # type: ignore[arg-type]
    shadows.look(broker, broker.new_replica(await reopened(node, broker.replica.log)))  # type: ignore[arg-type]
    assert (broker.findings, shadows.compared, shadows.excused) == ([], 1, 0)


async def test_a_replica_that_comes_back_with_less_than_it_acknowledged_is_named(node: SimNode) -> None:
    broker = Broker(await written(node))
    shadows = broker.shadows()
    shadows.look(broker, broker.replica)  # type: ignore[arg-type]
    log = await reopened(node, broker.replica.log, offset=20)  # type: ignore[arg-type]
    shadows.look(broker, broker.new_replica(log))  # type: ignore[arg-type]
    assert "has acknowledged up to 30, and is opened with 20" in broker.findings[0]


async def test_a_replica_that_was_ordered_to_truncate_may_come_back_with_less(node: SimNode) -> None:
    broker = Broker(await written(node))
    shadows = broker.shadows()
    shadows.look(broker, broker.replica)  # type: ignore[arg-type]
    assert isinstance(broker.replica.role, FollowerReplica)
    broker.replica.role.required_change = Ended(number=1, reason=Reason.DIVERGED, epoch=1, offset=20)
    log = await reopened(node, broker.replica.log, offset=20)  # type: ignore[arg-type]
    shadows.look(broker, broker.new_replica(log))  # type: ignore[arg-type]
    assert (broker.findings, shadows.excused) == ([], 1)


async def test_a_replica_that_a_process_truncated_and_ended_may_come_back_with_less(node: SimNode) -> None:
    broker = Broker(await written(node))
    shadows = broker.shadows()
    first = broker.replica
    shadows.begin_process(1, SimpleNamespace(all=lambda: [first]))  # type: ignore[arg-type]
    shadows.look(broker, first)  # type: ignore[arg-type]
    assert first.log is not None
    await first.log.truncate(Offset(20))
    log = await reopened(node, first.log)
    shadows.begin_process(1, SimpleNamespace(all=list))  # type: ignore[arg-type]
    shadows.look(broker, broker.new_replica(log))  # type: ignore[arg-type]
    assert (broker.findings, shadows.excused) == ([], 1)


async def test_a_replica_whose_partition_was_moved_away_and_back_may_come_back_with_less(node: SimNode) -> None:
    """Seed 600132 (groups): its log was removed and created again while nobody looked."""
    broker = Broker(await written(node))
    shadows = broker.shadows()
    shadows.look(broker, broker.replica)  # type: ignore[arg-type]
    shadows.unassigned(1, LOG_ID)
    log = await reopened(node, broker.replica.log, offset=0)  # type: ignore[arg-type]
    shadows.look(broker, broker.new_replica(log))  # type: ignore[arg-type]
    assert (broker.findings, shadows.excused) == ([], 1)
    shadows.look(broker, broker.new_replica(await refilled(log)))  # type: ignore[arg-type]
    log = await reopened(node, log, offset=20)
    shadows.look(broker, broker.new_replica(log))  # type: ignore[arg-type]
    assert "has acknowledged up to 30, and is opened with 20" in broker.findings[0], "it is excused once"


async def test_a_leader_counts_what_a_follower_announces_after_a_change_of_its_log(node: SimNode) -> None:
    """Seed 600062 (brokers): a group commit ended while the follower stored the leader's lineage, and the durable end
    was sent with the next subscription; nobody had looked at it."""
    broker = Broker(await written(node), broker=2)
    checker = ReplicaChecker(lambda _, what: broker.findings.append(what), lambda _: None)
    role = broker.replica.role
    assert isinstance(role, FollowerReplica)
    role.state.durable_end = Offset(20)
    checker.look(broker)  # type: ignore[arg-type]
    role.durable()
    checker.look(broker)  # type: ignore[arg-type]
    state = leader((1, 2), end=40)
    leading = SimpleNamespace(state=state, replica=broker.replica, log=broker.replica.log, leader_epoch=5)
    for end in (30, 31):
        ack(state, 2, end)
        assert broker.findings == [], "31 was not looked at yet"
        checker.shadows.advanced(broker, leading)  # type: ignore[arg-type]
    assert "counts broker 2 as durable up to 31, which has announced 30 in epoch 5" in broker.findings[0]


async def test_a_replica_that_counts_what_its_device_does_not_have_is_named(node: SimNode) -> None:
    log = await written(node)
    broker = Broker(log)
    forget_bytes_on_device(log)
    broker.shadows().look(broker, broker.replica)  # type: ignore[arg-type]
    assert "counts as synced up to 30, and its device has batches up to" in broker.findings[0]
    assert SMALL.segment_bytes < log.size, "it has several segments"
