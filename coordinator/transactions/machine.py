"""The transaction coordinator's pure state machine: requests in, decisions and replies out. Pure.

    machine = TransactionMachine(TransactionLimits(...))
    decisions, reply = machine.decide(state, request, offset=...)     raises the rejection; changes nothing
    state = machine.apply(state, decisions)
    entries = machine.encode(decisions)                               record batches for the log
    state = machine.replay(state, batch)                              one batch of the log, on every replica

It runs in `raft.runtime.StateMachineRuntime`, whose "records" are whole `records.Decision`s here: one for a request
that changes something, none for one that does not. `requests` has the requests and their replies, `invariants` what
holds after each of them.

Duties of the shell:
1. It answers `ProducerIdNeeded` with the same request and a `new_producer_id` that nobody has used.
2. It sends `queries.markers_to_write` of each id in PREPARE of the *committed* state, to the leaders of the partitions,
   again and again, until each is replicated or the topic is deleted. Then it submits `Complete`. A new coordinator does
   so for every id that it has loaded in PREPARE.
3. At `queries.due_ms` of an open transaction it submits `TimeOut`. Before that time it changes nothing.
4. It submits `ForgetIdle` now and then, and again while the reply is True.
5. `InitReply.is_ending`: it waits for the end of the transaction and submits the same request again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidelog.coordinator.records import DECISION_BYTES_MAX, encode_entries
from tidelog.coordinator.transactions import ending, initializing, opening
from tidelog.coordinator.transactions.invariants import check_step
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.records import (
    Decision,
    TransactionRecord,
    decision,
    decode_batch,
    empty_entry,
)
from tidelog.coordinator.transactions.requests import (
    Abort,
    AddPartitions,
    Complete,
    End,
    ForgetIdle,
    InitProducer,
    Join,
    Prepare,
    TimeOut,
)
from tidelog.coordinator.transactions.state import TransactionsState, apply
from tidelog.log.batch_header import Buffer
from tidelog.model.errors import PolicyViolationError
from tidelog.model.ids import Offset

Decide = Callable[[TransactionsState, Any, TransactionLimits], tuple[Sequence[TransactionRecord], Any]]

_INT_BYTES = 9
"""Of the largest integer, packed."""
_FIELDS_OF_END = 20
"""More than the integers that an end can add to a record, each with its field id."""

DECISIONS: dict[type[Any], Decide] = {
    InitProducer: initializing.init_producer,
    AddPartitions: opening.add_partitions,
    Join: opening.join,
    Prepare: opening.prepare,
    End: ending.end,
    Abort: ending.abort,
    Complete: ending.complete,
    TimeOut: ending.time_out,
    ForgetIdle: initializing.forget_idle,
}


def _check_room(record: TransactionRecord, made: Decision, limits: TransactionLimits) -> None:
    """Raise if the end of the transaction, which adds to the record, would not fit: it could never end."""
    assert record.value is not None, "asked of open transactions"
    needed = made.size + limits.token_bytes_max + _INT_BYTES * (len(record.value.members) + _FIELDS_OF_END)
    if needed > DECISION_BYTES_MAX:
        raise PolicyViolationError(
            f"transactional id {record.transactional_id!r}: the transaction takes {made.size} bytes, and the limit is"
            f" {DECISION_BYTES_MAX} with what its end adds: use smaller transactions"
        )


class TransactionMachine:
    def __init__(self, limits: TransactionLimits | None = None) -> None:
        self.limits = limits or TransactionLimits()

    def decide(self, state: TransactionsState, request: Any, *, offset: Offset) -> tuple[Sequence[Decision], Any]:
        """Return the decision of a request (none if nothing changes) and its reply; raise the error of a rejection."""
        decide = DECISIONS.get(type(request))
        assert decide is not None, f"no decision for {type(request).__name__}"
        records, reply = decide(state, request, self.limits)
        if not records:
            return (), reply
        for record in records:
            check_step(record.transactional_id, state.get(record.transactional_id), record.value)
        made = decision(records, request.now_ms)
        for record in records:
            if record.value is not None and record.value.is_open:
                _check_room(record, made, self.limits)
        return (made,), reply

    def apply(self, state: TransactionsState, records: Sequence[Decision]) -> TransactionsState:
        return apply(state, (record for each in records for record in each.records))

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        return encode_entries(records)

    def abort(self) -> bytes:
        return empty_entry()

    def replay(self, state: TransactionsState, data: Buffer, position: int = 0) -> TransactionsState:
        """Return the state after the batch at `position`; raises `CorruptStateError` or an error of the batch."""
        return apply(state, decode_batch(data, position))
