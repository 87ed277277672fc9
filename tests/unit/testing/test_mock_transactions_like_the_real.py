"""One table of calls of transactional producers, most of them wrong, against `MockProducer` and against a cluster in
memory. Both answer each call as the table says, and both commit the same records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidelog
from tidelog.testing import MemoryCluster, MockProducer

Call = Callable[[Any], Any]
TOPIC = "t"
GROUP = tidelog.GroupMetadata("g", "", -1)
LARGE = b"x" * (1 << 21)

STATE = "InvalidTransactionStateError"
ABORTABLE = "TransactionAbortableError"


def init(producer: Any) -> Any:
    return producer.init_transactions()


def begin(producer: Any) -> Any:
    return producer.begin_transaction()


def commit(producer: Any) -> Any:
    return producer.commit_transaction()


def abort(producer: Any) -> Any:
    return producer.abort_transaction()


def prepare(producer: Any) -> Any:
    return producer.prepare_transaction()


def join(producer: Any) -> Any:
    return type(producer.join_transaction("job")).__name__


def leave(producer: Any) -> Any:
    return type(producer.leave_transaction()).__name__


def close(producer: Any) -> Any:
    return producer.close()


def send(value: str, **more: Any) -> Call:
    def call(producer: Any) -> Any:
        producer.send(TOPIC, value, **more)

    return call


def send_large(producer: Any) -> Any:
    producer.send(TOPIC, LARGE)


def wait_for(value: str, **more: Any) -> Call:
    """The record, and its outcome."""

    def call(producer: Any) -> Any:
        producer.send(TOPIC, value, **more).result(30)

    return call


def offsets(place: tuple[str, int] = (TOPIC, 0), offset: int = 1, group: Any = GROUP) -> Call:
    return lambda producer: producer.send_offsets({place: offset}, group)


def block(*calls: Call, error: type[BaseException] | None = None) -> Call:
    """A block of these calls, that ends with this error."""

    def call(producer: Any) -> Any:
        with producer.transaction():
            for inner in calls:
                inner(producer)
            if error is not None:
                raise error

    return call


def caught(inner: Call) -> Call:
    """The program goes on after the error of the call."""

    def call(producer: Any) -> Any:
        outcome(inner, producer)

    return call


def outcome(call: Call, producer: Any) -> Any:
    """The class of the error that programs catch, or the result."""
    try:
        return call(producer)
    except BaseException as error:
        names = {name for name in tidelog.errors.__all__ if name != "ErrorCode"}
        public = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in names]
        return public[0] if public else type(error).__name__


Steps = list[tuple[Call, Any]]
"""Calls, and the outcome of each."""

OWNER: dict[str, Steps] = {
    "calls before init": [
        *[(call, STATE) for call in (begin, commit, abort, prepare, send("x"), offsets())],
        (lambda producer: producer.last_token(), STATE),
        (lambda producer: producer.send_many(TOPIC, values=["x"]), STATE),
    ],
    "init twice": [(init, False), (init, STATE), (block(send("init-twice")), None)],
    "calls outside of a transaction": [
        (init, False),
        *[(call, STATE) for call in (commit, abort, prepare, send("x"), offsets())],
        (lambda producer: producer.send_many(TOPIC, values=["x"]), STATE),
        (block(send("outside")), None),
    ],
    "begin twice": [(init, False), (begin, None), (begin, STATE), (send("begin-twice"), None), (commit, True)],
    "commit twice": [(init, False), (begin, None), (send("commit-twice"), None), (commit, True), (commit, STATE)],
    "abort twice": [(init, False), (begin, None), (send("x"), None), (abort, None), (abort, STATE)],
    "abort after a commit": [(init, False), (begin, None), (send("kept"), None), (commit, True), (abort, STATE)],
    "commit after an abort": [(init, False), (begin, None), (send("x"), None), (abort, None), (commit, STATE)],
    "nothing in it": [(block(), None), (init, STATE), (begin, None), (commit, True), (begin, None), (abort, None)],
    "nested blocks": [(block(send("x"), block(send("x"))), STATE), (block(send("after-nested")), None)],
    "a nested block, caught": [(block(send("outer-1"), caught(block(send("x"))), send("outer-2")), None)],
    "a block in a transaction": [(init, False), (begin, None), (block(send("x")), STATE), (abort, None)],
    "an abort in a block": [(block(send("x"), abort), None), (block(send("after-abort")), None)],
    "a commit in a block": [(block(send("committed-in-block"), commit), None), (commit, STATE)],
    "an error after a commit in a block": [(block(send("before-error"), commit, error=KeyError), "KeyError")],
    "another transaction in a block": [
        (block(send("x"), abort, begin, send("begun-in-block")), None),
        (begin, STATE),
        (commit, True),
    ],
    "errors of the program": [
        (block(send("x"), error=KeyError), "KeyError"),
        (block(send("x"), error=KeyboardInterrupt), "KeyboardInterrupt"),
        (block(send("x"), error=GeneratorExit), "GeneratorExit"),
        (block(send("after-errors")), None),
    ],
    "a record that is too large": [(block(send("x"), send_large), "RecordTooLargeError"), (abort, STATE)],
    "a record that is too large, caught": [(block(send("beside-large"), caught(send_large)), None)],
    "a missing partition": [(block(send("x"), send("x", partition=99)), "UnknownTopicOrPartitionError")],
    "a wrong expected offset": [
        (init, False),
        (begin, None),
        (wait_for("x", partition=1, expected_offset=1_000_000), "OffsetMismatchError"),
        *[(call, ABORTABLE) for call in (send("x"), offsets(), prepare, commit)],
        (abort, None),
        (block(send("after-mismatch")), None),
    ],
    "a claim": [(block(wait_for("x", partition=1, claim=True)), "ValueError")],
    "offsets of a wrong kind": [
        (init, False),
        (begin, None),
        (offsets(group="g"), "TypeError"),
        (lambda producer: producer.send_offsets({}, GROUP), None),
        (send("offsets-kind"), None),
        (commit, True),
    ],
    "offsets of no number": [(block(offsets(offset=-1)), "InvalidRequestError")],
    "members and tokens of a wrong kind": [
        (init, False),
        (begin, None),
        (send("wrong-kinds"), None),
        (lambda producer: producer.commit_transaction(members=["a"]), "TypeError"),
        (lambda producer: producer.commit_transaction(members=[-1]), "TypeError"),
        (lambda producer: producer.commit_transaction(token="a"), "TypeError"),
        (lambda producer: producer.commit_transaction(token=b"x" * 1_025), "ValueError"),
        (lambda producer: producer.commit_transaction(timeout=-1), "InvalidRequestError"),
        (lambda producer: producer.commit_transaction(token=b"x" * 1_024), True),
        (lambda producer: producer.last_token() == b"x" * 1_024, True),
    ],
    "a token again": [
        (init, False),
        (lambda producer: producer.last_token(), b""),
        (begin, None),
        (send("token-once"), None),
        (lambda producer: producer.commit_transaction(token=b"1"), True),
        (begin, None),
        (send("x"), None),
        (lambda producer: producer.commit_transaction(token=b"1"), False),
        (lambda producer: producer.last_token(), b"1"),
    ],
    "after prepare": [
        (init, False),
        (begin, None),
        (send("prepared"), None),
        (prepare, None),
        *[(call, STATE) for call in (begin, send("x"), offsets())],
        (commit, True),
        (send("x"), STATE),
    ],
    "an owner is no member": [(join, STATE), (leave, STATE), (block(send("no-member")), None), (join, STATE)],
    "close with an open transaction": [
        (init, False),
        (begin, None),
        (send("x"), None),
        (close, None),
        *[(call, "ProducerClosedError") for call in (send("x"), commit, abort, begin, init, offsets(), block())],
        (close, None),
    ],
    "close in a block": [(block(send("x"), close), "ProducerClosedError")],
}

WITHOUT_ID: dict[str, Steps] = {
    "calls of an owner": [
        *[(call, STATE) for call in (init, begin, commit, abort, prepare, block(), offsets())],
        (lambda producer: producer.last_token(), STATE),
        (leave, STATE),
    ],
    "calls in a wrong order": [
        (join, "int"),
        (send("x"), None),
        (join, STATE),
        (commit, STATE),
        (block(send("x")), STATE),
        (leave, "int"),
        (leave, STATE),
        (send("x"), STATE),
        (join, "int"),
        (leave, "int"),
    ],
    "an id of a wrong kind": [
        (lambda producer: producer.join_transaction(""), "TypeError"),
        (lambda producer: producer.join_transaction(7), "TypeError"),
        (join, "int"),
        (wait_for("x", partition=1, expected_offset=1_000_000), "OffsetMismatchError"),
        (send("x"), ABORTABLE),
        (leave, ABORTABLE),
        (join, "int"),
    ],
}
CASES = {f"owner: {name}": (name, steps) for name, steps in OWNER.items()} | {
    f"without an id: {name}": (None, steps) for name, steps in WITHOUT_ID.items()
}


def played(new: Callable[[str | None], Any], name: str) -> tuple[list[Any], Any]:
    """The outcomes, and the producer, which is closed."""
    transactional_id, steps = CASES[name]
    with new(transactional_id) as producer:
        return [outcome(call, producer) for call, _ in steps], producer


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=1) as started:
        with tidelog.Admin(started.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=2)
        with tidelog.Producer(started.bootstrap, transactional_id="job") as owner:
            owner.init_transactions()
        yield started


def new_mock(transactional_id: str | None) -> MockProducer:
    return MockProducer(partitions=2, transactional_id=transactional_id)


@pytest.mark.parametrize("name", CASES)
def test_a_mock_answers_as_the_table_says(name: str) -> None:
    assert played(new_mock, name)[0] == [wanted for _, wanted in CASES[name][1]]


@pytest.mark.parametrize("name", CASES)
def test_a_producer_answers_as_the_table_says(cluster: MemoryCluster, name: str) -> None:
    def new(transactional_id: str | None) -> tidelog.Producer:
        return tidelog.Producer(cluster.bootstrap, transactional_id=transactional_id)

    assert played(new, name)[0] == [wanted for _, wanted in CASES[name][1]]


def test_both_commit_the_same_records(cluster: MemoryCluster) -> None:
    """After the tests above. Of members only an owner knows what commits."""
    of_mocks = [record.value for name in CASES if CASES[name][0] for record in played(new_mock, name)[1].committed]
    assert b"x" not in of_mocks
    with tidelog.Consumer(cluster.bootstrap, isolation="read_committed") as consumer:
        places = [tidelog.TopicPartition(TOPIC, number) for number in (0, 1)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(*places)
        of_producers: list[bytes | None] = []
        while any((consumer.position(place) or 0) < ends[place] for place in places):
            of_producers += [record.value for record in consumer.poll(10)]
    assert sorted(of_producers) == sorted(of_mocks)  # type: ignore[type-var]
