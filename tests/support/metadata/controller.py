"""A controller with its log, for tests: requests in, replies out, and after each step everything that must hold.

`Cluster.ask` decides on the image, writes the records as entries of a log (through their real encoding) and applies
what it reads back. It checks after every request that the image is valid, that epochs only rise, and that nothing of a
refused request is left.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from tidelog.metadata.brokers import Fence, Heartbeat, Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.decision import Context, Decision
from tidelog.metadata.features import bootstrap_records, supported
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.log_ends import LogEnds
from tidelog.metadata.partitions import AlteredPartition, AlterPartition, PartitionState
from tidelog.metadata.records import decode_records, split_decision
from tidelog.metadata.replay import Replay
from tidelog.metadata.requests import decode_reply, decode_request, encode_reply, encode_request
from tidelog.metadata.topics import CreatedTopic, CreateTopics, NewTopic
from tidelog.model.errors import TidelogError

CLUSTER_ID = "test-cluster"


def directory(broker: int, number: int = 0) -> UUID:
    return UUID(int=(broker + 1) << 32 | number + 1)


class Cluster:
    """One controller that is always active."""

    def __init__(self, brokers: int = 0, *, racks: dict[int, str] | None = None, seed: int = 1) -> None:
        self.controller = Controller(CLUSTER_ID)
        self.random = random.Random(seed)
        self.log_ends = LogEnds()
        self.log: list[bytes] = []
        self.replay = Replay(ClusterImage())
        self.log_records(bootstrap_records())
        for broker in range(brokers):
            self.start(broker, rack=(racks or {}).get(broker))

    @property
    def image(self) -> ClusterImage:
        return self.replay.image

    def context(self) -> Context:
        return Context(now_ms=0, random=self.random, next_offset=len(self.log), log_ends=self.log_ends)

    def log_records(self, records: Any, bytes_max: int = 8 << 20) -> None:
        if records:
            for entry in split_decision(records, name="test", bytes_max=bytes_max):
                self.log.append(entry)
                self.replay.apply(decode_records(entry))

    def decide(self, request: object) -> Decision[Any]:
        return self.controller.decide(self.image, decode_request(encode_request(request)), self.context())

    def ask(self, request: object) -> Any:
        """The reply, both ways through the wire's encoding; raises the refusal."""
        before = self.image
        decision = self.decide(request)
        speculative = before.apply_all(decision.records)
        assert decision.image is None or decision.image == speculative, "a decision knows what it makes"
        self.log_records(decision.records)
        assert self.image == speculative, "living it and reading it from the log is the same"
        self.image.validate()
        check_epochs(before, self.image)
        return decode_reply(encode_reply(decision.reply))

    def refused(self, request: object) -> TidelogError:
        """The refusal of this request; it has a sentence, and nothing has changed."""
        before = self.image
        with pytest.raises(TidelogError, match=r".") as refusal:
            self.ask(request)
        assert self.image is before, "a refusal changes nothing"
        return refusal.value

    # The life of brokers.

    def register(self, broker: int, **more: Any) -> int:
        fields: dict[str, Any] = {
            "cluster_id": CLUSTER_ID,
            "broker": broker,
            "incarnation": UUID(int=self.random.getrandbits(128), version=4),
            "endpoints": (("CLIENT", "PLAINTEXT", f"host-{broker}", 9092),),
            "directories": (directory(broker),),
            "features": supported(),
        }
        reply = self.ask(Register(**{**fields, **more}))
        assert isinstance(reply.broker_epoch, int)
        return reply.broker_epoch

    def beat(self, broker: int, **more: Any) -> Any:
        fields: dict[str, Any] = {"broker_epoch": self.image.brokers[broker].broker_epoch}
        fields["metadata_offset"] = len(self.log)
        return self.ask(Heartbeat(broker=broker, **{**fields, **more}))

    def start(self, broker: int, **more: Any) -> int:
        """Registers and is unfenced; of a broker that was here before: after a clean stop, unless said otherwise."""
        known = self.image.brokers.get(broker)
        if known is not None:
            more = {"rack": known.rack, "clean_stop_epoch": known.broker_epoch, **more}
        epoch = self.register(broker, **more)
        assert not self.beat(broker).is_fenced
        return epoch

    def crash(self, broker: int) -> None:
        self.ask(Fence(broker=broker, broker_epoch=self.image.brokers[broker].broker_epoch))

    def stop(self, broker: int) -> None:
        assert self.beat(broker, wants_shutdown=True).may_shut_down

    # Topics.

    def create(self, name: str, partitions: int = -1, replication_factor: int = -1, **more: Any) -> CreatedTopic:
        topic = NewTopic(name=name, partitions=partitions, replication_factor=replication_factor, **more)
        (created,) = self.ask(CreateTopics(topics=(topic,))).topics
        assert isinstance(created, CreatedTopic)
        return created

    def made(self, name: str, *assignment: tuple[int, ...], **configs: str) -> UUID:
        """A topic with these replicas; config keys with underscores for dots."""
        pairs = tuple((key.replace("_", "."), value) for key, value in configs.items())
        created = self.create(name, assignment=assignment, configs=pairs)
        assert created.error is None, created.message
        return created.topic_id

    def partition(self, name: str, number: int = 0) -> Partition:
        topic = self.image.topic_named(name)
        assert topic is not None
        return topic.partitions[number]

    def propose(self, name: str, members: tuple[int, ...], number: int = 0, **more: Any) -> PartitionState:
        """The leader proposes this in-sync set."""
        partition = self.partition(name, number)
        broker = more.pop("broker", partition.leader)
        epochs = self.image.brokers
        item: dict[str, Any] = {
            "topic_id": self.image.topic_ids[name],
            "partition": number,
            "leader_epoch": partition.leader_epoch,
            "partition_epoch": partition.partition_epoch,
            "isr": tuple((member, epochs[member].broker_epoch if member in epochs else 0) for member in members),
        }
        request = AlterPartition(
            broker=broker,
            broker_epoch=epochs[broker].broker_epoch,
            partitions=(AlteredPartition(**{**item, **more}),),
        )
        (state,) = self.ask(request).partitions
        assert isinstance(state, PartitionState)
        return state


def check_epochs(before: ClusterImage, after: ClusterImage) -> None:
    """Epochs only rise, one leader per epoch, a partition epoch for each change."""
    for topic_id, topic in before.topics.items():
        now = after.topics.get(topic_id)
        if now is None or now is topic:
            continue
        for number, old in topic.partitions.items():
            new = now.partitions[number]
            if new == old:
                continue
            assert new.partition_epoch > old.partition_epoch, "a change raises the partition epoch"
            assert new.leader_epoch >= old.leader_epoch, "leader epochs only rise"
            if new.leader != old.leader:
                assert new.leader_epoch > old.leader_epoch, "a leader has its own epoch"
            assert new.start_offset >= old.start_offset, "what was trimmed stays so"
            for joined in set(new.isr) - set(old.isr):
                assert after.brokers[joined].is_live, "who joins is live"
            if new.leader != old.leader and new.leader >= 0:
                assert after.brokers[new.leader].is_live, "who begins to lead is live"
    for number, broker in before.brokers.items():
        renewed = after.brokers.get(number)
        if renewed is not None:
            assert renewed.broker_epoch >= broker.broker_epoch, "broker epochs only rise"
            if renewed.incarnation != broker.incarnation:
                assert renewed.broker_epoch > broker.broker_epoch, "an incarnation has its own epoch"
