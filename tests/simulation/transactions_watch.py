"""What must hold of the coordinators, seen at each commit of one of their records and at each load of a log.

    decided      a transaction that is prepared to commit or to abort is so for good, on every coordinator
    kept         what one coordinator has committed, the next one has loaded: transactions, epochs, tokens
    invariants   those of decision 32 (`coordinator.transactions.invariants`)
    markers      a marker in a partition is that of a decision that was committed before: its producer, epoch, outcome;
                 see `transactions_markers` for its place
    members      offsets are taken only from a member of their group
    instances    no two instances of a transactional id write with the same producer id and epoch

Checks draw no random numbers, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simulation.broker_checker import Fail, KnownPartition
from simulation.transactions_markers import MarkerChecker
from tidelog.client.record import GroupMetadata
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.state import CoordinatorState
from tidelog.coordinator.transactions.invariants import validate_transaction
from tidelog.coordinator.transactions.records import (
    EPOCH_MAX,
    MEMBER_EPOCH,
    Cause,
    ProducerIdentity,
    Status,
    Transaction,
)
from tidelog.coordinator.transactions.shard import TransactionShard
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState
from tidelog.log.batch import decode, read_header
from tidelog.model.ids import PartitionId
from tidelog.replication.leader_replica import LeaderReplica

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp

_ENDING = {
    int(Status.PREPARE_COMMIT): int(Status.COMPLETE_COMMIT),
    int(Status.PREPARE_ABORT): int(Status.COMPLETE_ABORT),
}
_COMMIT = 1
"""The type of a marker, in the key of its record."""
LARGEST = 1 << 24


class TransactionsWatch:
    def __init__(self, fail: Fail, *, may_forget: bool) -> None:
        """`may_forget`: ids expire."""
        self.counts: Counter[str] = Counter()
        """Decisions by cause, and what happened to coordinators."""
        self._fail = fail
        self._may_forget = may_forget
        self._seen: dict[TransactionShard, TransactionsState] = {}
        self._newest: dict[int, dict[str, Transaction]] = {}
        """Of each partition of `__transaction_state`: what coordinators have committed."""
        self._leaders: dict[int, str] = {}
        self._decided: dict[tuple[int, int], bool] = {}
        """By producer and epoch of the markers: whether it commits."""
        self._markers = MarkerChecker(fail)
        self._seen_groups: dict[Shard, CoordinatorState] = {}
        self._groups: dict[PartitionId, tuple[int, CoordinatorState]] = {}
        """Of each partition of `__consumer_offsets`: the newest leader epoch, and what it has committed."""
        self._instances: dict[tuple[str, ProducerIdentity], str] = {}
        """By transactional id: who has written with this producer id and epoch."""

    def look(self, app: BrokerApp) -> None:
        """After each event of a broker."""
        for group_shard in app.coordinator.shards.values():
            groups = group_shard.state
            if group_shard.is_leading and self._seen_groups.get(group_shard) is not groups:
                self._seen_groups[group_shard] = groups
                self._changed_groups(group_shard.leader, groups)
        for number, shard in app.broker.transactions.shards.items():
            if not shard.is_leading:
                continue
            before = self._seen.get(shard)
            now = shard.state
            if before is now:
                continue
            self._seen[shard] = now
            newest = self._newest.setdefault(number, {})
            if before is None:
                self._loaded(app.name, number, now, newest)
            for who, transaction in now.ids.items():
                if (EMPTY if before is None else before).get(who) is not transaction:
                    self._changed(app.name, who, newest.get(who), transaction)
                    newest[who] = transaction
            for who in [who for who in newest if who not in now.ids]:
                self.counts["ids forgotten"] += 1
                del newest[who]

    def _changed_groups(self, leader: LeaderReplica, state: CoordinatorState) -> None:
        partition_id, epoch = leader.replica.partition_id, leader.leader_epoch
        known = self._groups.get(partition_id)
        if known is None or known[0] <= epoch:
            self._groups[partition_id] = epoch, state

    def is_member(self, identity: GroupMetadata) -> bool:
        """Whether the group has this member, as far as its coordinators have committed. Who is none will never be one
        again under this id and epoch."""
        for _, state in self._groups.values():
            group = state.group(identity.group)
            if group is not None:
                current = group.currents.get(identity.member_id)
                return current is not None and identity.member_epoch in (current.epoch, current.previous_epoch)
        return True

    def offsets_taken(self, name: str, identity: GroupMetadata, *, was_member: bool) -> None:
        """The coordinator has answered a program that its offsets are pending; `was_member` when it asked."""
        if not was_member:
            self._fail(name, f"offsets are taken from {identity}, which was no member of the group any more")

    def writes(self, name: str, owner: str, identity: ProducerIdentity) -> None:
        """An instance of `owner` begins a transaction."""
        other = self._instances.setdefault((owner, identity), name)
        if other != name:
            self._fail(name, f"writes as {owner!r} with producer id and epoch {identity}, as {other} does")

    def _loaded(self, name: str, number: int, now: TransactionsState, newest: dict[str, Transaction]) -> None:
        self.counts["coordinator moves"] += bool(newest) and self._leaders.get(number, name) != name
        self._leaders[number] = name
        for who, transaction in newest.items():
            if who not in now.ids and not (self._may_forget and not transaction.last_token):
                self._fail(name, f"the new coordinator does not know {who!r}: {transaction}")

    def _changed(self, name: str, who: str, before: Transaction | None, now: Transaction) -> None:
        try:
            validate_transaction(who, now)
        except AssertionError as error:
            self._fail(name, f"a committed record of a transactional id: {error}")
        if before is not None:
            self._check_kept(name, who, before, now)
            if before.is_ending and not (now.is_ending and now.number == before.number):
                groups = {partition_id: state for partition_id, (_, state) in self._groups.items()}
                self._markers.completed(name, who, before, groups)
        if now.is_ending and (before is None or not before.is_ending or before.number != now.number):
            self._note_decision(now)
        if before is not None and before.owner[0] != now.owner[0] and before.owner[1] >= EPOCH_MAX - 2:
            self.counts["epochs exhausted"] += 1
        self.counts["members"] += len(now.members) > len(() if before is None else before.members)

    def _check_kept(self, name: str, who: str, before: Transaction, now: Transaction) -> None:
        change = f"{who!r}: {before} becomes {now}"
        if now.number < before.number:
            self._fail(name, f"a transaction is forgotten: {change}")
        if now.number == before.number and before.is_ending and now.status not in (
            before.status, _ENDING[before.status], int(Status.EMPTY)
        ):  # fmt: skip
            self._fail(name, f"a decision has changed: {change}")
        if now.owner[0] == before.owner[0] and now.owner[1] < before.owner[1]:
            self._fail(name, f"an epoch has fallen: {change}")
        if before.last_token and not now.last_token:
            self._fail(name, f"a token is lost: {change}")

    def _note_decision(self, now: Transaction) -> None:
        is_commit = now.status == Status.PREPARE_COMMIT
        self.counts["commits" if is_commit else "aborts"] += 1
        if now.cause != Cause.OWNER:
            self.counts[{Cause.TIMEOUT: "timeouts", Cause.FENCED: "aborts by a new instance"}.get(
                Cause(now.cause), "aborts by an operator"
            )] += 1  # fmt: skip
        self._decided[now.producer_id, now.epoch] = is_commit
        for member in now.members:
            self._decided[member.producer_id, MEMBER_EPOCH + 1] = is_commit and member.producer_id in now.committed

    def marked(self, who: str, known: KnownPartition, data: bytes) -> None:
        """A batch that has been committed in a partition."""
        header = read_header(data)
        self._markers.committed(who, known, header)
        if not header.is_control:
            return
        (record,) = decode(data, decompressed_bytes_max=LARGEST)
        is_commit = int.from_bytes((record.key or b"")[2:4], "big") == _COMMIT
        marker = int(header.producer_id), int(header.producer_epoch)
        self.counts["markers"] += 1
        if self._decided.get(marker) is not is_commit:
            found = {None: "nothing", True: "a commit", False: "an abort"}[self._decided.get(marker)]
            what = f"a marker of producer {marker[0]}, epoch {marker[1]} ({'commit' if is_commit else 'abort'})"
            self._fail(who, f"{known} has {what}, and {found} was decided")
