"""A change that breaks an image is named; what did not change is not looked at."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.image_invariants import validate_changes
from tidelog.metadata.records import ChangeBroker, CreatePartition, CreateTopic, RegisterBroker
from tidelog.model.maps import Map

TOPIC = UUID(int=7)
NIL = UUID(int=0)


def image() -> ClusterImage:
    """Three live brokers, and a topic with two partitions on them."""
    brokers = [RegisterBroker(broker=b, broker_epoch=10 + b, incarnation=UUID(int=b)) for b in (1, 2, 3)]
    live = [ChangeBroker(broker=b, broker_epoch=10 + b, fenced=False) for b in (1, 2, 3)]
    parts = [
        CreatePartition(
            topic_id=TOPIC, partition=number, replicas=(1, 2, 3), directories=(NIL,) * 3, isr=(1, 2, 3), leader=1
        )
        for number in (0, 1)
    ]
    return ClusterImage().apply_all([*brokers, *live, CreateTopic(topic_id=TOPIC, name="orders"), *parts])


def with_partition(whole: ClusterImage, **changes: Any) -> ClusterImage:
    """Partition 1 is changed behind the back of the indexes."""
    topic = whole.topics[TOPIC]
    changed: Partition = topic.partitions[1]._replace(**changes)
    return replace(whole, topics=whole.topics.set(TOPIC, replace(topic, partitions=topic.partitions.set(1, changed))))


def test_an_image_that_records_make_is_valid_step_by_step() -> None:
    whole = image()
    whole.validate()
    validate_changes(ClusterImage(), whole)
    validate_changes(whole, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leader": 2, "isr": (1, 3)}, "the leader is in sync"),
        ({"isr": (1, 2, 9)}, "the ISR is within the replicas"),
        ({"replicas": (1, 2, 9), "isr": (1, 2)}, "broker 9 is not registered"),
        ({"leader": 2}, "unbalanced does not mirror"),
        ({"isr": (1, 2), "eligible": (3,)}, "weakened does not mirror"),
    ],
)
def test_a_broken_partition_is_named(changes: dict[str, Any], message: str) -> None:
    whole = image()
    with pytest.raises(AssertionError, match=message):
        validate_changes(whole, with_partition(whole, **changes))


def test_a_broker_that_is_fenced_and_in_sync_is_named() -> None:
    whole = image()
    fenced = replace(whole, brokers=whole.brokers.set(2, replace(whole.brokers[2], fenced=True)))
    with pytest.raises(AssertionError, match=f"{TOPIC}-0: broker 2 is fenced and in sync"):
        validate_changes(whole, fenced)


def test_a_name_of_no_topic_is_named() -> None:
    whole = image()
    renamed = replace(whole, topics=whole.topics.delete(TOPIC).set(TOPIC, replace(whole.topics[TOPIC], name="other")))
    with pytest.raises(AssertionError, match="other has another id"):
        validate_changes(whole, renamed)


def test_what_did_not_change_is_not_looked_at() -> None:
    broken = with_partition(image(), leader=2, isr=(1, 3))
    assert broken.topics != Map()
    validate_changes(broken, broken)
