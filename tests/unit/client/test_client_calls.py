"""Arguments, limits and results of calls: one rule for all methods of all clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidelog
from tidelog.client.admin.values import Outcomes
from tidelog.testing import MemoryCluster, MockAdmin

P0, P1 = tidelog.TopicPartition("t", 0), tidelog.TopicPartition("t", 1)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=1) as started:
        with tidelog.Admin(started.bootstrap) as admin, tidelog.Producer(started.bootstrap) as producer:
            admin.create_topic("t", partitions=2)
            for number in range(4):
                producer.send("t", b"%d" % number, partition=number % 2, timestamp_ms=1_000 * number).result(WAIT_S)
        yield started


CALLS: dict[str, Callable[[tidelog.Consumer, float | None], object]] = {
    "partitions_for": lambda consumer, timeout: consumer.partitions_for("t", timeout),
    "end_offsets": lambda consumer, timeout: consumer.end_offsets(P0, timeout=timeout),
    "beginning_offsets": lambda consumer, timeout: consumer.beginning_offsets(P0, timeout=timeout),
    "offsets_for_times": lambda consumer, timeout: consumer.offsets_for_times({P0: 0}, timeout=timeout),
    "committed": lambda consumer, timeout: consumer.committed(P0, timeout=timeout),
    "seek_to_beginning": lambda consumer, timeout: consumer.seek_to_beginning(P0, timeout=timeout),
    "seek_to_end": lambda consumer, timeout: consumer.seek_to_end(P0, timeout=timeout),
    "seek_to_time": lambda consumer, timeout: consumer.seek_to_time(0, P0, timeout=timeout),
    "commit": lambda consumer, timeout: consumer.commit({P0: 1}, timeout=timeout),
    "assign": lambda consumer, timeout: consumer.assign([P0, ("other", 0)], timeout=timeout),
}


def test_every_call_of_a_consumer_ends_in_its_time(cluster: MemoryCluster) -> None:
    options: dict[str, Any] = {"group": "late", "default_api_timeout_ms": 100, "enable_auto_commit": False}
    with tidelog.Consumer(cluster.bootstrap, **options) as consumer:
        consumer.assign([P0], timeout=WAIT_S)
        cluster.pause(1)
        try:
            for name, call in CALLS.items():
                for timeout in (None, 0.02):
                    start_s = time.monotonic()
                    with pytest.raises(TimeoutError):
                        call(consumer, timeout)
                    assert time.monotonic() - start_s < 10, name
        finally:
            cluster.resume(1)
        assert consumer.assignment() == {P0}, "a call that was given up has changed nothing"
        assert consumer.partitions_for("t", WAIT_S) == [P0, P1]


def test_an_error_of_a_commit_callback_is_not_that_of_another_commit(cluster: MemoryCluster) -> None:
    def fail(_error: object, _offsets: object) -> None:
        raise RuntimeError("of the program")

    with tidelog.Consumer(cluster.bootstrap, group="callbacks", enable_auto_commit=False) as consumer:
        consumer.assign([P0])
        consumer.commit_async({P0: 1}, on_commit=fail)
        consumer.commit({P0: 2})  # both are stored, in order
        assert consumer.committed(P0)[P0] == tidelog.OffsetAndMetadata(2)
        with pytest.raises(RuntimeError, match="of the program"):
            consumer.poll(0)


def test_interceptors_hear_of_commits_that_fail(cluster: MemoryCluster) -> None:
    heard: list[tuple[Exception | None, object]] = []

    class Listening:
        def on_commit(self, error: Exception | None, offsets: object) -> None:
            heard.append((error, offsets))

        def on_consume(self, records: object) -> None:
            """None leaves them as they are."""

    options: dict[str, Any] = {"interceptors": [Listening()], "auto_offset_reset": "earliest"}
    with tidelog.Consumer(cluster.bootstrap, group="heard", enable_auto_commit=False, **options) as consumer:
        consumer.assign([P0])
        records: list[Any] = []
        while not records:
            records = consumer.poll(1)
        assert [record.value for record in records] == [b"0", b"2"]
        consumer.commit({P0: 1})
        with pytest.raises(tidelog.errors.OffsetMetadataTooLargeError):
            consumer.commit({P0: tidelog.OffsetAndMetadata(1, "x" * 100_000)})
        consumer.poll(0)
    assert [type(error) for error, _ in heard] == [type(None), type(heard[1][0])]
    assert isinstance(heard[1][0], tidelog.errors.OffsetMetadataTooLargeError)


def test_seek_to_time_takes_partitions_or_times_of_them(cluster: MemoryCluster) -> None:
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([P0, P1])
        consumer.seek_to_time({P0: 1_500, P1: 10_000})
        assert (consumer.position(P0), consumer.position(P1)) == (1, 2)
        consumer.seek_to_time(0)
        assert (consumer.position(P0), consumer.position(P1)) == (0, 0)
        with pytest.raises(tidelog.errors.InvalidRequestError, match="leave the others out"):
            consumer.seek_to_time({P0: 0}, P1)
        consumer.pause()
        assert consumer.paused() == {P0, P1}
        consumer.resume(P0)
        assert consumer.paused() == {P1}
        consumer.resume()
        assert consumer.paused() == set()


def test_outcomes_are_a_mapping_of_what_succeeded() -> None:
    failed = tidelog.errors.InvalidTopicError("wrong")
    outcomes = Outcomes({"a": 1}, {"b": failed})
    assert dict(outcomes) == {"a": 1} == outcomes
    assert list(outcomes.items()) == [("a", 1)]
    assert list(outcomes.values()) == [1]
    assert "a" in outcomes
    assert "b" not in outcomes
    assert "c" not in outcomes
    assert (outcomes.get("b"), outcomes.get("c", 7)) == (None, 7)
    with pytest.raises(tidelog.errors.InvalidTopicError):
        outcomes["b"]
    with pytest.raises(KeyError):
        outcomes["c"]
    for _ in range(3):
        with pytest.raises(tidelog.errors.InvalidTopicError) as raised:
            outcomes.all()
        assert raised.value.__notes__ == ["'b' failed; 0 others failed, 1 succeeded; pass partial=True for all results"]
    assert not hasattr(failed, "__notes__")


def test_the_age_of_an_answer_is_that_of_the_last_call() -> None:
    with MockAdmin() as admin:
        admin.list_topics()
        core = admin._host.core
        assert core is not None
        core.cluster.stale_ms = 700
        ages: list[int | None] = []
        real = core.cluster.all_topics

        async def stale() -> Any:
            topics = await real()
            core.cluster.stale_ms = 700
            return topics

        core.cluster.all_topics = stale  # type: ignore[method-assign]
        admin.list_topics()
        ages.append(admin.stale_ms)
        core.cluster.all_topics = real  # type: ignore[method-assign]
        admin.list_topics()
        ages.append(admin.stale_ms)
        assert ages == [700, None]


def test_clients_of_one_process_have_names_of_their_own(cluster: MemoryCluster) -> None:
    names = [tidelog.Producer(cluster.bootstrap).client_id, tidelog.aio.Producer(cluster.bootstrap).client_id]
    with tidelog.Consumer(cluster.bootstrap) as one, tidelog.Consumer(cluster.bootstrap, client_id="mine") as other:
        names += [one.options.client_id, other.options.client_id]
    assert len(set(names)) == 4
    assert names[2].startswith("tidelog-consumer-")
    assert names[3] == "mine"


def test_read_arrow_commits_nothing(cluster: MemoryCluster) -> None:
    pytest.importorskip("pyarrow")
    table = tidelog.read_arrow("t", bootstrap=cluster.bootstrap, group="reading", enable_auto_commit=True)
    assert table.num_rows == 4
    with tidelog.Admin(cluster.bootstrap) as admin:
        assert admin.group_offsets("reading") == {}
    with pytest.raises(tidelog.errors.OptionError, match="bootstrap"):
        tidelog.read_arrow("t")
