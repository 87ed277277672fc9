"""A log directory without room: what its broker leads there goes to others, if they can go on without it."""

import pytest
from support.metadata.controller import Cluster, directory

from tidelog.metadata.brokers import Heartbeat
from tidelog.model.errors import ErrorCode


@pytest.mark.requirement("a:X3-7")
def test_what_lies_in_a_full_directory_is_led_by_others_and_its_broker_lives() -> None:
    cluster = Cluster(3)
    cluster.made("led", (0, 1, 2))
    cluster.made("followed", (1, 0, 2))
    cluster.beat(0, full_directories=(directory(0),))
    led, followed = cluster.partition("led"), cluster.partition("followed")
    assert (led.leader, led.isr, led.eligible) == (1, (1, 2), ())
    assert (followed.leader, followed.isr) == (1, (1, 0, 2)), "its leader knows how long to wait"
    broker = cluster.image.brokers[0]
    assert (broker.fenced, broker.offline) == (False, ())
    before = cluster.image
    cluster.beat(0, full_directories=(directory(0),))
    assert cluster.image is before, "there is nothing left to move"


def test_it_is_taken_back_when_it_has_caught_up() -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1, 2))
    cluster.beat(0, full_directories=(directory(0),))
    assert cluster.propose("t", (0, 1, 2)).error is None


@pytest.mark.parametrize("replicas", [(0,), (0, 1)])
def test_where_too_few_are_left_it_stays_leader_and_can_be_read(replicas: tuple[int, ...]) -> None:
    cluster = Cluster(3)
    cluster.made("t", replicas)
    before = cluster.partition("t")
    cluster.beat(0, full_directories=(directory(0),))
    assert cluster.partition("t") == before


def test_others_that_are_in_sync_and_cannot_serve_do_not_take_over() -> None:
    cluster = Cluster(2)
    cluster.made("t", (0, 1), min_insync_replicas="1")
    cluster.crash(1)
    before = cluster.partition("t")
    cluster.beat(0, full_directories=(directory(0),))
    assert (cluster.partition("t"), before.leader) == (before, 0)


def test_another_directory_of_the_broker_is_not_concerned() -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1, 2))
    epoch = cluster.image.brokers[0].broker_epoch
    beat = Heartbeat(broker=0, broker_epoch=epoch, metadata_offset=9, full_directories=(directory(8),))
    assert cluster.refused(beat).code is ErrorCode.INVALID_REQUEST
    assert cluster.partition("t").leader == 0
