"""The record's way into a batch, compiled and interpreted: both forms do the same. And what bulk does with columns."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from array import array
from itertools import accumulate
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.producer import bulk, fast_path
from tidelog.client.producer.accumulator import Accumulator
from tidelog.client.producer.bulk import chunks_of, columns_of
from tidelog.client.producer.partitioners import DIRECT, create_partitioner, partition_of
from tidelog.client.producer.records import headers_of
from tidelog.model.errors import UnknownTopicOrPartitionError


def load_source() -> ModuleType:
    """client/producer/fast_path.py as an interpreted module, whatever has been compiled."""
    path = Path(bulk.__file__).with_name("fast_path.py")
    spec = importlib.util.spec_from_file_location("hot_source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = load_source()
assert not SOURCE.COMPILED
FORMS: list[Any] = [SOURCE, *([fast_path] if fast_path.COMPILED else [])]


def entrance(form: Any, count: int = 3, limit: int = 1_000) -> tuple[Any, list[Any]]:
    made = form.BatchAppender(threading.Lock(), 500, lambda: 77)
    place = form.TopicBuffers("t", count)
    batches = [form.ProducerBatch("t", number, limit, 0.0) for number in range(count)]
    for producer_batch in batches:
        producer_batch.lock = made.lock
    place.open = list(batches)
    place.sticky = 1
    made.topics["t"] = place
    return made, batches


@pytest.mark.parametrize("form", FORMS)
def test_what_is_taken_and_what_goes_the_slow_way(form: Any) -> None:
    made, batches = entrance(form)
    assert made.try_append("other", b"v", None) is None
    assert made.try_append("t", 5, None) is None
    assert made.try_append("t", b"v", 5) is None
    assert made.try_append("t", bytearray(b"v"), None) is None
    assert made.try_append("t", b"x" * 480, None) is None, "larger than a record may be"
    assert made.try_append("t", b"v", None, 3) is None
    assert made.try_append("t", b"v", None, -1) is None
    assert made.try_append("t", b"v", None, None, None, -5) is None
    assert made.try_append("t", b"v", None, None, None, "now") is None
    assert all(not producer_batch.rows for producer_batch in batches)
    first = made.try_append("t", "ä", None)
    assert batches[1].rows == [(77, None, "ä".encode(), None)]
    assert batches[1].size == form.ROW_BYTES + 2
    assert repr(first) == "<Delivery to t-1: pending>"
    made.try_append("t", b"v", "21")
    made.try_append("t", None, b"21")
    where = (-973932308 & 0x7FFFFFFF) % 3
    assert batches[where].rows[-2:] == [(77, b"21", b"v", None), (77, b"21", None, None)]
    reported: list[Any] = []
    made.try_append("t", b"v", None, 2, (("h", b"1"),), 9, reported.append)
    assert batches[2].rows[-1] == (9, None, b"v", (("h", b"1"),))
    assert batches[2].callbacks == [(len(batches[2].rows) - 1, reported.append, None)]
    made.is_default_partitioner = False
    assert made.try_append("t", b"v", None) is None
    assert made.try_append("t", b"v", None, 0) is not None
    made.is_default_partitioner = True
    made.topics["t"].open[1] = None
    assert made.try_append("t", b"v", None) is None


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_filled_up_to_its_limit(form: Any) -> None:
    made, batches = entrance(form, limit=10 * (form.ROW_BYTES + 100))
    taken = [made.try_append("t", b"x" * 100, None) for _ in range(12)]
    assert [one is not None for one in taken] == [True] * 10 + [False] * 2
    assert len(batches[1].rows) == 10


@pytest.mark.parametrize("form", FORMS)
def test_a_delivery_reports_what_its_batch_knows(form: Any) -> None:
    made, batches = entrance(form)
    first, second = made.try_append("t", b"1", None), made.try_append("t", b"2", None)
    assert not first.done()
    with pytest.raises(TimeoutError):
        first.result(0.01)
    assert not batches[1].waiters, "who gave up waits no longer"
    later: list[Any] = []
    first.add_done_callback(later.append)
    batches[1].timestamps = [5, 6]
    batches[1].base_offset = 40
    waited: list[Any] = []
    thread = threading.Thread(target=lambda: waited.append(second.result(10)))
    thread.start()
    end_s = threading.Event()
    while not batches[1].waiters:
        end_s.wait(0.001)
    batches[1].is_done = True
    for waiter in batches[1].waiters:
        waiter()
    thread.join(10)
    assert waited == [("t", 1, 41, 6)]
    assert first.exception() is None
    assert first.result() == ("t", 1, 40, 5)
    assert asyncio.run(awaited(first)) == ("t", 1, 40, 5)
    batches[1].append_time_ms = 99
    assert second.result().timestamp == 99
    batches[1].error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        first.result()
    assert "ValueError" in repr(first)


async def awaited(delivery: Any) -> Any:
    return await delivery


ROWS = st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=60)


@given(values=ROWS, data=st.data())
def test_all_forms_measure_and_cut_columns_alike(values: list[bytes | None], data: st.DataObject) -> None:
    keys = data.draw(
        st.one_of(
            st.none(), st.lists(st.one_of(st.none(), st.binary(max_size=9)), min_size=len(values), max_size=len(values))
        )
    )
    bytes_max = data.draw(st.integers(1, 400))
    measured = [form.sizes_of(values, keys) for form in FORMS] + [bulk._sizes_bulk(values, keys)]
    assert all(one == measured[0] for one in measured)
    cuts = [form.cuts_of(measured[0], bytes_max) for form in FORMS] + [bulk._cuts_bulk(measured[0], bytes_max)]
    assert all(one == cuts[0] for one in cuts)
    starts = [0, *cuts[0][:-1]]
    for start, end in zip(starts, cuts[0], strict=False):
        assert end == start + 1 or sum(measured[0][start:end]) <= bytes_max
    assert (cuts[0] or [0])[-1] == len(values)
    count = data.draw(st.integers(1, 5))
    places = array("i", [number * 7 % count for number in range(len(values))])
    scattered = [form.scatter(places, values, count) for form in FORMS]
    assert all(one == scattered[0] for one in scattered)
    assert [len(one) for one in scattered[0]] == [list(places).count(number) for number in range(count)]
    rows = [one or b"" for one in values]
    ends = array("q", accumulate(map(len, rows), initial=3))
    for form in FORMS:
        assert form.cut_rows(ends, b"abc" + b"".join(rows) + b"rest") == rows
        assert form.sizes_between(ends) == form.sizes_of(rows, None)
        blocks = [(("h", b"1"),) if number % 3 == 1 else None for number in range(len(rows))]
        some: list[Any] = [(5, b"k", row, block) for row, block in zip(rows, blocks, strict=True)]
        columns = form.split_rows(some)
        assert columns[:3] == ([5] * len(rows), [b"k"] * len(rows), rows)
        assert columns[3] == ([one[3] or () for one in some] if len(rows) > 1 else None)
        for wrong in (array("q", [5, 4, 5]), array("q", [-1, 2]), array("q", [0, 9])):
            with pytest.raises(ValueError):
                form.cut_rows(wrong, b"abcde")
        assert form.are_bytes(values)
        assert not form.are_bytes([*values, "text"])


class FakeState:
    topic = "t"
    count = 4
    sticky = 2
    available = (0, 1, 2, 3)
    turn = 0


@pytest.mark.requirement("a:D-50", "a:D-53", "a:D-55", "b:F-20", "b:F-24", "b:F-25", "b:F-14")
def test_bulk_goes_where_single_records_would() -> None:
    place = FakeState()
    keys = [b"key-%d" % number for number in range(100)]
    values = [b"%d" % number for number in range(100)]

    def spread(partitioner: Any, **more: Any) -> dict[int | None, list[bytes | None]]:
        columns = columns_of(None, values, more.get("keys"), None, None, more.get("partition"))
        found: dict[int | None, list[bytes | None]] = {}
        one = more.get("partition")
        for chunk in chunks_of(
            columns,
            state=place,
            partition=one if isinstance(one, int) else None,
            partitioner=partitioner,
            bytes_max=500,
            row_bytes_max=400,
        ):
            found.setdefault(chunk.partition, []).extend(chunk.values)
        return found

    by_key = {part: [v for k, v in zip(keys, values, strict=True) if partition_of(k, 4) == part] for part in range(4)}
    assert spread(DIRECT, keys=keys) == by_key
    assert spread(DIRECT) == {None: values}, "wherever keyless records go now"
    assert spread(DIRECT, partition=3, keys=keys) == {3: values}
    assert spread(create_partitioner("uniform_sticky"), keys=keys) == {None: values}
    for name in ("consistent", "consistent_random", "fnv1a"):
        hashed = create_partitioner(name)
        one_by_one: dict[int, list[bytes]] = {}
        for key, value in zip(keys, values, strict=True):
            one_by_one.setdefault(hashed.partition(place, key, value), []).append(value)
        assert spread(hashed, keys=keys) == one_by_one
        assert len(one_by_one) == 4
        assert spread(hashed) == {None: values}
    assert spread(create_partitioner("round_robin")) == {part: values[part::4] for part in range(4)}

    def banana(topic: str, key: bytes | None, value: bytes | None, partitions: int) -> int:
        assert topic == "t"
        if key is None:
            raise ValueError("every record needs a customer's name")
        return partitions - 1 if key == b"key-7" else partition_of(key, partitions - 1)

    found = spread(create_partitioner(banana), keys=keys)
    assert found[3] == [b"7"]
    assert sum(map(len, found.values())) == 100
    with pytest.raises(ValueError, match="customer"):
        spread(create_partitioner(banana))
    with pytest.raises(UnknownTopicOrPartitionError, match="there is no partition 9"):
        spread(create_partitioner(lambda *_: 9), keys=keys)
    with pytest.raises(TypeError, match="not the number of a partition"):
        spread(create_partitioner(lambda *_: "3"), keys=keys)
    mixed: list[bytes | None] = [None, b"21"]
    (one, other) = chunks_of(
        columns_of(None, [b"a", b"b"], mixed, None, None, None),
        state=place,
        partition=None,
        partitioner=DIRECT,
        bytes_max=500,
        row_bytes_max=400,
    )
    assert {one.partition, other.partition} == {2, partition_of(b"21", 4)}


def test_columns_of_wrong_shape_are_refused() -> None:
    for wrong, said in (
        ((None, [b"a"], [b"k", b"k"], None, None, None), "1 values, but 2 keys"),
        ((None, b"abc", None, None, None, None), "a column is a list, not bytes"),
        ((None, None, None, None, None, None), "not both"),
        (([b"a"], None, None, None, None, None), "bare values go as values="),
        (([{"valeu": b"a"}], None, None, None, None, None), "not valeu"),
        (
            ([{"value": b"a", "partition": 1}, {"value": b"b"}], None, None, None, None, None),
            "in all records, or in none",
        ),
        ((None, [b"a"], None, None, [1.5], None), "milliseconds since 1970"),
        (([{"value": b"a", "partition": 1}], None, None, None, None, [2]), "not both"),
        (([(b"k", b"v")], None, [b"k"], None, None, None), "records have their own"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            columns_of(*wrong)


def test_tables_of_pyarrow_are_read_from_their_buffers() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "key": pa.array([b"k1", None, b"k3", b""], pa.binary()),
            "value": pa.chunked_array([pa.array(["a", "ü"]), pa.array([None, "d"])]),
            "timestamp": pa.array([1, 2, 3, 4], pa.timestamp("s")),
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, [], None]),
        }
    )
    for start in (0, 1):
        found = columns_of(table.slice(start), None, None, None, None, None)
        assert found.keys == [b"k1", None, b"k3", b""][start:]
        assert rows_of(found) == [b"a", "ü".encode(), None, b"d"][start:]
        assert found.stamps == [1_000, 2_000, 3_000, 4_000][start:]
        assert found.headers == [(("h", b"1"), ("h", None)), None, None, None][start:]
    large = columns_of(None, pa.array([b"x", None, b"yz"], pa.large_binary()).slice(1), None, None, None, None)
    assert rows_of(large) == [None, b"yz"]
    for kind in (pa.binary(), pa.large_binary()):
        packed = columns_of(None, pa.array([b"x", b"", b"yz", b"w"], kind).slice(1, 2), None, None, None, None)
        assert rows_of(packed) == packed.values[0:2] == [b"", b"yz"]
        cut = list(
            chunks_of(packed, state=FakeState(), partition=None, partitioner=DIRECT, bytes_max=26, row_bytes_max=100)
        )
        assert [chunk.values for chunk in cut] == [[b""], [b"yz"]]
    (batch,) = table.select(["key", "value"]).slice(0, 2).to_batches()
    assert rows_of(columns_of(batch, None, None, None, None, None)) == [b"a", "ü".encode()]
    assert columns_of(None, pa.array([1, 2]), None, None, None, [0, 1]).values == [1, 2], "for a serializer"
    with pytest.raises(TypeError, match="needs a column 'value'"):
        columns_of(table.select(["key"]), None, None, None, None, None)


def rows_of(columns: bulk.Columns) -> list[Any]:
    return columns.values.to_list() if isinstance(columns.values, bulk.Packed) else columns.values


@pytest.mark.requirement("a:D-80")
def test_headers_are_a_dict_or_pairs() -> None:
    assert headers_of(None) is None
    assert headers_of({}) is None
    assert headers_of({"a": "ü", "b": None}) == (("a", "ü".encode()), ("b", None))
    assert headers_of([("a", b"1"), ("a", bytearray(b"2"))]) == (("a", b"1"), ("a", b"2"))
    for wrong in ([("a",)], {"a": 5}, [(5, b"a")], "ab", [5]):
        with pytest.raises(TypeError):
            headers_of(wrong)


def accumulator(**more: Any) -> tuple[Accumulator, list[None]]:
    woken: list[None] = []
    settings: dict[str, Any] = {
        "lock": threading.Lock(),
        "random": Random(1),
        "now_s": lambda: 0.0,
        "wake": lambda: woken.append(None),
        "batch_size": 1_000,
        "buffer_memory": 100_000,
        "row_bytes_max": 10_000,
        "partitioner": DIRECT,
    }
    return Accumulator(**{**settings, **more}), woken


@pytest.mark.requirement("a:D-52", "b:F-22")
def test_records_without_a_key_stick_until_their_batch_is_full_and_leave_out_the_leaderless() -> None:
    made, woken = accumulator()
    made.set_topic("t", 6, (1, 3, 4))
    place: Any = made.topics["t"]
    used = []
    for _ in range(400):
        taken = made.try_append("t", b"x" * 100, None) or made.put(place, None, (1, None, b"x" * 100, None), 124, None)
        assert taken is not None
        used.append(taken._batch.partition)
    assert set(used) == {1, 3, 4}
    runs = [count for part, count in runs_of(used)][:-1]
    assert set(runs) == {8}, "a whole batch to one, then another"
    assert len(woken) == 1, "the core is woken once until it has looked"
    assert made.reserved <= 100_000
    made.validate()
    made.set_topic("t", 2, ())
    assert place.sticky in (0, 1), "nobody leads anything: any of them"
    made.validate()


def runs_of(items: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for item in items:
        if found and found[-1][0] == item:
            found[-1] = (item, found[-1][1] + 1)
        else:
            found.append((item, 1))
    return found


@pytest.mark.requirement("b:F-25")
def test_other_partitioners_see_every_record() -> None:
    made, _ = accumulator(partitioner=create_partitioner("round_robin"))
    made.set_topic("t", 5, (0, 1, 2, 3, 4))
    place: Any = made.topics["t"]
    assert made.try_append("t", b"v", b"k") is None, "the fast way knows one partitioner"
    row = (1, b"k", b"v", None)
    used = [made.put(place, None, row, 26, None)._batch.partition for _ in range(10)]  # type: ignore[union-attr]
    assert used == [0, 1, 2, 3, 4] * 2
    sticky, _ = accumulator(partitioner=create_partitioner("uniform_sticky"))
    sticky.set_topic("t", 5, (0, 1, 2, 3, 4))
    place = sticky.topics["t"]
    assert len({sticky.put(place, None, row, 26, None)._batch.partition for _ in range(10)}) == 1  # type: ignore[union-attr]


def test_many_threads_lose_no_row() -> None:
    made, _ = accumulator(buffer_memory=1 << 30, batch_size=2_000)
    made.set_topic("t", 3, (0, 1, 2))
    place: Any = made.topics["t"]
    counts = [0] * 4

    def work(number: int) -> None:
        for row in range(3_000):
            value = b"%d-%d" % (number, row)
            if made.try_append("t", value, None) is None:
                assert made.put(place, None, (1, None, value, None), 24 + len(value), None) is not None
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with made.lock:
        made.seal_all()
    rows = [row[2] or b"" for producer_batch in made.unfinished for row in producer_batch.rows]
    assert sorted(rows) == sorted(b"%d-%d" % (number, row) for number in range(4) for row in range(3_000))
    assert made.count_unfinished() == sum(counts) == 12_000
    made.validate()


@pytest.mark.parametrize(
    ("name", "partitions"),
    [("consistent", [0, 3, 3, 0, 3, 2, 2]), ("fnv1a", [3, 0, 1, 1, 3, 1, 3]), ("default", [1, 0, 0, 0, 2, 2, 0])],
)
def test_hashes_of_keys_are_those_of_librdkafka(name: str, partitions: list[int]) -> None:
    """The numbers are its own: version 2.16 against its mock cluster; tests/interop asks it again."""
    keys = [b"", b"a", b"kafka", b"42", bytes(range(256)), b"x" * 1000, "ключ".encode()]
    made = create_partitioner(name)
    assert [made.partition(FakeState(), key, b"v") for key in keys] == partitions
    place = FakeState()
    place.sticky = 2
    assert made.partition(place, None, b"v") == 2
    assert made.is_sticky(None)
    assert not made.is_sticky(b"a")
    assert create_partitioner("consistent_random").partition(place, b"", b"v") == 2, "an empty key is none"
    assert create_partitioner("consistent_random").partition(place, b"kafka", b"v") == 3
