"""Records and snapshots as bytes: newer versions' records and fields survive, damage is noticed, deltas are exact."""

import dataclasses
from typing import Any
from uuid import UUID

import msgpack
import pytest
from support.metadata.controller import Cluster, directory

from tidelog.metadata import records as r
from tidelog.metadata import snapshot
from tidelog.metadata.delta import apply_delta, delta_between, for_broker
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.records import decode_records, encode_records, split_decision
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import decode_snapshot, encode_snapshot, image_records, snapshot_bytes
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.errors import CorruptStateError

TOPIC = UUID(int=1)


def partition_examples(d: UUID) -> list[r.Record]:
    return [
        r.CreateTopic(topic_id=TOPIC, name="t"),
        r.RemoveTopic(topic_id=TOPIC),
        r.CreatePartition(
            topic_id=TOPIC,
            partition=0,
            replicas=(1, 2),
            directories=(d, d),
            isr=(1,),
            leader=1,
            leader_epoch=3,
            partition_epoch=4,
            eligible=(2,),
            adding=(2,),
            removing=(1,),
            start_offset=5,
            target=(2,),
        ),
        r.ChangePartition(
            topic_id=TOPIC,
            partition=0,
            replicas=(1, 2),
            directories=(d, d),
            isr=(1,),
            eligible=(2,),
            leader=1,
            leader_epoch=3,
            adding=(2,),
            removing=(1,),
            start_offset=5,
            target=(2,),
        ),
    ]


def examples() -> list[r.Record]:
    """One of each kind, with something in every field."""
    d = directory(1)
    return [
        r.NoOp(),
        r.BeginDecision(name="n"),
        r.EndDecision(),
        r.AbortDecision(reason="why"),
        r.FeatureLevel(name="metadata.version", level=2),
        r.RegisterBroker(
            broker=1,
            broker_epoch=2,
            incarnation=UUID(int=3),
            endpoints=(("A", "B", "c", 4),),
            rack="r",
            directories=(d,),
            features=(("f", 1, 2),),
        ),
        r.UnregisterBroker(broker=1, broker_epoch=2),
        r.ChangeBroker(broker=1, broker_epoch=2, fenced=True, in_controlled_shutdown=True, draining=True, offline=(d,)),
        *partition_examples(d),
        r.SetConfig(resource_type="topic", resource="t", key="k", value="v"),
        r.SetQuota(entity=(("user", None),), key="k", value=1.5),
        r.SetUser(user="u", mechanism="m", salt=b"s", stored_key=b"k", server_key=b"v", iterations=4096),
        r.CreateAcl(
            acl_id=UUID(int=4),
            resource_type="topic",
            resource="t",
            pattern_type="literal",
            principal="User:u",
            host="*",
            operation="read",
            permission="allow",
        ),
        r.RemoveAcl(acl_id=UUID(int=4)),
        r.AllocateProducerIds(broker=1, broker_epoch=2, next_producer_id=1000),
        r.UnknownRecord(type=250, version=3, fields=msgpack.packb({0: "x"})),
    ]


