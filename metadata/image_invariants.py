"""The invariants of an image, of what differs from an earlier one: for the simulator, after every decision. Pure.

`ClusterImage.validate` looks at everything. This looks at the changed partitions, at the partitions of changed brokers,
and at the indexes of both.
"""

from __future__ import annotations

from uuid import UUID

from tidelog.metadata.image import _INDEXES, ClusterImage, Partition


def validate_changes(older: ClusterImage, newer: ClusterImage) -> None:
    """Assert the invariants of the parts of `newer` that are not those of `older`, which is valid."""
    if newer.topics is not older.topics:
        for topic_id, topic in newer.topics.items():
            before = older.topics.get(topic_id)
            if topic is before:
                continue
            assert newer.topic_ids.get(topic.name) == topic_id, f"{topic.name} has another id"
            assert all(number in topic.partitions for number in range(len(topic.partitions))), f"a hole in {topic.name}"
            for number, partition in topic.partitions.items():
                if before is None or before.partitions.get(number) is not partition:
                    _validate_partition(newer, topic_id, number, partition)
        assert len(newer.topic_ids) == len(newer.topics), "a name of no topic"
    if newer.brokers is not older.brokers:
        for broker, registered in newer.brokers.items():
            if registered is not older.brokers.get(broker) and registered.fenced:
                for topic_id, number, partition in newer.partitions_on(broker):
                    assert broker not in partition.isr, f"{topic_id}-{number}: broker {broker} is fenced and in sync"


def _validate_partition(image: ClusterImage, topic_id: UUID, number: int, partition: Partition) -> None:
    partition.validate()
    for broker in partition.replicas:
        assert broker in image.brokers, f"{topic_id}-{number}: broker {broker} is not registered"
        hosted = image.hosted.get(broker)
        assert hosted is not None, f"broker {broker} hosts nothing"
        assert hosted.get(topic_id, 0) >> number & 1, f"{topic_id}-{number} is not among those of broker {broker}"
    for broker in partition.isr:
        assert not image.brokers[broker].fenced, f"{topic_id}-{number}: broker {broker} is fenced and in sync"
    for name, belongs in _INDEXES.items():
        is_in = bool(getattr(image, name).get(topic_id, 0) >> number & 1)
        assert is_in == belongs(partition), f"{topic_id}-{number}: {name} does not mirror {partition}"
