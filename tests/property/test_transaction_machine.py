"""Any history of requests does what a simple model says (`support.transactions.model`), and any coordinator that reads
the log goes on where the last one stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.transactions.machine import ID, TIMEOUT_MS, Coordinator, partitions
from support.transactions.model import LOST, TransactionalId

from tidelog.coordinator.transactions import ending, initializing, machine, opening, queries, records
from tidelog.coordinator.transactions.records import EPOCH_MAX, ProducerIdentity, Transaction, TransactionRecord
from tidelog.coordinator.transactions.requests import Abort, AddPartitions, End, InitProducer, Join, Prepare, TimeOut
from tidelog.coordinator.transactions.state import EMPTY, apply
from tidelog.model.errors import TidelogError

WHO = st.sampled_from(["owner", "owner", "owner", "previous", "older", "future", "another", "member"])
VERSIONS = st.sampled_from([2, 2, 1])
PARTITIONS = st.sets(st.integers(0, 3), min_size=1, max_size=3)
TOKENS = st.sampled_from([b"", b"", b"7", b"8"])
PREPARED_TIMEOUT_MS = 24 * 3_600_000


class OneTransactionalId(RuleBasedStateMachine):
    coordinator: Coordinator
    model: TransactionalId

    @initialize(epoch=st.sampled_from([0, EPOCH_MAX - 3]))
    def begin(self, epoch: int) -> None:
        self.coordinator = Coordinator()
        known = Transaction(producer_id=9, epoch=epoch, timeout_ms=TIMEOUT_MS, updated_ms=0)
        self.coordinator.state = self.base = apply(EMPTY, [TransactionRecord(ID, known)])
        self.model = TransactionalId((9, epoch))
        self.new_id = 9
        self.owners = {(9, epoch)}

    def who(self, name: str) -> ProducerIdentity:
        producer_id, epoch = self.model.owner
        members = sorted(self.model.members())
        return {
            "owner": (producer_id, epoch),
            "previous": self.model.previous or (producer_id, max(0, epoch - 1)),
            "older": (producer_id, max(0, epoch - 2)),
            "future": (producer_id, epoch + 1),
            "another": (5, 0),
            "member": (members[0], 0) if members else (6, 0),
        }[name]

    def fresh(self) -> int:
        self.new_id += 1
        return self.new_id

    def submit(self, request: Any, expected: str) -> Any:
        """Return the reply; None if it is rejected, as expected."""
        before, code, reply = self.coordinator.state, "", None
        try:
            reply = self.coordinator.submit(request)
        except TidelogError as error:
            code = error.code.name
        assert code == expected, f"{request}: {code or reply}, not {expected or 'done'}"
        assert not code or self.coordinator.state is before, "a rejection changes something"
        return reply

    @rule(name=WHO, is_new=st.booleans(), keeps=st.booleans())
    def init(self, name: str, is_new: bool, keeps: bool) -> None:
        who, new_id = None if is_new else self.who(name), self.fresh()
        before = self.model.owner
        expected = self.model.init(who, keeps=keeps, new_id=new_id)
        producer_id, epoch = who or (-1, -1)
        request = InitProducer(
            transactional_id=ID,
            timeout_ms=TIMEOUT_MS,
            now_ms=self.coordinator.now_ms,
            producer_id=producer_id,
            epoch=epoch,
            keep_prepared=keeps,
            new_producer_id=new_id,
        )
        reply = self.submit(request, expected)
        if reply is None:
            return
        assert reply.is_ending == self.model.is_ending
        if reply.is_ending:
            return
        assert (reply.producer_id, reply.epoch) == self.model.owner
        if is_new:
            assert self.model.owner not in self.owners, "two instances have one identity"
        self.owners.add(self.model.owner)
        assert reply.last_token == self.model.token
        kept = self.model.open is not None and self.model.open.is_prepared and keeps
        assert reply.has_open == kept
        if kept and self.model.open is not None:
            assert (reply.open_producer_id, reply.open_epoch) == self.model.open.owner
        assert is_new or who in (before, self.model.previous)

    @rule(name=WHO, numbers=PARTITIONS, version=VERSIONS, verifies=st.booleans())
    def add(self, name: str, numbers: set[int], version: int, verifies: bool) -> None:
        who = self.who(name)
        expected = self.model.add(who, numbers, version=version, verifies=verifies)
        request = AddPartitions(
            transactional_id=ID,
            producer_id=who[0],
            epoch=who[1],
            partitions=partitions(*numbers),
            now_ms=self.coordinator.now_ms,
            version=version,
            verify_only=verifies,
        )
        reply = self.submit(request, expected)
        assert reply is None or reply.number == self.model.count

    @rule()
    def join(self) -> None:
        member = self.fresh()
        expected = self.model.join(member)
        request = Join(transactional_id=ID, now_ms=self.coordinator.now_ms, new_producer_id=member)
        reply = self.submit(request, expected)
        assert reply is None or (reply.producer_id, reply.epoch) == (member, 0)

    @rule(name=WHO)
    def prepare(self, name: str) -> None:
        who = self.who(name)
        expected = self.model.prepare(who)
        now_ms = self.coordinator.now_ms
        self.submit(Prepare(transactional_id=ID, producer_id=who[0], epoch=who[1], now_ms=now_ms), expected)

    @rule(name=WHO, is_commit=st.booleans(), version=VERSIONS, token=TOKENS, named=st.integers(0, 3))
    def end(self, name: str, is_commit: bool, version: int, token: bytes, named: int) -> None:
        who, new_id = self.who(name), self.fresh()
        members = set(sorted(self.model.members())[:named]) if named < 3 else {5}
        expected = self.model.end(who, is_commit=is_commit, version=version, named=members, token=token, new_id=new_id)
        request = End(
            transactional_id=ID,
            producer_id=who[0],
            epoch=who[1],
            is_commit=is_commit,
            now_ms=self.coordinator.now_ms,
            version=version,
            members=tuple(members),
            token=token,
            new_producer_id=new_id,
        )
        reply = self.submit(request, expected)
        assert reply is None or (reply.producer_id, reply.epoch) == self.model.owner
        self.owners.add(self.model.owner)

    @rule(passed_ms=st.sampled_from([TIMEOUT_MS - 1, TIMEOUT_MS, PREPARED_TIMEOUT_MS]), is_late=st.booleans())
    def time_out(self, passed_ms: int, is_late: bool) -> None:
        new_id, attempt = self.fresh(), self.model.open
        due_ms = PREPARED_TIMEOUT_MS if attempt is not None and attempt.is_prepared else TIMEOUT_MS
        is_due = self.model.is_open and not is_late and passed_ms >= due_ms
        if is_due:
            self.model.decide(LOST, new_id)
        now_ms, number = self.coordinator.now_ms + passed_ms, self.model.count - is_late
        request = TimeOut(transactional_id=ID, number=number, now_ms=now_ms, new_producer_id=new_id)
        assert self.submit(request, "") == is_due

    @rule()
    def operator_aborts(self) -> None:
        new_id, is_open = self.fresh(), self.model.is_open
        if is_open:
            self.model.decide(LOST, new_id)
        request = Abort(transactional_id=ID, now_ms=self.coordinator.now_ms, new_producer_id=new_id)
        assert self.submit(request, "") == is_open

    @rule(is_late=st.booleans())
    def complete(self, is_late: bool) -> None:
        completes = self.model.is_ending and not is_late
        if completes:
            self.model.complete()
        assert self.submit(self.coordinator.complete_request(self.model.count - is_late), "") == completes

    @rule()
    def restart(self) -> None:
        """Another coordinator reads the log, from the beginning."""
        state = self.base
        for entry in self.coordinator.log:
            state = self.coordinator.machine.replay(state, entry)
        assert state == self.coordinator.state
        self.coordinator.state = state

    @invariant()
    def markers_are_those_of_the_model(self) -> None:
        attempt = self.model.open
        found = tuple(queries.markers_to_write(ID, self.coordinator.transaction, coordinator_epoch=4))
        if attempt is None or not attempt.ended:
            assert not found
            return
        assert {marker.producer_id: marker.is_commit for marker in found} == attempt.commits()
        for marker in found:
            numbers = {each.partition for each in marker.partitions}
            assert numbers == attempt.partitions[marker.producer_id]
            assert marker.number == self.model.count
            batches = attempt.owner[1] if marker.producer_id == attempt.owner[0] else 0
            assert marker.epoch == batches if not marker.is_strict else marker.epoch > batches

    @invariant()
    def what_is_known_is_what_the_model_knows(self) -> None:
        known, attempt = self.coordinator.transaction, self.model.open
        assert known.owner == self.model.owner
        assert (known.last_token, known.number) == (self.model.token, self.model.count)
        assert known.is_open == self.model.is_open
        assert known.is_ending == self.model.is_ending
        held = {known.producer_id: known.partitions} if attempt is not None else {}
        held.update({member.producer_id: member.partitions for member in known.members})
        expected = {} if attempt is None else {attempt.owner[0]: partitions(), **_as_sets(attempt.partitions)}
        assert held == expected


def _as_sets(held: dict[int, set[int]]) -> dict[int, Any]:
    return {producer_id: partitions(*numbers) for producer_id, numbers in held.items()}


@pytest.mark.case("C1")
@pytest.mark.requirement("a:H-30", "a:H-35", "b:J-10")
def test_any_history_does_what_the_model_says() -> None:
    run_state_machine_as_test(OneTransactionalId)


# Deliberate defects: a checker that cannot fail is worthless.

Patch = Callable[[pytest.MonkeyPatch], None]


def adds_to_prepared_transactions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opening, "_check_not_prepared", lambda *_: None)


def mixes_versions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opening, "_check_version", lambda *_: None)


def adds_what_is_to_be_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opening, "_check_has", lambda *_: None)


def forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    right = ending._with_outcome
    patch.setattr(ending, "_with_outcome", lambda *args, **named: right(*args, **{**named, "token": b""}))


def times_out_any_transaction(patch: pytest.MonkeyPatch) -> None:
    def wrong(state: Any, request: Any, limits: Any) -> Any:
        return ending.time_out(state, replace(request, number=state.get(request.transactional_id).number), limits)

    patch.setitem(machine.DECISIONS, TimeOut, wrong)


def lets_replaced_instances_recover(patch: pytest.MonkeyPatch) -> None:
    right = initializing._with_new_owner
    patch.setattr(
        initializing, "_with_new_owner", lambda before, request, previous: right(before, request, before.owner)
    )


def replays_without_the_version(patch: pytest.MonkeyPatch) -> None:
    right = records._unpack
    patch.setattr(records, "_unpack", lambda name, raw: 2 if name == "version" else right(name, raw))


@pytest.mark.parametrize(
    "defect",
    [
        adds_to_prepared_transactions,
        mixes_versions,
        adds_what_is_to_be_verified,
        forgets_tokens,
        times_out_any_transaction,
        lets_replaced_instances_recover,
        replays_without_the_version,
    ],
)
def test_deliberate_defects_are_noticed(defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            OneTransactionalId,
            settings=settings(derandomize=True, max_examples=1_000, stateful_step_count=30, phases=[Phase.generate]),
        )
