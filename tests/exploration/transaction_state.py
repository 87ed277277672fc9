"""What the exploration of transactions is made of: clients, members, partitions, the coordinator and the network."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from exploration.transaction_partition import PartitionLeader
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.records import Member, Transaction, TransactionRecord, decision
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState
from tidelog.model.maps import sorted_items

ID = "t"
OWNER, SECOND, HEALER = "A", "B", "H"
NEW, WAITING, READY, OVER = "new", "waiting", "ready", "over"
Message = tuple[Any, ...]


@dataclass
class Budgets:
    """How often each kind of event may still happen."""

    transactions: int = 2
    """Of each instance."""
    instances: int = 0
    members: int = 0
    aborts: int = 0
    prepares: int = 0
    crashes: int = 0
    """Of the coordinator."""
    elections: int = 0
    """Of leaders of partitions."""
    timeouts: int = 0
    operators: int = 0
    repeats: int = 0
    losses: int = 0
    """Of replies."""

    def as_key(self) -> tuple[int, ...]:
        return tuple(vars(self).values())


@dataclass
class Client:
    name: str
    phase: str = NEW
    producer_id: int = -1
    epoch: int = -1
    started: int = 0
    """Transactions so far."""
    tag: str = ""
    """Of the open transaction."""
    sent: dict[int, bool] = field(default_factory=dict)
    """Partitions of the open transaction: is the batch acknowledged?"""
    added: tuple[int, ...] = ()
    """Version 1: partitions that the coordinator has added."""
    sequences: dict[int, int] = field(default_factory=dict)
    is_broken: bool = False
    """It can only abort."""
    is_prepared: bool = False
    waits_for: Message = ()

    def as_key(self) -> tuple[Any, ...]:
        values = (tuple(sorted(v.items())) if isinstance(v, dict) else v for v in vars(self).values())
        return tuple(values)


@dataclass
class MemberProcess:
    tag: str
    phase: str = NEW
    producer_id: int = -1
    is_acked: bool = False

    def as_key(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


@dataclass
class Exploration:
    left: Budgets
    clients: dict[str, Client]
    members: list[MemberProcess] = field(default_factory=list)
    partitions: list[PartitionLeader] = field(default_factory=list)
    network: list[Message] = field(default_factory=list)
    """Sorted, each once."""
    state: TransactionsState = EMPTY
    coordinator_epoch: int = 0
    next_producer_id: int = 10
    written: set[tuple[int, int]] = field(default_factory=set)
    """(producer id, partition) of the markers that this coordinator knows to be written."""
    committed: set[str] = field(default_factory=set)
    """Tags that an End has committed."""
    reported: dict[str, bool] = field(default_factory=dict)
    newest: str = ""
    """The last client that has begun to initialize the id without a producer id."""

    def put(self, message: Message) -> None:
        if message not in self.network:
            self.network.append(message)
            self.network.sort(key=repr)

    def check_healed(self) -> None:
        """Nothing hangs, and nothing is torn."""
        transaction = self.state.ids[ID]
        assert not transaction.is_ending, f"the end hangs: {transaction}"
        assert not transaction.is_open, f"a transaction hangs: {transaction}"
        for number, leader in enumerate(self.partitions):
            for producer_id, producer in leader.producers.items():
                assert not producer.open_tag, f"{producer.open_tag} of {producer_id} hangs in partition {number}"
            for tag, is_committed in leader.results.items():
                assert is_committed == (tag in self.committed), f"{tag} is torn in partition {number}"

    def as_key(self) -> Any:
        return (
            self.left.as_key(),
            [client.as_key() for client in self.clients.values()],
            [member.as_key() for member in self.members],
            [leader.as_key() for leader in self.partitions],
            self.network,
            _transaction_key(self.state.ids[ID]),
            self.coordinator_epoch,
            self.next_producer_id,
            sorted(self.written),
            sorted(self.committed),
            sorted(self.reported.items()),
            self.newest,
        )


def replayed(state: TransactionsState) -> TransactionsState:
    """Return the state that a new coordinator reads from the compacted log."""
    machine, replayed = TransactionMachine(), EMPTY
    for transactional_id, transaction in sorted_items(state.ids):
        made = decision([TransactionRecord(transactional_id, transaction)])
        for entry in machine.encode([made]):
            replayed = machine.replay(replayed, entry)
    return replayed


_TIMES = ("updated_ms", "started_ms", "prepared_ms")


def _transaction_key(transaction: Transaction) -> tuple[Any, ...]:
    names = [each.name for each in dataclasses.fields(transaction) if each.name not in _TIMES]
    return (transaction.is_prepared, *(_plain(getattr(transaction, name)) for name in names))


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return tuple(sorted(each.partition for each in value))
    if isinstance(value, Member):
        return value.producer_id, value.label, _plain(value.partitions)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else int(value) if isinstance(value, int) else value
