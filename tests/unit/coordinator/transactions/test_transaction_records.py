"""Records of transactions: coding, versions to come, bad bytes, batches."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgpack
import pytest
from support.transactions.machine import Coordinator, partition, partitions

from tidelog.coordinator.records import DECISION_BYTES_MAX
from tidelog.coordinator.transactions import records as r
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.records import Cause, Member, Status, Transaction, TransactionRecord
from tidelog.coordinator.transactions.state import EMPTY, apply
from tidelog.log import batch
from tidelog.log.batch import ControlKind
from tidelog.model.errors import CorruptStateError, PolicyViolationError

FULL = Transaction(
    producer_id=1 << 40,
    epoch=7,
    status=Status.PREPARE_COMMIT,
    timeout_ms=60_000,
    updated_ms=9,
    started_ms=5,
    prepared_ms=6,
    partitions=partitions(0, 1) | {partition(3, topic=2)},
    members=(Member(3, "a"), Member(4, "b", partitions(1))),
    committed=(4,),
    last_token=b"\x00token",
    previous_producer_id=1 << 40,
    previous_epoch=6,
    next_producer_id=12,
    version=1,
    cause=Cause.OPERATOR,
    number=17,
    next_epoch=1,
    previous_outcome=Status.COMPLETE_COMMIT,
)


def decode(value: bytes) -> Transaction | None:
    record = r.decode_record(r.encode_key("t"), value)
    assert record is not None
    assert record.transactional_id == "t"
    return record.value


def test_every_field_survives_and_defaults_take_no_room() -> None:
    assert decode(r.encode_value(FULL)) == FULL
    assert decode(r.encode_value(Transaction(producer_id=5))) == Transaction(producer_id=5)
    assert len(r.encode_value(Transaction(producer_id=5))) == 6
    for field in dataclasses.fields(Transaction):
        if field.default is not dataclasses.MISSING and field.name != "extra":
            assert getattr(FULL, field.name) != field.default, f"{field.name} is not tested"


def test_field_ids_never_change() -> None:
    kind, version, fields = msgpack.unpackb(r.encode_value(FULL), strict_map_key=False)
    topics = [[bytes(15) + b"\x01", [0, 1]], [bytes(15) + b"\x02", [3]]]
    members = [[3, "a", []], [4, "b", [[bytes(15) + b"\x01", [1]]]]]
    assert (kind, version) == (1, 0)
    assert fields == {
        0: 1 << 40,
        1: 7,
        2: 2,
        3: 60_000,
        4: 9,
        5: 5,
        6: 6,
        7: topics,
        8: members,
        9: [4],
        10: b"\x00token",
        11: 1 << 40,
        12: 6,
        13: 12,
        14: 1,
        15: 3,
        16: 17,
        17: 1,
        18: 4,
    }
    assert r.encode_key("t") == bytes([0x92, 1, 0xA1]) + b"t"


def test_fields_and_kinds_of_a_newer_version_are_kept_or_skipped() -> None:
    fields = {0: 5, 40: "new", 41: [1, 2]}
    value = decode(msgpack.packb([1, 3, fields]))
    assert value == Transaction(producer_id=5, extra=((40, "new"), (41, (1, 2))))
    assert value is not None
    assert decode(r.encode_value(value)) == value
    assert r.decode_record(msgpack.packb([9, "t"]), b"anything") is None
    assert r.decode_record(msgpack.packb([0]), None) is None
    tombstone = r.decode_record(r.encode_key("t"), None)
    assert tombstone == TransactionRecord("t", None)


def _with(number: int, value: object) -> bytes:
    return bytes(msgpack.packb([1, 0, {0: 5, number: value}]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"", None),
        (b"\xc1", None),
        (msgpack.packb(7), None),
        (msgpack.packb([]), None),
        (msgpack.packb([1]), None),
        (msgpack.packb([1, "t", "u"]), None),
        (msgpack.packb([1, b"t"]), None),
        (msgpack.packb(["1", "t"]), None),
        (r.encode_key("t"), b""),
        (r.encode_key("t"), b"\xc1"),
        (r.encode_key("t"), r.encode_value(FULL)[:-1]),
        (r.encode_key("t"), r.encode_value(FULL) + b"\x00"),
        (r.encode_key("t"), msgpack.packb([2, 0, {0: 5}])),
        (r.encode_key("t"), msgpack.packb([1, 0])),
        (r.encode_key("t"), msgpack.packb([1, 0, [5]])),
        (r.encode_key("t"), msgpack.packb([1, 0, {}])),
        (r.encode_key("t"), msgpack.packb([1, 0, {"0": 5}])),
        (r.encode_key("t"), _with(0, "5")),
        (r.encode_key("t"), _with(2, 6)),
        (r.encode_key("t"), _with(15, 4)),
        (r.encode_key("t"), _with(18, 9)),
        (r.encode_key("t"), _with(7, 5)),
        (r.encode_key("t"), _with(7, [[b"short", [1]]])),
        (r.encode_key("t"), _with(7, [[bytes(16), ["1"]]])),
        (r.encode_key("t"), _with(8, [[3, "a"]])),
        (r.encode_key("t"), _with(8, [["3", "a", []]])),
        (r.encode_key("t"), _with(8, [[3, 4, []]])),
        (r.encode_key("t"), _with(9, ["4"])),
        (r.encode_key("t"), _with(10, "token")),
    ],
)
def test_bytes_that_are_no_record_are_rejected(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptStateError, match="transaction record"):
        r.decode_record(key, value)


def test_random_changes_of_a_record_raise_the_documented_error_or_nothing() -> None:
    source = random.Random(4)
    data = r.encode_value(FULL)
    rejected = 0
    for _ in range(3_000):
        changed = bytearray(data)
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(len(changed))] = source.randrange(256)
        try:
            decode(bytes(changed))
        except CorruptStateError:
            rejected += 1
    assert rejected > 300


def test_a_decision_is_one_batch_that_reads_as_its_records() -> None:
    made = r.decision([TransactionRecord("a", FULL), TransactionRecord("b", None)], now_ms=77)
    machine = TransactionMachine()
    entries = machine.encode([made])
    assert len(entries) == 1
    assert r.decode_batch(entries[0]) == made.records
    assert batch.read_header(entries[0]).max_timestamp == 77
    assert machine.replay(EMPTY, b"xx" + entries[0], 2) == apply(EMPTY, made.records)
    assert machine.replay(EMPTY, machine.abort()) is EMPTY


def test_many_decisions_take_few_batches_and_none_is_split() -> None:
    machine = TransactionMachine()
    value = Transaction(producer_id=1, last_token=b"x" * 300_000)
    made = [r.decision([TransactionRecord(f"{number}", value)]) for number in range(7)]
    entries = machine.encode(made)
    assert [len(r.decode_batch(entry)) for entry in entries] == [3, 3, 1]
    assert r.decode_batch(entries[2]) == made[6].records


def test_a_decision_that_is_too_large_is_rejected() -> None:
    value = Transaction(producer_id=1, last_token=b"x" * DECISION_BYTES_MAX)
    with pytest.raises(PolicyViolationError):
        r.decision([TransactionRecord("t", value)])


def test_other_batches_are_skipped_or_rejected() -> None:
    control = batch.encode_control(
        ControlKind.COMMIT, coordinator_epoch=0, timestamp=0, producer_id=1, producer_epoch=0
    )
    assert r.decode_batch(control) == ()
    foreign = batch.encode_columns([0], [b"\xc1"], [b""])
    with pytest.raises(CorruptStateError):
        r.decode_batch(foreign)


def test_a_compacted_log_is_the_same_state() -> None:
    coordinator = Coordinator()
    for name in ("a", "b"):
        coordinator.id = name
        coordinator.init()
        coordinator.add(0)
        coordinator.commit(token=b"x")
        coordinator.complete()
    newest: dict[str, Any] = {}
    for entry in coordinator.log:
        for record in r.decode_batch(entry):
            newest.pop(record.transactional_id, None)
            newest[record.transactional_id] = record
    assert len(newest) == 2
    assert apply(EMPTY, newest.values()) == coordinator.state == coordinator.replayed()
