"""Any sequence of requests leaves a valid image, loses nothing acknowledged, and reads the same from log and snapshot.

A history is a list of small numbers that pick operations and their arguments against the state at that moment, so that
most of them mean something. `Holders` is the model beside it: which replicas have every acknowledged record. After each
step every partition that can take writes takes one, so the holders are then exactly its in-sync set; a broker that is
elected cleanly must be one of them.
"""

from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.metadata.controller import Cluster, directory

from tidelog.metadata.acls import AclBinding, AclFilter, CreateAcls, DeleteAcls
from tidelog.metadata.brokers import Drain, Unregister
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.configs import is_page_cache, is_unclean_allowed, min_isr
from tidelog.metadata.delta import apply_delta, delta_between, for_broker
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partitions import AssignDirectories, BalanceLeaders, ElectLeaders
from tidelog.metadata.producer_ids import AllocateProducerIdBlock
from tidelog.metadata.quotas import AlterQuotas, QuotaChange
from tidelog.metadata.reassignments import AlterReassignments, GrowInternalTopics, ReassignmentTarget
from tidelog.metadata.records import NO_LEADER, decode_records
from tidelog.metadata.recovering_replicas import ReplicasRecovered
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import decode_snapshot, snapshot_bytes
from tidelog.metadata.topics import AddPartitions, AdvanceLogStart, DeleteTopics, LogStartAdvance, NewPartitions
from tidelog.metadata.users import AlterUsers, UserChange
from tidelog.model.errors import TidelogError

BROKERS = 6
NAMES = ("a", "b", "c", "__consumer_offsets")


class Holders:
    """(topic, partition) -> the brokers that hold every acknowledged record."""

    def __init__(self) -> None:
        self.of: dict[tuple[UUID, int], set[int]] = {}

    def follow(
        self,
        before: ClusterImage,
        after: ClusterImage,
        *,
        unclean: bool = False,
        caught_up: tuple[UUID, int, tuple[int, ...]] | None = None,
    ) -> None:
        """`caught_up`: replicas of a partition that had reached its leader's end when the leader proposed them."""
        if caught_up is not None and before.partition(*caught_up[:2]) != after.partition(*caught_up[:2]):
            self.of[caught_up[:2]].update(caught_up[2])
        for topic_id, topic in after.topics.items():
            for number, partition in topic.partitions.items():
                key = (topic_id, number)
                old = before.partition(topic_id, number)
                if old is None:
                    self.of[key] = set(partition.replicas)  # nothing is in it yet
                holders = self.of[key]
                if old is not None and holders & set(old.replicas):
                    assert holders & set(partition.replicas), "the last replica with the records was dropped"
                if partition.leader != NO_LEADER and (old is None or old.leader != partition.leader):
                    if partition.leader not in holders:
                        assert unclean or is_unclean_allowed(after, topic_id), "elected without the records"
                        holders.clear()
                    holders.add(partition.leader)
                assert set(partition.isr) <= holders, "in sync without the records"
                assert set(partition.eligible) <= holders, "eligible without the records"
                if partition.leader != NO_LEADER and len(partition.isr) >= min_isr(after, topic_id, partition):
                    self.of[key] = set(partition.isr)  # a write is acknowledged
        self.of = {key: held for key, held in self.of.items() if after.partition(*key) is not None}

    def lose(self, image: ClusterImage, broker: int, is_lost: Callable[[UUID, int], bool]) -> None:
        for topic_id, number, _ in image.partitions_on(broker):
            if is_lost(topic_id, number):
                self.of[topic_id, number].discard(broker)


