"""The errors of the clients: they survive pickle and copy, and an error of a broker has the class of its code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from uuid import UUID

import pytest

import tidelog
from tidelog import errors
from tidelog.client import remote_errors
from tidelog.client.record import TopicPartition
from tidelog.model.errors import RemoteError
from tidelog.testing import MemoryCluster

ARGUMENTS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "AdvertisedAddressError": ((), {"broker": 1, "advertised": "a:1", "bootstrap": "b:2", "reason": "refused"}),
    "BulkError": (("m",), {"errors": [(0, 2, errors.BufferFullError("full"))], "stored": [(0, 1)]}),
    "DeliveryTimeoutError": (("m",), {"was_sent": True}),
    "DeserializationError": (("m",), {"partition": TopicPartition("t", 0), "offset": 3}),
    "FlushTimeoutError": (("m",), {"left": 3}),
    "NoClusterError": ((("a:1", "b:2"), ("refused", "no route")), {}),
    "NoOffsetForPartitionError": (("m",), {"partitions": [TopicPartition("t", 0)]}),
    "OffsetOutOfRangeError": (("m",), {"partition": TopicPartition("t", 0), "position": 3}),
    "RemoteError": (("m",), {"code": errors.ErrorCode.INVALID_CONFIG, "facts": {"key": 1}}),
    "LogTruncatedError": (
        (TopicPartition("t", 0),),
        {"position": 3, "diverging_epoch": 1, "diverging_offset": 2},
    ),
}
"""Constructor arguments of the classes that take more than a message."""


def of_class(name: str) -> BaseException:
    arguments, keywords = ARGUMENTS.get(name, (("m",), {}))
    error: BaseException = getattr(errors, name)(*arguments, **keywords)
    error.add_note("a note")
    return error


ALL = [of_class(name) for name in errors.__all__ if name != "ErrorCode"] + [
    remote_errors.with_class(RemoteError("m", code=kind.code, facts={"n": 1})) for kind in remote_errors.CLASSES
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
def test_an_error_survives_pickle_and_copy(error: BaseException) -> None:
    for restored in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(restored) is type(error)
        assert str(restored) == str(error)
        assert restored.args == error.args
        assert {key: str(value) for key, value in vars(restored).items()} == {
            key: str(value) for key, value in vars(error).items()
        }


def fail() -> None:
    raise remote_errors.with_class(RemoteError("it exists", code=errors.ErrorCode.TOPIC_ALREADY_EXISTS))


def test_an_error_in_a_worker_process_reaches_its_caller() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(errors.TopicAlreadyExistsError, match="it exists"):
            pool.submit(fail).result()
        assert pool.submit(abs, -1).result() == 1, "the pool goes on"


@pytest.mark.parametrize(
    "name",
    [
        "BufferFullError",
        "CallTimeoutError",
        "DeliveryTimeoutError",
        "FlushTimeoutError",
        "NoLeaderError",
        "QueryTimeoutError",
    ],
)
def test_an_error_of_time_is_a_timeout_error(name: str) -> None:
    assert issubclass(getattr(errors, name), TimeoutError)


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=1) as started:
        yield started


@pytest.fixture(scope="module")
def admin(cluster: MemoryCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(cluster.bootstrap) as client:
        client.create_topic("t", partitions=1)
        yield client


CALLS: list[tuple[Callable[[tidelog.Admin], object], type[Exception]]] = [
    (lambda admin: admin.describe_group(""), errors.InvalidGroupIdError),
    (lambda admin: admin.describe_group("none"), errors.GroupIdNotFoundError),
    (lambda admin: admin.alter_group_offsets("", {TopicPartition("t", 0): 1}), errors.InvalidGroupIdError),
    (lambda admin: admin.delete_records({TopicPartition("t", 0): 99}), errors.OffsetOutOfRangeError),
    (lambda admin: admin.unregister_broker(77), errors.BrokerNotRegisteredError),
    (lambda admin: admin.unregister_broker(1), errors.InvalidRequestError),
    (lambda admin: admin.remove_voter(77, UUID(int=7)), errors.VoterNotFoundError),
]


@pytest.mark.parametrize(("call", "kind"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_of_a_broker_has_the_class_of_its_code(
    admin: tidelog.Admin, call: Callable[[tidelog.Admin], object], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as raised:
        call(admin)
    assert isinstance(raised.value, errors.RemoteError)


def test_a_timeout_of_a_call_is_a_builtin_timeout(cluster: MemoryCluster) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        cluster.pause(1)
        try:
            with pytest.raises(TimeoutError):
                admin.list_topics(timeout=0.3)
            with pytest.raises(TimeoutError):
                admin.create_topic("late", timeout=0.3)
        finally:
            cluster.resume(1)


def test_the_partition_of_a_position_error_can_be_sought(cluster: MemoryCluster, admin: tidelog.Admin) -> None:
    """It is the partition that the consumer's methods take."""
    seen = errors.LogTruncatedError(TopicPartition("t", 0), position=5, diverging_epoch=1, diverging_offset=0)
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([("t", 0)])
        consumer.seek(seen.partition, seen.diverging_offset)
        assert consumer.position(seen.partition) == 0