class TestRecords:
    def test_every_kind_comes_back_as_it_went(self) -> None:
        given = examples()
        assert {type(record) for record in given} == {*r._TYPES.values(), r.UnknownRecord}
        assert decode_records(encode_records(given)) == tuple(given)

    def test_fields_of_newer_versions_are_kept_and_written_back(self) -> None:
        newer = [
            dataclasses.replace(record, extra=((90, "new"), (91, (1, 2)), (92, TOPIC)))
            for record in examples()
            if not isinstance(record, r.UnknownRecord)
        ]
        data = encode_records(newer)
        assert decode_records(data) == tuple(newer)
        assert encode_records(decode_records(data)) == data

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xc1",
            b"\x93",
            msgpack.packb(5),
            msgpack.packb([5]),
            msgpack.packb([[0, 0]]),
            msgpack.packb([["x", 0, {}]]),
            msgpack.packb([[0, "x", {}]]),
            msgpack.packb([[0, 0, []]]),
            msgpack.packb([[4, 0, {0: "name"}]]),
            msgpack.packb([[0, 0, {0: msgpack.ExtType(9, b"x")}]]),
            msgpack.packb([[0, 0, {0: msgpack.ExtType(1, b"short")}]]),
            encode_records(examples())[:-3],
        ],
        ids=str,
    )
    def test_what_is_not_a_list_of_records_is_corrupt(self, data: bytes) -> None:
        with pytest.raises(CorruptStateError):
            decode_records(data)

    def test_a_large_decision_stands_between_begin_and_end(self) -> None:
        many = [r.CreateTopic(topic_id=UUID(int=n), name=f"t{n}") for n in range(100)]
        assert len(split_decision(many, name="x")) == 1
        entries = split_decision(many, name="x", bytes_max=500)
        assert len(entries) > 5
        assert max(map(len, entries)) <= 600
        replay = Replay(ClusterImage())
        for entry in entries[:-1]:
            assert replay.apply(decode_records(entry)) == ClusterImage()
        assert replay.is_open
        assert len(replay.apply(decode_records(entries[-1])).topics) == 100

    def test_a_decision_that_was_begun_and_aborted_never_shows(self) -> None:
        replay = Replay(ClusterImage())
        replay.apply([r.BeginDecision()])
        replay.apply([r.CreateTopic(topic_id=TOPIC, name="t")])
        replay.apply([r.AbortDecision(reason="a new leader")])
        assert (replay.image, replay.is_open) == (ClusterImage(), False)
        assert len(replay.apply([r.CreateTopic(topic_id=TOPIC, name="t")]).topics) == 1

    def test_begin_inside_begin_and_end_without_begin_are_corrupt(self) -> None:
        with pytest.raises(CorruptStateError):
            Replay(ClusterImage()).apply([r.BeginDecision(), r.BeginDecision()])
        with pytest.raises(CorruptStateError):
            Replay(ClusterImage()).apply([r.EndDecision()])


def busy() -> Cluster:
    """A cluster with a little of everything."""
    cluster = Cluster(4)
    cluster.made("t", (0, 1, 2), (1, 2, 0), retention_ms="5")
    cluster.made("u.v", (3,))
    cluster.ask(AlterReassignments(partitions=(ReassignmentTarget(topic="t", partition=0, replicas=(3, 2)),)))
    cluster.crash(1)
    cluster.crash(0)
    cluster.beat(3, stalled_directories=(directory(3),))
    return cluster


