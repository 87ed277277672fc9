"""What must hold of the cluster's metadata, checked against one replay of everything that was ever committed.

    valid            every image is (`ClusterImage.validate`)
    equal            controllers and brokers have, at an offset, the image that the committed entries make
    epochs           of brokers, leaders and partitions only rise; every change of a partition has an epoch of its own
    one leader       a leader epoch belongs to one incarnation of one broker
    clean            a leader comes from the ISR or the eligible leaders of the state before
    acknowledged     what was answered is committed, as it was answered: topics made and removed, configs, ISRs
    linearizable     an answer to a question shows every change that was acknowledged before it was asked
    deltas           come in order, each from the image before, and make the newer image of the older one

`advance` follows `RaftChecker.history`, record by record. Checks draw no random numbers and change nothing.
"""

from collections.abc import Callable
from uuid import UUID

from tidelog.metadata.delta import ImageDelta, apply_delta
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partitions import AlteredPartition, PartitionState
from tidelog.metadata.records import AbortDecision, BeginDecision, EndDecision, Record, decode_records
from tidelog.raft.messages import Entry, EntryKind

Key = tuple[UUID, int, int]


class MetadataChecker:
    def __init__(self, history: list[Entry], fail: Callable[[str, str], None]) -> None:
        self.images = [ClusterImage()]
        """After each number of committed entries."""
        self.states: dict[Key, tuple[Partition, ClusterImage]] = {}
        """(topic, partition, partition epoch) -> that state, and the image it came with."""
        self._history = history
        self._fail = fail
        self._open: list[Record] | None = None
        self._leaders: dict[Key, tuple[int, int]] = {}
        self._seen: list[tuple[str, int, ClusterImage]] = []
        self._seen_open: list[tuple[str, int, bool]] = []
        self._opens = [False]
        """After each number of committed entries: whether a large decision has begun and not ended."""
        self.compared = 0

    @property
    def image(self) -> ClusterImage:
        return self.images[-1]

    # What is committed.

    def advance(self) -> None:
        while len(self.images) <= len(self._history):
            self.images.append(self._after(self._history[len(self.images) - 1]))
            self._opens.append(self._open is not None)
        for who, offset, is_open in self._seen_open:
            if offset < len(self._opens) and self._opens[offset] != is_open:
                self._fail(who, f"has {'a' if is_open else 'no'} decision open at {offset}, unlike the log")
        self._seen_open = [seen for seen in self._seen_open if seen[1] >= len(self._opens)]
        if self._seen:
            waiting = []
            for who, offset, image in self._seen:
                if offset >= len(self.images):
                    waiting.append((who, offset, image))
                else:
                    self.compared += 1
                    expected = self.images[offset]
                    if image is not expected and image != expected:
                        self._fail(who, f"has another image than the log makes at {offset}")
            self._seen = waiting

    def _after(self, entry: Entry) -> ClusterImage:
        before = self.image
        if entry.kind is not EntryKind.DATA:
            return before
        whole: list[Record] = []
        for record in decode_records(entry.data):
            if isinstance(record, BeginDecision):
                if self._open is not None:
                    self._fail("log", "a decision begins inside of another")
                self._open = []
            elif isinstance(record, EndDecision):
                whole += self._open or []
                self._open = None
            elif isinstance(record, AbortDecision):
                self._open = None
            elif self._open is not None:
                self._open.append(record)
            else:
                whole.append(record)
        image = before
        for record in whole:
            newer = image.apply(record)
            self._check_step(image, newer)
            image = newer
        if image is not before:
            try:
                image.validate()
            except AssertionError as error:
                self._fail("log", f"the image after {len(self.images)} entries is not valid: {error}")
            self._check_leaders(image)
        return image

    def _check_step(self, older: ClusterImage, newer: ClusterImage) -> None:
        for number, broker in older.brokers.items():
            now = newer.brokers.get(number)
            if now is not None and now is not broker:
                if now.broker_epoch < broker.broker_epoch:
                    self._fail("log", f"broker {number} falls from epoch {broker.broker_epoch} to {now.broker_epoch}")
                if now.incarnation != broker.incarnation and now.broker_epoch == broker.broker_epoch:
                    self._fail("log", f"two incarnations of broker {number} have epoch {now.broker_epoch}")
        if newer.topics is older.topics:
            return
        for topic_id, topic in newer.topics.items():
            before = older.topics.get(topic_id)
            if topic is before:
                continue
            for number, partition in topic.partitions.items():
                former = None if before is None else before.partitions.get(number)
                if partition is not former:
                    self._check_partition(newer, topic_id, number, former, partition)
                    self._check_joined(newer, f"{topic_id}-{number}", former, partition)
                    self.states[topic_id, number, partition.partition_epoch] = (partition, newer)

    def _check_partition(
        self, newer: ClusterImage, topic_id: UUID, number: int, before: Partition | None, now: Partition
    ) -> None:
        if before is None:
            return
        who = f"{topic_id}-{number}"
        if now.partition_epoch <= before.partition_epoch or now.leader_epoch < before.leader_epoch:
            self._fail("log", f"{who}: epochs do not rise from {before} to {now}")
        if now.leader != before.leader:
            if now.leader_epoch == before.leader_epoch:
                self._fail("log", f"{who}: two leaders in epoch {now.leader_epoch}")
            # A leader's proposal may complete a reassignment: who joins by it leads at once, if the target says so.
            completes = bool(before.target) and not now.target and now.leader in before.target
            # Or it is the proposal of a leader that is leaving: who joins by it takes over at once.
            leaves = before.leader in now.isr and now.leader in now.isr and newer.brokers[before.leader].is_leaving
            joins = completes or leaves
            if now.leader >= 0 and now.leader not in (*before.isr, *before.eligible) and not joins:
                self._fail("log", f"{who}: broker {now.leader} leads, from outside of {before.isr}, {before.eligible}")

    def _check_joined(self, image: ClusterImage, who: str, before: Partition | None, now: Partition) -> None:
        """Who is leaving stays in what it was in, until its step, and joins or leads nothing new."""
        joined = set(now.isr).difference(() if before is None else before.isr)
        if now.leader >= 0 and (before is None or now.leader != before.leader):
            joined.add(now.leader)
        for broker in sorted(joined):
            if not image.brokers[broker].is_live:
                self._fail("log", f"{who}: broker {broker} joins or leads {now}, and is not live")

    def _check_leaders(self, image: ClusterImage) -> None:
        for topic_id, topic in image.topics.items():
            for number, partition in topic.partitions.items():
                if partition.leader >= 0:
                    owner = (partition.leader, image.brokers[partition.leader].broker_epoch)
                    known = self._leaders.setdefault((topic_id, number, partition.leader_epoch), owner)
                    if known != owner:
                        self._fail(
                            "log", f"{topic_id}-{number}: epoch {partition.leader_epoch} is of {known} and of {owner}"
                        )

    # What nodes have.

    def look(self, who: str, offset: int, image: ClusterImage, *, is_open: bool) -> None:
        """After an event that changed what a controller has applied."""
        self._seen.append((who, offset, image))
        self._seen_open.append((who, offset, is_open))
        self.advance()

    def seen(self, who: str, offset: int, image: ClusterImage) -> None:
        """A node has this image after so many entries."""
        self._seen.append((who, offset, image))

    def handed(self, who: str, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
        if apply_delta(older, delta) != newer:
            self._fail(who, "a delta does not make the newer image of the older one")

    # What was answered.

    def altered(self, who: str, asked: AlteredPartition, reply: PartitionState) -> None:
        """The reply to an in-sync set that a leader proposed."""
        if reply.error is not None:
            return
        found = self.states.get((asked.topic_id, asked.partition, reply.partition_epoch))
        if found is None:
            self._fail(who, f"its ISR change is acknowledged as {reply}, which is not committed")
            return
        partition, image = found
        if (partition.leader, partition.leader_epoch, partition.isr) != (reply.leader, reply.leader_epoch, reply.isr):
            self._fail(who, f"its ISR change is acknowledged as {reply}, committed is {partition}")
        steps = reply.partition_epoch - asked.partition_epoch
        if steps not in (0, 1):
            self._fail(who, f"an ISR of partition epoch {asked.partition_epoch} is taken in {reply.partition_epoch}")
        if steps == 1:
            for member, epoch in asked.isr:
                if image.brokers[member].broker_epoch != epoch:
                    self._fail(who, f"broker {member} is taken into an ISR in epoch {epoch}, which is over")

    def lost(self, who: str, broker: int, place: tuple[UUID, int], before: Partition, reported: int) -> None:
        """A broker's report of a damaged replica is acknowledged, with the partition epoch from which on it counts for
        nothing; `before` is what the broker saw when it asked."""
        found = self.states.get((*place, reported))
        if found is None:
            self._fail(
                who, f"its loss of {place} is acknowledged in partition epoch {reported}, which is not committed"
            )
            return
        now, _ = found
        if now.partition_epoch <= before.partition_epoch or now.leader_epoch <= before.leader_epoch:
            self._fail(who, f"its loss of {place} is acknowledged, and what was proposed on {before} may yet commit")
        if broker in (*now.isr, *now.eligible):
            self._fail(who, f"its loss of {place} is acknowledged, and it counts in {now}")

    def registered(self, who: str, broker: int, broker_epoch: int) -> None:
        found = self.image.brokers.get(broker)
        if found is None or found.broker_epoch < broker_epoch:
            self._fail(who, f"its registration in epoch {broker_epoch} is acknowledged, and not committed")
