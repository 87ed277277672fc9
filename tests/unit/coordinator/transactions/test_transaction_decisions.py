"""Epochs, markers, members, limits and queries of the transaction coordinator's machine. What each request does in each
state: `test_request_table.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.transactions.machine import ID, TIMEOUT_MS, Coordinator, partitions

from tidelog.coordinator.records import DECISION_BYTES_MAX
from tidelog.coordinator.transactions import queries
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.records import EPOCH_MAX, Cause, Status, Transaction, TransactionRecord
from tidelog.coordinator.transactions.requests import Abort, End, ForgetIdle, Join, ProducerIdNeeded
from tidelog.coordinator.transactions.state import EMPTY, apply
from tidelog.model.ids import Offset
from tidelog.model.transaction_errors import TransactionalIdNotFoundError
from tidelog.replication.transaction_messages import Marker

LAST_EPOCH = EPOCH_MAX - 1
"""The highest that an owner uses."""


def initialized(limits: TransactionLimits | None = None) -> Coordinator:
    coordinator = Coordinator(limits)
    coordinator.init()
    return coordinator


def with_epoch(epoch: int) -> Coordinator:
    coordinator = Coordinator()
    known = Transaction(producer_id=9, epoch=epoch, timeout_ms=TIMEOUT_MS, updated_ms=coordinator.now_ms)
    coordinator.state = apply(EMPTY, [TransactionRecord(ID, known)])
    return coordinator


def markers(coordinator: Coordinator) -> dict[int, Marker]:
    found = queries.markers_to_write(ID, coordinator.transaction, coordinator_epoch=3)
    return {marker.producer_id: marker for marker in found}


# Epochs.


def test_a_new_id_gets_a_producer_id_and_each_instance_a_higher_epoch() -> None:
    coordinator = Coordinator()
    first, second = coordinator.init(), coordinator.init()
    assert (first.producer_id, first.epoch) == (10, 0)
    assert (second.producer_id, second.epoch) == (10, 1)


def test_a_decision_that_needs_a_producer_id_asks_for_one_and_changes_nothing() -> None:
    coordinator = Coordinator()
    machine = TransactionMachine()
    with pytest.raises(ProducerIdNeeded):
        machine.decide(EMPTY, coordinator.init_request(), offset=Offset(0))
    coordinator.init()
    with pytest.raises(ProducerIdNeeded):
        machine.decide(coordinator.state, Join(transactional_id=ID, now_ms=1), offset=Offset(0))


@pytest.mark.case("C1")
def test_each_end_raises_the_epoch_and_markers_carry_it() -> None:
    coordinator = initialized()
    coordinator.add(0)
    reply = coordinator.commit()
    assert (reply.producer_id, reply.epoch, reply.was_done) == (10, 1, False)
    assert (markers(coordinator)[10].epoch, markers(coordinator)[10].is_strict) == (1, True)
    coordinator.complete()
    coordinator.add(0)
    assert coordinator.abort().epoch == 2


@pytest.mark.case("C1")
def test_an_abort_of_nothing_fences_a_late_batch() -> None:
    coordinator = initialized()
    assert coordinator.abort().epoch == 1
    assert coordinator.code(coordinator.add_request(0, who=(10, 0))) == "PRODUCER_FENCED"
    assert coordinator.abort(who=(10, 0)).was_done


def test_version_1_keeps_the_epoch_and_its_markers_are_not_strict() -> None:
    coordinator = initialized()
    coordinator.add(0, version=1)
    assert coordinator.commit(version=1).epoch == 0
    assert (markers(coordinator)[10].epoch, markers(coordinator)[10].is_strict) == (0, False)


def test_a_timeout_raises_the_epoch_in_version_1_too() -> None:
    coordinator = initialized()
    coordinator.add(0, version=1)
    assert coordinator.time_out()
    assert (markers(coordinator)[10].epoch, markers(coordinator)[10].is_strict) == (1, True)


@pytest.mark.parametrize("end", ["commit", "abort", "timeout", "operator", "instance"])
def test_an_exhausted_epoch_continues_with_a_new_producer_id(end: str) -> None:
    coordinator = with_epoch(LAST_EPOCH)
    coordinator.add(0)
    if end in ("commit", "abort"):
        reply = coordinator.commit() if end == "commit" else coordinator.abort()
        assert (reply.producer_id, reply.epoch) == (10, 0)
    elif end == "timeout":
        assert coordinator.time_out()
    elif end == "operator":
        assert coordinator.operator_aborts()
    else:
        assert coordinator.init().is_ending
    assert (markers(coordinator)[9].epoch, markers(coordinator)[9].is_commit) == (EPOCH_MAX, end == "commit")
    assert coordinator.code(coordinator.add_request(0)) == "CONCURRENT_TRANSACTIONS"
    coordinator.complete()
    assert coordinator.owner == (10, 0)
    if end != "instance":
        assert coordinator.abort(who=(9, LAST_EPOCH)).epoch == 0 if end != "commit" else True
        recovered = coordinator.init((9, LAST_EPOCH))
        assert (recovered.producer_id, recovered.epoch) == (10, 0)
    coordinator.add(0)
    assert coordinator.commit().epoch == 1


def test_an_instance_never_gets_the_epoch_of_markers() -> None:
    coordinator = with_epoch(LAST_EPOCH)
    reply = coordinator.init()
    assert (reply.producer_id, reply.epoch) == (10, 0)
    assert coordinator.code(coordinator.init_request((9, LAST_EPOCH))) == "INVALID_PRODUCER_ID_MAPPING"


def test_a_repeated_request_of_the_owner_gets_the_same_reply_until_another_instance_comes() -> None:
    coordinator = initialized()
    first = coordinator.init((10, 0))
    assert coordinator.init((10, 0)) == first
    assert first.epoch == 1
    assert coordinator.init().epoch == 2
    assert coordinator.code(coordinator.init_request((10, 0))) == "PRODUCER_FENCED"
    assert coordinator.code(coordinator.init_request((10, 1))) == "PRODUCER_FENCED"


def test_an_owner_that_recovers_with_an_open_transaction_continues_after_its_abort() -> None:
    coordinator = initialized()
    coordinator.add(0)
    assert coordinator.init((10, 0)).is_ending
    assert coordinator.transaction.status == Status.PREPARE_ABORT
    assert coordinator.init((10, 0)).is_ending
    coordinator.complete()
    assert coordinator.init((10, 0)).epoch == 1
    assert coordinator.owner == (10, 1)


# Timeouts.


@pytest.mark.requirement("a:H-22", "a:T-20")
def test_a_commit_that_races_a_timeout_can_be_aborted_and_is_not_fatal() -> None:
    coordinator = initialized()
    coordinator.add(0)
    assert coordinator.time_out()
    late = coordinator.end_request(who=(10, 0))
    for _ in range(2):
        assert coordinator.code(late) == "TRANSACTION_ABORTABLE"
        assert coordinator.code(coordinator.add_request(1, who=(10, 0))) == "TRANSACTION_ABORTABLE"
        assert coordinator.abort(who=(10, 0)).epoch == 1
        coordinator.complete()
    coordinator.add(0)
    assert coordinator.commit().epoch == 2


def test_a_transaction_is_due_after_its_timeout_and_a_prepared_one_later() -> None:
    limits = TransactionLimits(prepared_timeout_ms=10 * TIMEOUT_MS)
    coordinator = initialized(limits)
    assert queries.due_ms(coordinator.transaction, limits) is None
    coordinator.add(0)
    began_ms, coordinator.now_ms = coordinator.now_ms, coordinator.now_ms + 500
    assert queries.due_ms(coordinator.transaction, limits) == began_ms + TIMEOUT_MS
    coordinator.prepare()
    assert queries.due_ms(coordinator.transaction, limits) == coordinator.now_ms + 10 * TIMEOUT_MS
    assert not coordinator.submit(coordinator.timeout_request(after_ms=10 * TIMEOUT_MS - 1))
    assert coordinator.submit(coordinator.timeout_request(after_ms=10 * TIMEOUT_MS))
    assert queries.due_ms(coordinator.transaction, limits) is None


def test_a_late_timeout_does_not_abort_the_next_transaction() -> None:
    coordinator = initialized()
    coordinator.add(0)
    late = coordinator.timeout_request(after_ms=10**9)
    coordinator.commit()
    coordinator.complete()
    coordinator.add(0)
    assert not coordinator.submit(late)
    assert coordinator.transaction.is_open


# Prepared transactions.


def test_a_prepared_transaction_is_taken_over_and_ended_by_the_new_instance_only() -> None:
    coordinator = initialized()
    coordinator.add(0)
    coordinator.prepare()
    reply = coordinator.init(keep_prepared=True)
    assert (reply.has_open, reply.open_producer_id, reply.open_epoch) == (True, 10, 0)
    assert (reply.producer_id, reply.epoch) == (10, 1)
    assert coordinator.init(keep_prepared=True).open_epoch == 0, "the epoch of its batches stays"
    for request in (coordinator.end_request(who=(10, 0)), coordinator.end_request(who=(10, 1))):
        assert coordinator.code(request) == "PRODUCER_FENCED"
    assert coordinator.commit().epoch == 3
    assert markers(coordinator)[10].epoch == 3
    coordinator.complete()
    assert coordinator.commit(who=(10, 2)).was_done


def test_a_prepared_transaction_with_an_exhausted_epoch_is_taken_over_under_a_new_producer_id() -> None:
    coordinator = with_epoch(LAST_EPOCH)
    coordinator.add(0)
    coordinator.prepare()
    reply = coordinator.init(keep_prepared=True)
    assert (reply.producer_id, reply.epoch) == (10, 0)
    assert (reply.open_producer_id, reply.open_epoch) == (9, LAST_EPOCH)
    ended = coordinator.commit()
    assert (ended.producer_id, ended.epoch) == (10, 1), "a late End of epoch 0 must not end the next transaction"
    assert [(marker.producer_id, marker.epoch) for marker in markers(coordinator).values()] == [(9, EPOCH_MAX)]
    coordinator.complete()
    assert coordinator.owner == (10, 1)


def test_a_prepared_transaction_does_not_change() -> None:
    coordinator = initialized()
    coordinator.add(0)
    member = coordinator.join()
    coordinator.prepare()
    coordinator.prepare()
    assert coordinator.code(coordinator.add_request(0)) == "INVALID_TXN_STATE"
    who = member.producer_id, member.epoch
    assert coordinator.code(coordinator.add_request(1, who=who)) == "INVALID_TXN_STATE"
    assert coordinator.code(Join(transactional_id=ID, now_ms=1)) == "INVALID_TXN_STATE"


# Members.


def test_named_members_commit_and_all_others_abort() -> None:
    coordinator = initialized()
    members = [coordinator.join(f"task {number}") for number in range(3)]
    for number, member in enumerate(members):
        coordinator.add(number, who=(member.producer_id, member.epoch))
    coordinator.add(7)
    named = (members[2].producer_id, members[0].producer_id, members[0].producer_id)
    coordinator.commit(members=named)
    assert coordinator.transaction.committed == (members[0].producer_id, members[2].producer_id)
    found = markers(coordinator)
    assert {pid: marker.is_commit for pid, marker in found.items()} == {10: True, 11: True, 12: False, 13: True}
    assert {marker.epoch for pid, marker in found.items() if pid != 10} == {1}
    assert all(marker.is_strict and marker.number == 1 and marker.coordinator_epoch == 3 for marker in found.values())


def test_an_abort_aborts_all_members_and_one_without_partitions_gets_no_marker() -> None:
    coordinator = initialized()
    member = coordinator.join()
    coordinator.join()
    coordinator.add(1, who=(member.producer_id, member.epoch))
    coordinator.abort()
    assert [(marker.producer_id, marker.is_commit) for marker in markers(coordinator).values()] == [(11, False)]


def test_a_late_member_cannot_write_into_the_next_transaction() -> None:
    coordinator = initialized()
    member = coordinator.join()
    coordinator.commit()
    request = coordinator.add_request(1, who=(member.producer_id, member.epoch))
    assert coordinator.code(request) == "PRODUCER_FENCED"
    coordinator.complete()
    coordinator.add(0)
    assert coordinator.code(request) == "INVALID_PRODUCER_ID_MAPPING"
    assert coordinator.code(coordinator.end_request(members=(member.producer_id,))) == "TRANSACTION_ABORTABLE"


def test_a_token_is_stored_with_the_commit_and_ends_nothing_again() -> None:
    coordinator = initialized()
    coordinator.add(0)
    assert not coordinator.commit(token=b"7").was_done
    assert coordinator.commit(token=b"7").was_done, "while the markers are written"
    coordinator.complete()
    assert coordinator.init().last_token == b"7"
    coordinator.add(0)
    reply = coordinator.commit(token=b"7")
    assert (reply.was_done, reply.epoch) == (True, 2)
    assert coordinator.transaction.is_open, "the attempt that came too late is for the owner to abort"
    coordinator.abort()
    coordinator.complete()
    assert coordinator.transaction.last_token == b"7"
    coordinator.commit(token=b"8")
    coordinator.complete()
    assert (coordinator.transaction.last_token, coordinator.transaction.number) == (b"8", 3)


def test_an_owner_that_missed_several_timeouts_is_not_fenced() -> None:
    """A member that is late opens the next transaction, and that one times out, too."""
    coordinator = initialized()
    coordinator.add(0)
    coordinator.time_out()
    coordinator.complete()
    for _ in range(2):
        coordinator.join("late")
        coordinator.time_out()
        coordinator.complete()
    assert coordinator.owner == (10, 3)
    for epoch in (0, 1, 2):
        assert coordinator.code(coordinator.end_request(who=(10, epoch))) == "TRANSACTION_ABORTABLE"
        assert coordinator.code(coordinator.add_request(0, who=(10, epoch))) == "TRANSACTION_ABORTABLE"
        reply = coordinator.abort(who=(10, epoch))
        assert (reply.epoch, reply.was_done) == (3, True)
    coordinator.add(0)
    coordinator.time_out()
    assert coordinator.code(coordinator.end_request(who=(10, 2))) == "PRODUCER_FENCED", "it used epoch 3 meanwhile"
    assert coordinator.code(coordinator.end_request(who=(10, 3))) == "TRANSACTION_ABORTABLE"


def test_a_new_instance_fences_an_owner_that_missed_several_timeouts() -> None:
    coordinator = initialized()
    coordinator.add(0)
    coordinator.time_out()
    coordinator.complete()
    coordinator.join("late")
    coordinator.time_out()
    coordinator.complete()
    coordinator.init()
    for epoch in (0, 1, 2):
        assert coordinator.code(coordinator.end_request(who=(10, epoch))) == "PRODUCER_FENCED"


def test_epochs_that_are_exhausted_by_timeouts_leave_the_owner_its_place() -> None:
    coordinator = with_epoch(EPOCH_MAX - 2)
    producer_id = coordinator.owner[0]
    coordinator.add(0)
    coordinator.time_out()
    coordinator.complete()
    coordinator.join("late")
    coordinator.time_out()
    coordinator.complete()
    assert coordinator.owner[0] != producer_id
    assert coordinator.code(coordinator.end_request(who=(producer_id, EPOCH_MAX - 2))) == "TRANSACTION_ABORTABLE"
    assert coordinator.abort(who=(producer_id, EPOCH_MAX - 2)).producer_id == coordinator.owner[0]


def test_the_reply_to_a_stored_token_says_whether_the_sender_has_stored_it() -> None:
    coordinator = initialized()
    coordinator.add(0)
    coordinator.commit(token=b"7")
    repeated = coordinator.commit(who=(10, 0), token=b"7")
    assert (repeated.was_done, repeated.is_earlier) == (True, False)
    coordinator.complete()
    coordinator.add(0)
    still_open = coordinator.commit(who=(10, 1), token=b"7")
    assert (still_open.epoch, still_open.is_earlier) == (1, True)
    coordinator.time_out()
    for _ in range(2):
        timed_out = coordinator.commit(who=(10, 1), token=b"7")
        assert (timed_out.epoch, timed_out.was_done, timed_out.is_earlier) == (2, True, True)
        coordinator.complete()


def test_an_end_that_is_repeated_after_a_member_has_opened_the_next_transaction_is_done() -> None:
    coordinator = initialized()
    coordinator.add(0)
    coordinator.commit()
    coordinator.complete()
    coordinator.join("straggler")
    reply = coordinator.commit(who=(10, 0))
    assert (reply.was_done, reply.epoch) == (True, 1)
    assert coordinator.code(coordinator.end_request(who=(10, 0), is_commit=False)) == "INVALID_TXN_STATE"


# Bad input and limits.


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"timeout_ms": 0}, "INVALID_TRANSACTION_TIMEOUT"),
        ({"timeout_ms": -1}, "INVALID_TRANSACTION_TIMEOUT"),
        ({"timeout_ms": 15 * 60_000 + 1}, "INVALID_TRANSACTION_TIMEOUT"),
        ({"who": (5, -1)}, "INVALID_REQUEST"),
        ({"who": (-1, 5)}, "INVALID_REQUEST"),
    ],
)
def test_a_bad_init_is_rejected(fields: dict[str, Any], code: str) -> None:
    coordinator = Coordinator()
    assert coordinator.code(coordinator.init_request(**fields)) == code
    assert coordinator.state is EMPTY


@pytest.mark.parametrize("name", ["", "x" * 1_025])
def test_a_bad_name_is_rejected(name: str) -> None:
    coordinator = Coordinator(transactional_id=name)
    assert coordinator.code(coordinator.init_request()) == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token": b"x" * 1_025}, "POLICY_VIOLATION"),
        ({"token": b"x", "is_commit": False}, "INVALID_REQUEST"),
        ({"members": (11,), "is_commit": False}, "INVALID_REQUEST"),
        ({"token": b"x", "version": 1}, "INVALID_REQUEST"),
    ],
)
def test_a_bad_end_is_rejected(fields: dict[str, Any], code: str) -> None:
    coordinator = initialized()
    coordinator.join()
    assert coordinator.code(coordinator.end_request(**fields)) == code
    assert coordinator.transaction.is_open


def test_an_add_of_nothing_and_a_long_label_are_rejected() -> None:
    coordinator = initialized()
    assert coordinator.code(coordinator.add_request()) == "INVALID_REQUEST"
    assert coordinator.code(Join(transactional_id=ID, now_ms=1, label="x" * 1_025)) == "INVALID_REQUEST"
    assert coordinator.transaction.status == Status.EMPTY


def test_partitions_members_and_ids_have_limits() -> None:
    coordinator = initialized(TransactionLimits(partitions_max=3, members_max=1, ids_max=1))
    coordinator.add(0, 1)
    member = coordinator.join()
    who = member.producer_id, member.epoch
    assert coordinator.code(coordinator.add_request(0, 1, who=who)) == "POLICY_VIOLATION"
    coordinator.add(0, who=who)
    coordinator.add(0, 1)
    assert coordinator.code(coordinator.add_request(2)) == "POLICY_VIOLATION"
    assert coordinator.code(Join(transactional_id=ID, now_ms=1)) == "POLICY_VIOLATION"
    coordinator.id = "another"
    assert coordinator.code(coordinator.init_request()) == "POLICY_VIOLATION"


def test_a_transaction_that_is_as_large_as_it_may_be_can_end_in_every_way() -> None:
    coordinator = initialized()
    coordinator.add(0)
    label = "\N{GRINNING FACE}" * 1_024
    names: list[int] = []
    while True:
        join = Join(transactional_id=ID, now_ms=1, label=label, new_producer_id=2**62 + len(names))
        try:
            names.append(coordinator.submit(join).producer_id)
        except Exception as error:
            assert "use smaller transactions" in str(error)  # noqa: PT017
            break
        assert len(names) < 1_000
    assert len(names) * len(label.encode()) > DECISION_BYTES_MAX - (10 << 10)
    full = coordinator.state
    big = 2**62 - 1
    coordinator.submit(replace(coordinator.end_request(members=tuple(names), token=b"x" * 1_024), new_producer_id=big))
    coordinator.complete()
    coordinator.state = full
    assert coordinator.time_out()
    coordinator.state = full
    coordinator.submit(Abort(transactional_id=ID, now_ms=1))


# Forgetting.


def test_idle_ids_are_forgotten_some_at_a_time_and_never_with_a_token_or_a_transaction() -> None:
    coordinator = Coordinator(TransactionLimits(forgotten_per_decision_max=2))
    for name in ("a", "b", "c", "open", "token", "young"):
        coordinator.id = name
        coordinator.now_ms = 5_000 if name == "young" else 1_000
        coordinator.init()
        if name == "open":
            coordinator.add(0)
        if name == "token":
            coordinator.commit(token=b"x")
            coordinator.complete()
    request = ForgetIdle(now_ms=2_000, expiration_ms=1_000)
    assert coordinator.submit(request)
    assert sorted(coordinator.state.ids) == ["c", "open", "token", "young"]
    assert not coordinator.submit(request)
    assert not coordinator.submit(request)
    assert sorted(coordinator.state.ids) == ["open", "token", "young"]
    assert coordinator.replayed() == coordinator.state
    coordinator.id = "a"
    assert coordinator.init().producer_id not in (10, 11, 12), "a producer id is never used again"


def test_one_decision_forgets_as_many_long_names_as_fit() -> None:
    coordinator = Coordinator()
    name = "\N{GRINNING FACE}" * 1_000
    idle = [TransactionRecord(f"{name}{number}", Transaction(producer_id=number)) for number in range(500)]
    coordinator.state = apply(EMPTY, idle)
    request = ForgetIdle(now_ms=1_000, expiration_ms=1)
    assert coordinator.submit(request)
    assert 0 < len(coordinator.state.ids) < 300
    while coordinator.submit(request):
        pass
    assert not coordinator.state.ids


# Queries.


def test_transactions_are_listed_by_status_producer_and_duration() -> None:
    coordinator = Coordinator()
    for number, name in enumerate(("b", "a", "c")):
        coordinator.id = name
        coordinator.now_ms = 1_000 * number
        coordinator.init()
        if name != "c":
            coordinator.add(number)
    member = coordinator.submit(Join(transactional_id="a", now_ms=1))

    def names(**wanted: Any) -> list[str]:
        return [name for name, _ in queries.list_transactions(coordinator.state, now_ms=2_000, **wanted)]

    assert names() == ["a", "b", "c"]
    assert names(statuses=["Empty"]) == ["c"]
    assert names(statuses=["Ongoing", "Empty"]) == ["a", "b", "c"]
    assert names(statuses=["Sleeping"]) == []
    assert names(producer_ids=[10, 12]) == ["b", "c"]
    assert names(producer_ids=[member.producer_id]) == ["a"]
    assert names(longer_than_ms=1_000) == ["b"]
    assert names(longer_than_ms=999) == ["a", "b"]
    assert names(longer_than_ms=999, statuses=["Empty"]) == []


def test_an_unknown_id_is_not_described() -> None:
    coordinator = initialized()
    assert queries.describe(coordinator.state, ID) is coordinator.transaction
    with pytest.raises(TransactionalIdNotFoundError):
        queries.describe(coordinator.state, "other")
    assert coordinator.code(Abort(transactional_id="other", now_ms=1)) == "TRANSACTIONAL_ID_NOT_FOUND"


def test_markers_are_those_of_a_transaction_that_ends_in_the_order_of_partitions() -> None:
    coordinator = initialized()
    coordinator.add(2, 0, 1)
    assert markers(coordinator) == {}
    coordinator.commit()
    assert [each.partition for each in markers(coordinator)[10].partitions] == [0, 1, 2]
    assert {each.leader_epoch for each in markers(coordinator)[10].partitions} == {-1}
    coordinator.complete()
    assert markers(coordinator) == {}
    assert queries.all_partitions(coordinator.transaction) == frozenset()


def test_a_transaction_has_the_partitions_of_its_owner_and_members() -> None:
    coordinator = initialized()
    coordinator.add(0)
    member = coordinator.join()
    coordinator.add(0, 3, who=(member.producer_id, member.epoch))
    assert queries.all_partitions(coordinator.transaction) == partitions(0, 3)


def test_causes_say_who_ended_the_transaction() -> None:
    found = []
    for end in ("commit", "timeout", "instance", "operator", "recovery"):
        coordinator = initialized()
        coordinator.add(0)
        ends: dict[str, Callable[[], object]] = {
            "commit": coordinator.commit,
            "timeout": coordinator.time_out,
            "instance": coordinator.init,
            "operator": coordinator.operator_aborts,
            "recovery": partial(coordinator.init, coordinator.owner),
        }
        ends[end]()
        found.append(Cause(coordinator.transaction.cause))
    assert found == [Cause.OWNER, Cause.TIMEOUT, Cause.FENCED, Cause.OPERATOR, Cause.OWNER]


def test_an_end_names_the_transactional_id_and_what_is_wrong() -> None:
    coordinator = initialized()
    with pytest.raises(Exception, match=f"transactional id '{ID}': no transaction is open"):
        coordinator.submit(End(transactional_id=ID, producer_id=10, epoch=0, is_commit=True, now_ms=1))