class TestSnapshot:
    @pytest.mark.case("R14")
    def test_what_a_newer_version_has_written_survives_an_older_node_and_its_snapshot(self) -> None:
        """An older node replays a newer node's log and takes a snapshot: the newer one finds all of it again."""
        cluster = busy()
        topic_id = cluster.image.topic_ids["t"]
        newer: list[r.Record] = [
            r.UnknownRecord(type=200, version=1, fields=msgpack.packb({0: "a"})),
            r.FeatureLevel(name="new.feature", level=1, extra=((9, "f"),)),
            r.ChangeBroker(broker=2, broker_epoch=cluster.image.brokers[2].broker_epoch, extra=((9, "b"),)),
            r.CreateTopic(topic_id=TOPIC, name="n", extra=((9, "topic"),)),
            r.CreatePartition(
                topic_id=TOPIC,
                partition=0,
                replicas=(2,),
                directories=(directory(2),),
                isr=(2,),
                leader=2,
                extra=((20, "partition"),),
            ),
            r.ChangePartition(topic_id=topic_id, partition=1, extra=((20, "one"), (21, "two"))),
            r.ChangePartition(topic_id=topic_id, partition=1, extra=((21, "later"),)),
            r.SetConfig(resource_type="topic", resource="n", key="new.key", value="1", extra=((9, "c"),)),
            r.SetQuota(entity=(("user", None),), key="q", value=1.0, extra=((9, "q"),)),
            r.SetUser(user="u", mechanism="m", salt=b"s", iterations=1, extra=((9, "u"),)),
            dataclasses.replace(
                examples()[15],
                acl_id=UUID(int=8),  # type: ignore[call-arg]
                extra=((9, "a"),),
            ),
            r.AllocateProducerIds(broker=2, broker_epoch=0, next_producer_id=1000, extra=((9, "p"),)),
            r.UnknownRecord(type=200, version=1, fields=msgpack.packb({0: "b"})),
        ]
        cluster.log_records(newer)
        image = cluster.image
        image.validate()
        back = decode_snapshot(snapshot_bytes(image)).image
        assert back == image
        back.validate()
        kept = {record.extra for record in image_records(back) if record.extra}
        assert {((20, "one"), (21, "later")), ((20, "partition"),), ((9, "topic"),), ((9, "b"),)} <= kept
        assert [record.fields for record in back.unknown] == [msgpack.packb({0: "a"}), msgpack.packb({0: "b"})]
        assert back.topics[topic_id].partitions[1] == image.topics[topic_id].partitions[1]

    @pytest.mark.case("R14")
    def test_unknown_fields_go_with_the_thing_that_they_belong_to(self) -> None:
        cluster = Cluster(1)
        topic_id = cluster.made("t", (0,))
        before = cluster.image
        cluster.log_records(
            [
                r.CreateTopic(topic_id=TOPIC, name="n", extra=((9, "topic"),)),
                r.SetConfig(resource_type="topic", resource="n", key="k", value="1", extra=((9, "c"),)),
                r.SetUser(user="u", mechanism="m", salt=b"s", extra=((9, "u"),)),
                r.FeatureLevel(name="f", level=1, extra=((9, "f"),)),
            ]
        )
        assert len(cluster.image.unknown_fields) == 4
        cluster.log_records(
            [
                r.RemoveTopic(topic_id=TOPIC),
                r.SetUser(user="u", mechanism="m"),
                r.FeatureLevel(name="f", level=0),
            ]
        )
        assert cluster.image == before
        epoch = cluster.image.brokers[0].broker_epoch
        cluster.log_records([r.ChangeBroker(broker=0, broker_epoch=epoch, extra=((9, "b"),))])
        cluster.log_records([r.ChangePartition(topic_id=topic_id, partition=0, extra=((30, "p"),))])
        cluster.crash(0)
        cluster.start(0)
        assert set(cluster.image.unknown_fields) == {(r.ChangePartition.TYPE, topic_id, 0)}

    def test_an_open_decision_is_carried_along(self) -> None:
        pending = (r.CreateTopic(topic_id=TOPIC, name="n"),)
        image = busy().image
        back = decode_snapshot(snapshot_bytes(image, pending))
        assert (back.image, back.pending) == (image, pending)
        assert decode_snapshot(snapshot_bytes(image, ())).pending == ()
        replay = Replay(back.image, back.pending)
        assert "n" in replay.apply([r.EndDecision()]).topic_ids

    def test_chunks_are_bounded_and_do_not_depend_on_hashes(self) -> None:
        image = ClusterImage().apply_all(r.CreateTopic(topic_id=UUID(int=n), name=f"t{n}") for n in range(1, 10_000))
        chunks = list(encode_snapshot(image))
        assert len(chunks) == 12
        assert max(map(len, chunks)) < 1 << 17
        other = ClusterImage().apply_all(r.CreateTopic(topic_id=UUID(int=n), name=f"t{n}") for n in range(9_999, 0, -1))
        assert b"".join(encode_snapshot(other)) == b"".join(chunks)

    def test_an_empty_image_has_a_snapshot_too(self) -> None:
        assert decode_snapshot(snapshot_bytes(ClusterImage())).image == ClusterImage()

    @pytest.mark.case("R19")
    def test_every_flipped_byte_and_every_cut_is_noticed(self) -> None:
        data = snapshot_bytes(busy().image)
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            with pytest.raises(CorruptStateError):
                decode_snapshot(bytes(damaged))
            with pytest.raises(CorruptStateError):
                decode_snapshot(data[:position])

    @pytest.mark.case("R19")
    def test_chunks_that_are_missing_doubled_swapped_or_of_another_snapshot_are_noticed(self) -> None:
        image = ClusterImage().apply_all(r.CreateTopic(topic_id=UUID(int=n), name=f"t{n}") for n in range(1, 3000))
        first, *middle, last = encode_snapshot(image)
        assert len(middle) == 3
        wrong = [
            [first, *middle[1:], last],
            [first, middle[0], *middle, last],
            [first, middle[1], middle[0], middle[2], last],
            [first, *middle],
            [first, *middle, last, last],
            [*middle, last],
            [first, first, *middle, last],
            [*list(encode_snapshot(ClusterImage()))[:1], last],
        ]
        for chunks in wrong:
            with pytest.raises(CorruptStateError):
                decode_snapshot(b"".join(chunks))

    def test_records_that_do_not_fit_together_are_corrupt(self) -> None:
        # A sound file with a partition of a topic that is not there.
        header, crc = snapshot._chunk(snapshot._HEADER, snapshot.MAGIC + b"\1", 0)
        body, crc = snapshot._chunk(snapshot.RECORDS, encode_records([examples()[10]]), crc)
        end, _ = snapshot._chunk(snapshot._END, msgpack.packb([1, 1]), crc)
        with pytest.raises(CorruptStateError, match="are inconsistent"):
            decode_snapshot(header + body + end)
        unknown, _ = snapshot._chunk(b"\7", b"", 0)
        with pytest.raises(CorruptStateError, match="not a metadata snapshot"):
            decode_snapshot(unknown)


