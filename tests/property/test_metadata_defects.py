"""The model notices: long random histories pass, and every deliberate defect of the controller is caught by them."""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from test_metadata_model import OPERATIONS, History, lived

from tidelog.metadata import brokers, config_changes, elections, partition_changes, partitions, reassignments, topics
from tidelog.metadata.image import ClusterImage, Partition

STEPS = 120


def history(seed: int) -> History:
    numbers = random.Random(seed)
    return lived(
        [
            (numbers.randrange(len(OPERATIONS)), numbers.randrange(12), numbers.randrange(12), numbers.randrange(64))
            for _ in range(STEPS)
        ]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_history_keeps_every_rule(seed: int) -> None:
    image = history(seed).cluster.image
    image.validate()
    assert image.brokers


_without = partition_changes.without
_elect = elections.elect
_change = elections.change


def _data_is_never_lost(image: ClusterImage, topic_id: Any, partition: Partition, broker: int, **_: Any) -> Partition:
    return _without(image, topic_id, partition, broker)


def _always_unclean(partition: Partition, can_lead: Callable[[int], bool], **options: Any) -> Any:
    return _elect(partition, can_lead, **{**options, "unclean": True})


def _eligible_for_ever(partition: Partition, elected: Any, *, min_isr: int) -> Partition:
    leader = -1 if elected is None else elected.leader
    isr = partition.isr
    if elected is not None and (elected.is_unclean or leader not in isr):
        isr = (leader,)
    return partition.led(leader, isr=isr, eligible=tuple(b for b in partition.eligible if b not in isr))


def _one_epoch_for_two_leaders(*arguments: Any, **options: Any) -> Any:
    record = _change(*arguments, **options)
    return record if record is None else dataclasses.replace(record, leader_epoch=None)


def _drop_any_replica(
    image: ClusterImage, _topic: Any, _number: int, partition: Partition, replicas: tuple[int, ...]
) -> Partition:
    directories = tuple(
        partition.directory_of(b) if b in partition.replicas else topics.first_directory(image, b) for b in replicas
    )
    return reassignments._with_replicas(partition, replicas)._replace(directories=directories)


def _complete_at_once(partition: Partition) -> Partition | None:
    if not partition.target:
        return None
    after = reassignments._with_replicas(partition, partition.target)
    return after._replace(adding=(), removing=(), target=())


DEFECTS: dict[str, tuple[Any, str, Any, str]] = {
    "a wiped replica stays eligible": (brokers, "without", _data_is_never_lost, "without the records"),
    "a lower min ISR leaves eligible leaders": (
        config_changes,
        "_consequences",
        lambda *_: [],
        "eligible without the records",
    ),
    "an ISR change without epoch check": (partitions, "_check_epochs", lambda *_: None, "stale proposal"),
    "a fenced broker joins the ISR": (
        partitions,
        "_check_isr",
        lambda *_: None,
        "in-sync replicas are live|who is in sync is live|recovering replicas are outside the ISR",
    ),
    "a leader from outside the ISR": (elections, "elect", _always_unclean, "elected without the records"),
    "eligibility never ends": (elections, "led_by", _eligible_for_ever, "eligible without the records"),
    "replicas that are added count for min ISR": (
        partition_changes,
        "min_isr",
        lambda _image, _topic, partition: len(partition.replicas) // 2 + 1,
        "eligible without the records",
    ),
    "a leader epoch is kept over a change of leader": (
        elections,
        "change",
        _one_epoch_for_two_leaders,
        "a leader has its own epoch",
    ),
    "a cancel drops the last replica with the data": (reassignments, "_narrowed", _drop_any_replica, "was dropped"),
    "a reassignment ends before its replicas are in sync": (
        reassignments,
        "completed",
        _complete_at_once,
        "was dropped",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, defect, noticed = DEFECTS[name]
    monkeypatch.setattr(module, function, defect)
    with pytest.raises(AssertionError, match=noticed):
        deque((history(seed) for seed in range(1000, 1060)), maxlen=0)