class History:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.holders = Holders()
        self.images: list[tuple[int, ClusterImage]] = []
        self.hidden: set[tuple[UUID, int, int]] = set()
        """(topic, partition, broker): damaged, and only that broker will know, when it has opened its log."""

    def ask(self, request: object, *, unclean: bool = False) -> None:
        """A refusal is as good as an answer; `Cluster.ask` checks the image either way."""
        before = self.cluster.image
        try:
            self.cluster.ask(request)
        except TidelogError:
            assert self.cluster.image is before
        self.holders.follow(before, self.cluster.image, unclean=unclean)

    def step(self, operation: int, x: int, y: int, z: int) -> None:
        self.images.append((len(self.cluster.log), self.cluster.image))
        OPERATIONS[operation % len(OPERATIONS)](self, x, y, z)
        for topic_id, number, broker in sorted(self.hidden):
            partition = self.cluster.image.partition(topic_id, number)
            if partition is None or broker not in partition.replicas:
                self.hidden.discard((topic_id, number, broker))
            else:
                assert broker not in (partition.leader, *partition.isr), "its log was not open"

    # Brokers.

    def start(self, x: int, y: int, z: int) -> None:
        """A broker comes, new or again: after a clean stop, a crash, with a swapped disk, with lost replicas."""
        cluster, broker = self.cluster, x % BROKERS
        image = cluster.image
        known = image.brokers.get(broker)
        if known is not None and not known.fenced:
            return
        how = y % 4
        directories = (directory(broker, z % 2),) if how == 3 else known.directories if known else (directory(broker),)
        hosted = [(topic_id, number) for topic_id, number, _ in image.partitions_on(broker)]
        is_recovering = y >= 4
        hidden = {(topic_id, number) for topic_id, number, holder in self.hidden if holder == broker}
        lost = tuple(hosted[:1]) if how == 2 else ()
        lost += () if is_recovering else tuple(sorted(hidden))
        self.hidden -= {(*place, broker) for place in hidden}
        clean = known.broker_epoch if known is not None and how == 0 else -1

        def is_lost(topic_id: UUID, number: int) -> bool:
            partition = image.partition(topic_id, number)
            assert partition is not None
            return (
                (topic_id, number) in lost
                or partition.directory_of(broker) not in directories
                or (clean < 0 and is_page_cache(image, topic_id))
            )

        self.holders.lose(image, broker, is_lost)
        cluster.register(
            broker,
            rack=f"r{broker % 3}",
            directories=directories,
            clean_stop_epoch=clean,
            lost=lost,
            is_recovering=is_recovering,
        )
        marked = [(t, n) for t, n, found in cluster.image.partitions_on(broker) if broker in found.recovering]
        self.hidden.update((*place, broker) for place in (marked if z % 2 else marked[:1]) if is_recovering)
        self.holders.follow(image, cluster.image)
        if z % 5:
            self.beat(broker, 0, 0)

    def beat(self, x: int, y: int, z: int) -> None:
        broker = x % BROKERS
        if broker in self.cluster.image.brokers:
            before = self.cluster.image
            directories = before.brokers[broker].directories if y % 3 == 1 else ()
            full = before.brokers[broker].directories if y % 3 == 2 else ()
            self.cluster.beat(
                broker,
                stalled_directories=directories,
                full_directories=full,
                wants_fence=z % 7 == 6,
                wants_shutdown=z % 7 == 5,
            )
            self.holders.follow(before, self.cluster.image)

    def opened(self, x: int, y: int, z: int) -> None:
        """A broker has opened one of the logs that it was recovering: sound, or damaged."""
        before, broker = self.cluster.image, x % BROKERS
        marked = [(t, n) for t, n, found in before.partitions_on(broker) if broker in found.recovering]
        if not marked:
            return
        place, epoch = marked[y % len(marked)], before.brokers[broker].broker_epoch
        if (*place, broker) in self.hidden:
            self.hidden.discard((*place, broker))
            self.holders.lose(before, broker, lambda *found: found == place)
            self.ask(ReplicasLost(broker=broker, broker_epoch=epoch, replicas=(place,)))
        else:
            self.ask(ReplicasRecovered(broker=broker, broker_epoch=epoch, replicas=(place,)))

    def crash(self, x: int, y: int, z: int) -> None:
        if x % BROKERS in self.cluster.image.brokers:
            before = self.cluster.image
            self.cluster.crash(x % BROKERS)
            self.holders.follow(before, self.cluster.image)

    def drain(self, x: int, y: int, z: int) -> None:
        self.ask(Drain(broker=x % BROKERS, on=y % 2 == 0))

    def unregister(self, x: int, y: int, z: int) -> None:
        self.ask(Unregister(broker=x % BROKERS))

    # Topics and partitions.

    def create(self, x: int, y: int, z: int) -> None:
        before = self.cluster.image
        settings = (("flush.mode", "page-cache"),) if z % 3 == 2 else ()
        self.cluster.create(NAMES[x % len(NAMES)], 1 + y % 4, 1 + z % 4, configs=settings)
        self.holders.follow(before, self.cluster.image)

    def delete(self, x: int, y: int, z: int) -> None:
        self.ask(DeleteTopics(names=(NAMES[x % len(NAMES)],)))

    def grow(self, x: int, y: int, z: int) -> None:
        self.ask(AddPartitions(topics=(NewPartitions(name=NAMES[x % len(NAMES)], total=y % 8),)))
        self.ask(GrowInternalTopics())

    def chosen(self, x: int, y: int) -> tuple[str, int] | None:
        names = sorted(self.cluster.image.topic_ids)
        if not names:
            return None
        name = names[x % len(names)]
        topic = self.cluster.image.topic_named(name)
        assert topic is not None
        return name, y % len(topic.partitions)

    def propose(self, x: int, y: int, z: int) -> None:
        """The leader proposes some in-sync set: bits of `z` over the replicas, now and then with a stale epoch."""
        found = self.chosen(x, y)
        if found is None:
            return
        partition = self.cluster.partition(*found)
        if partition.leader == NO_LEADER:
            return
        isr = tuple(b for at, b in enumerate(partition.replicas) if b == partition.leader or z >> at & 1)
        stale = {"partition_epoch": partition.partition_epoch - 1} if z % 11 == 10 else {}
        before = self.cluster.image
        state = self.cluster.propose(found[0], isr, found[1], **stale)
        assert not stale or state.error is not None, "a stale proposal was taken"
        here = (before.topic_ids[found[0]], found[1], isr)
        self.holders.follow(before, self.cluster.image, caught_up=here)

    def elect(self, x: int, y: int, z: int) -> None:
        found = self.chosen(x, y)
        kind = "unclean" if z % 3 == 0 else "preferred"
        partitions = None if z % 2 or found is None else (found,)
        self.ask(ElectLeaders(kind=kind, partitions=partitions), unclean=kind == "unclean")
        self.ask(BalanceLeaders())

    def reassign(self, x: int, y: int, z: int) -> None:
        found = self.chosen(x, y)
        if found is None:
            return
        rotated = [(z + at) % BROKERS for at in range(BROKERS)]
        replicas = None if z % 5 == 0 else tuple(rotated[: 1 + z // 8 % 4])
        self.ask(
            AlterReassignments(partitions=(ReassignmentTarget(topic=found[0], partition=found[1], replicas=replicas),))
        )

    def catch_up(self, x: int, y: int, z: int) -> None:
        """Every live replica of a topic is in sync: reassignments end."""
        for number in range(4):
            found = self.chosen(x, number)
            if found is not None and self.cluster.partition(*found).leader != NO_LEADER:
                partition = self.cluster.partition(*found)
                brokers = self.cluster.image.brokers
                able = tuple(b for b in partition.replicas if brokers[b].is_live and not brokers[b].offline)
                before = self.cluster.image
                self.cluster.propose(found[0], able, found[1])
                here = (before.topic_ids[found[0]], found[1], able)
                self.holders.follow(before, self.cluster.image, caught_up=here)

    def trim(self, x: int, y: int, z: int) -> None:
        found = self.chosen(x, y)
        if found is not None and self.cluster.partition(*found).leader != NO_LEADER:
            partition = self.cluster.partition(*found)
            epoch = self.cluster.image.brokers[partition.leader].broker_epoch
            item = LogStartAdvance(
                topic_id=self.cluster.image.topic_ids[found[0]],
                partition=found[1],
                leader_epoch=partition.leader_epoch,
                start_offset=z - 3,
            )
            self.ask(AdvanceLogStart(broker=partition.leader, broker_epoch=epoch, partitions=(item,)))

    def move(self, x: int, y: int, z: int) -> None:
        found = self.chosen(x, y)
        if found is not None:
            broker = self.cluster.partition(*found).replicas[0]
            known = self.cluster.image.brokers[broker]
            topic_id = self.cluster.image.topic_ids[found[0]]
            rows = ((topic_id, found[1], known.directories[0]),)
            self.ask(AssignDirectories(broker=broker, broker_epoch=known.broker_epoch, replicas=rows))

    # Settings.

    def configure(self, x: int, y: int, z: int) -> None:
        changes = (
            ConfigChange(key="min.insync.replicas", operation="set", value=str(1 + z % 3)),
            ConfigChange(key="min.insync.replicas", operation="delete"),
            ConfigChange(key="unclean.leader.election.enable", operation="set", value="true" if z % 2 else "false"),
            ConfigChange(key="unclean.leader.election.enable", operation="delete"),
        )
        kind, name = ("cluster", "") if x % 3 == 0 else ("topic", NAMES[x % len(NAMES)])
        resource = ResourceChange(resource_type=kind, resource=name, changes=(changes[y % len(changes)],))
        self.ask(AlterConfigs(resources=(resource,)))

    def store(self, x: int, y: int, z: int) -> None:
        """Quotas, users, ACLs, producer ids: small state that comes and goes."""
        user = f"user-{x % 3}"
        value = None if z % 3 == 0 else float(z + 1)
        change = QuotaChange(entity=(("user", user if y % 2 else None),), values=(("producer_byte_rate", value),))
        self.ask(AlterQuotas(changes=(change,)))
        credential = UserChange(user=user, mechanism="SCRAM-SHA-256")
        if z % 2:
            credential = UserChange(
                user=user, mechanism="SCRAM-SHA-256", salt=bytes(12), salted_password=bytes(32), iterations=4096
            )
        self.ask(AlterUsers(changes=(credential,)))
        binding = AclBinding(resource_type="topic", resource="t", principal=f"User:{user}", operation="read")
        if y % 3:
            self.ask(CreateAcls(bindings=(binding,)))
        else:
            self.ask(DeleteAcls(filters=(AclFilter(principal=f"User:{user}"),)))
        broker = self.cluster.image.brokers.get(x % BROKERS)
        if broker is not None:
            self.ask(AllocateProducerIdBlock(broker=broker.broker, broker_epoch=broker.broker_epoch))


OPERATIONS: tuple[Callable[[History, int, int, int], None], ...] = (
    History.start,
    History.start,
    History.start,
    History.beat,
    History.beat,
    History.crash,
    History.crash,
    History.drain,
    History.unregister,
    History.create,
    History.create,
    History.create,
    History.delete,
    History.grow,
    History.propose,
    History.propose,
    History.propose,
    History.propose,
    History.elect,
    History.reassign,
    History.reassign,
    History.catch_up,
    History.trim,
    History.move,
    History.configure,
    History.store,
    History.opened,
    History.opened,
)

steps = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 11), st.integers(0, 11), st.integers(0, 63)),
    max_size=60,
)