class TestDelta:
    def test_a_topic_created_again_with_the_same_settings_is_another_topic(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1), retention_ms="5")
        older = cluster.image
        cluster.ask(DeleteTopics(names=("t",)))
        made = cluster.made("t", (1, 0), retention_ms="5")
        delta = delta_between(older, cluster.image)
        assert delta.created_topics == ((made, "t"),)
        assert delta.removed_topics == (older.topic_ids["t"],)
        assert delta.configs == {}
        assert apply_delta(older, delta) == cluster.image
        mine = for_broker(delta, older, 1)
        assert [(p.topic_id, p.number) for p in mine.led] == [(made, 0)]
        assert mine.dropped == ((older.topic_ids["t"], 0),)

    @pytest.mark.requirement("a:B-34")
    def test_each_broker_learns_what_it_leads_follows_and_drops(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1))
        older = cluster.image
        cluster.ask(AlterReassignments(partitions=(ReassignmentTarget(topic="t", partition=0, replicas=(1, 2)),)))
        cluster.propose("t", (0, 1, 2))
        delta = delta_between(older, cluster.image)

        def reported(broker: int) -> tuple[Any, ...]:
            mine = for_broker(delta, older, broker)
            return len(mine.led), len(mine.followed), len(mine.leaderless), len(mine.dropped)

        assert [reported(broker) for broker in range(3)] == [(0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)]
        before = cluster.image
        cluster.crash(1)
        cluster.crash(2)
        assert len(for_broker(delta_between(before, cluster.image), before, 2).leaderless) == 1

    def test_parts_that_are_shared_are_not_looked_into(self) -> None:
        cluster = busy()
        older = cluster.image
        cluster.log_records([r.SetConfig(resource_type="cluster", resource="", key="num.partitions", value="3")])
        delta = delta_between(older, cluster.image)
        assert not delta.is_empty
        assert (delta.partitions, delta.brokers, list(delta.configs)) == ({}, {}, [("cluster", "")])
        assert delta_between(older, older).is_empty
