"""The state of one partition of `__transaction_state`: an immutable value, the replay of its records. Pure.

The last record of an id is its value; a tombstone removes it. So a replay of the whole log, a replay of the compacted
log, and the changes that a former leader made all end in the same state. `invariants` says what holds in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.coordinator.transactions.records import Transaction, TransactionRecord
from tidelog.model.maps import Map, updated

_NO_IDS: Map[str, Transaction] = Map()


@dataclass(frozen=True, slots=True)
class TransactionsState:
    ids: Map[str, Transaction] = _NO_IDS
    """By transactional id."""

    def get(self, transactional_id: str) -> Transaction | None:
        return self.ids.get(transactional_id)


EMPTY = TransactionsState()


def apply(state: TransactionsState, records: Iterable[TransactionRecord]) -> TransactionsState:
    """Return the state after these records. Never raises, whatever the sequence."""
    changes = [(record.transactional_id, record.value) for record in records]
    return TransactionsState(updated(state.ids, changes)) if changes else state