def lived(operations: list[tuple[int, int, int, int]], *, brokers: int = 4) -> History:
    history = History()
    for broker in range(brokers):
        history.step(0, broker, 0, 1)
    for operation in operations:
        history.step(*operation)
    return history


@pytest.mark.requirement("a:B-53", "a:B-65", "b:E-20", "b:E-22")
@given(steps)
def test_any_sequence_of_requests_leaves_a_valid_image_and_loses_nothing(
    operations: list[tuple[int, int, int, int]],
) -> None:
    # `Cluster.ask` validates the image and its epochs after each request, `Holders` who is elected.
    history = lived(operations)
    history.cluster.image.validate()


@pytest.mark.requirement("a:B-53")
@given(steps)
def test_reading_the_log_gives_the_image_that_was_lived(operations: list[tuple[int, int, int, int]]) -> None:
    history = lived(operations)
    run_steps = Replay(ClusterImage())
    one_by_one = ClusterImage()
    for entry in history.cluster.log:
        run_steps.apply(decode_records(entry))
        for record in decode_records(entry):
            one_by_one = one_by_one.apply(record)
    assert run_steps.image == history.cluster.image
    assert one_by_one == history.cluster.image


@given(steps)
def test_an_image_comes_back_from_its_snapshot(operations: list[tuple[int, int, int, int]]) -> None:
    image = lived(operations).cluster.image
    data = snapshot_bytes(image)
    back = decode_snapshot(data)
    assert back.image == image
    assert back.pending is None
    back.image.validate()
    assert snapshot_bytes(back.image) == data, "and makes the same bytes again"


@given(steps, st.integers(0, 1000))
def test_a_delta_leads_from_the_older_image_to_the_newer(
    operations: list[tuple[int, int, int, int]], back: int
) -> None:
    history = lived(operations)
    end, older = history.images[back % len(history.images)]
    newer = history.cluster.image
    delta = delta_between(older, newer)
    assert apply_delta(older, delta) == newer
    between = [record for entry in history.cluster.log[end:] for record in decode_records(entry)]
    assert delta_between(older, newer, between) == delta
    assert delta_between(newer, newer).is_empty
    for broker in range(BROKERS):
        mine = for_broker(delta, older, broker)
        reported = {(p.topic_id, p.number) for p in (*mine.led, *mine.followed, *mine.leaderless)}
        hosted = {(topic_id, number): p for topic_id, number, p in newer.partitions_on(broker)}
        assert reported <= hosted.keys()
        for (topic_id, number), partition in hosted.items():
            assert ((topic_id, number) in reported) == (older.partition(topic_id, number) != partition)
        before = {(topic_id, number) for topic_id, number, _ in older.partitions_on(broker)}
        assert set(mine.dropped) == before - hosted.keys()


@given(steps, st.integers(1, 400))
def test_a_decision_in_parts_is_seen_whole_or_not_at_all(
    operations: list[tuple[int, int, int, int]], part_bytes: int
) -> None:
    """Begin and end around small parts: the image in between is the one before."""
    history = lived(operations[:30])
    image = ClusterImage()
    split = Cluster()
    split.log.clear()
    split.replay = Replay(image)
    for entry in history.cluster.log:
        split.log_records(decode_records(entry), bytes_max=part_bytes)
    assert split.image == history.cluster.image
    replay = Replay(image)
    for at, entry in enumerate(split.log):
        held = replay.image
        after = replay.apply(decode_records(entry))
        if replay.is_open:
            assert after is held
            resumed = decode_snapshot(snapshot_bytes(replay.image, tuple(replay.pending or ())))
            assert resumed.pending == tuple(replay.pending or ())
            if at % 7 == 0:
                replay = Replay(resumed.image, resumed.pending)
    assert replay.image == history.cluster.image
