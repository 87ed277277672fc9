"""The transactions of `MockProducer`: the states of the real producer, without a coordinator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from tidelog.client.consumer.arguments import read_offsets
from tidelog.client.core_host import CoreHost
from tidelog.client.durations import check_timeout
from tidelog.client.errors import TransactionAbortedError, fresh
from tidelog.client.option_table import ProducerConfig
from tidelog.client.producer.core import ProducerCore
from tidelog.client.producer.fast_path import Delivery, Headers
from tidelog.client.producer.transaction_state import Event, State, TransactionStates
from tidelog.client.producer.transactional import TransactionBlock
from tidelog.client.producer.transactions import OffsetsToSend, check_join, checked_members, checked_token
from tidelog.client.record import GroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidTransactionStateError, TidelogError

MEMBER_IDS = count(1_000)


@dataclass(frozen=True)
class SentRecord:
    """A record of `history`, as it would be sent. `offset` is None while it is pending, and if it failed."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    delivery: Delivery = field(repr=False, compare=False)

    @property
    def offset(self) -> int | None:
        done = self.delivery.done() and self.delivery.exception() is None
        return self.delivery.result().offset if done else None


class MockTransactions:
    """A part of `MockProducer`. `committed` has the records of committed transactions, `aborted` those of others, and
    `offsets` what `send_offsets` has committed, by group."""

    _config: ProducerConfig
    _lock: threading.RLock
    _host: CoreHost[ProducerCore]

    def _new_transactions(self) -> None:
        self.committed: list[SentRecord] = []
        self.aborted: list[SentRecord] = []
        self.offsets: dict[str, dict[TopicPartition, OffsetAndMetadata]] = {}
        self.members: list[tuple[int, ...]] = []
        """The members that each commit named."""
        self._states = TransactionStates()
        self._records: list[SentRecord] = []
        self._pending_offsets: dict[str, dict[TopicPartition, OffsetAndMetadata]] = {}
        self._commit_errors: deque[Exception] = deque()
        self._token = b""
        self._member_id = -1
        self._states.is_prepared = False
        self._block: object = None

    # For tests.

    def fail_transaction(self, error: TidelogError) -> None:
        """Fail the open transaction, as a record that cannot be stored does; ProducerFencedError ends the producer."""
        with self._lock:
            self._states.fail(error)

    def raise_in_commit(self, error: Exception, *, times: int = 1) -> None:
        """Make the next calls of `commit_transaction` raise `error`: TransactionTimeoutError leaves the outcome open,
        another TidelogError fails the transaction."""
        self._commit_errors.extend([error] * times)

    # As `tidelog.Producer`.

    def init_transactions(self, *, keep_prepared: bool = False, timeout: float | None = None) -> bool:
        """Initialize; a mock has no earlier instance, and no prepared transaction."""
        self._check_owner("init_transactions", timeout)
        if self._states.state is not State.UNINITIALIZED:
            raise self._states.rejection("init_transactions")
        self._states.move(Event.INITIALIZED)
        return False

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        self._check_owner("begin_transaction")
        self._states.move(Event.BEGUN)

    def send_offsets(self, offsets: OffsetsToSend, group: GroupMetadata, *, timeout: float | None = None) -> None:
        """Add offsets to the transaction; `offsets` of the mock has them after the commit."""
        self._check_owner("send_offsets", timeout)
        if not isinstance(group, GroupMetadata):
            raise TypeError(f"group is what Consumer.group_metadata() returns, not {type(group).__name__}")
        if not self._states.takes_records or self._states.is_prepared:
            raise self._states.rejection("send_offsets")
        if checked := read_offsets(offsets):
            self._pending_offsets.setdefault(group.group, {}).update(checked)

    def prepare_transaction(self, *, timeout: float | None = None) -> None:
        """Prepare the transaction: it takes no more records."""
        self._check_owner("prepare_transaction", timeout)
        if self._states.state is not State.IN_TRANSACTION:
            raise self._states.rejection("prepare_transaction")
        self._complete_all()
        self._states.is_prepared = True

    def commit_transaction(
        self, *, members: Iterable[int] = (), token: bytes = b"", timeout: float | None = None
    ) -> bool:
        """Store pending records and commit, or raise what `raise_in_commit` has set."""
        self._check_owner("commit_transaction", timeout)
        named, stored = checked_members(members), checked_token(token)
        self._states.move(Event.ENDING_COMMIT)
        self._complete_all()
        if self._states.error is not None:
            raise fresh(self._states.error)
        if self._commit_errors:
            error = self._commit_errors.popleft()
            if isinstance(error, TidelogError) and not isinstance(error, TimeoutError):
                self._states.fail(error)
                raise fresh(self._states.error or error)
            self._states.may_be_committed = True
            raise error
        is_committed = not stored or stored != self._token
        self._token = stored or self._token
        self.members.append(named)
        self._end(is_committed=is_committed)
        return is_committed

    def abort_transaction(self, *, timeout: float | None = None) -> None:
        """Abort the transaction; pending records fail."""
        self._check_owner("abort_transaction", timeout)
        self._states.move(Event.ENDING_ABORT)
        while self._fail_pending(TransactionAbortedError("the transaction was aborted before this was acknowledged")):
            pass
        self._end(is_committed=False)

    def last_token(self) -> bytes:
        """Return the token of the last commit that had one."""
        self._check_owner("last_token")
        if self._states.state is State.UNINITIALIZED:
            raise self._states.rejection("last_token")
        return self._token

    def join_transaction(self, transactional_id: str, *, label: str = "", timeout: float | None = None) -> int:
        """Become a member; returns an id that is unique in this process."""
        check_join(transactional_id, label)
        self._check_member("join_transaction", timeout)
        if self._states.state not in (State.UNINITIALIZED, State.READY):
            raise self._states.rejection("join_transaction")
        self._complete_all()
        self._states.move(Event.BEGUN)
        self._member_id = next(MEMBER_IDS)
        return self._member_id

    def leave_transaction(self, *, timeout: float | None = None) -> int:
        """Store pending records and leave; the records are in `committed`, as if the owner had named this member."""
        self._check_member("leave_transaction", timeout)
        if self._states.state not in (State.IN_TRANSACTION, State.ABORTABLE_ERROR):
            raise self._states.rejection("leave_transaction")
        self._complete_all()
        error = self._states.error
        self._end(is_committed=error is None)
        if error is not None:
            raise fresh(error)
        return self._member_id

    def transaction(self) -> TransactionBlock:
        """As `tidelog.Producer.transaction`."""
        return TransactionBlock(self)

    # Parts.

    def _complete_all(self) -> None:
        raise NotImplementedError

    def _fail_pending(self, error: Exception) -> bool:
        raise NotImplementedError

    def _close_transaction(self) -> None:
        """As `Transactions.close`: a prepared one stays open."""
        if self._states.state not in (State.IN_TRANSACTION, State.ABORTABLE_ERROR) or self._states.is_prepared:
            return
        if self._config.transactional_id:
            block = self._block
            self.abort_transaction()
            self._block = block  # its end raises ProducerClosedError
            return
        while self._fail_pending(TransactionAbortedError("the member was closed before this was acknowledged")):
            pass
        self._end(is_committed=False)

    @property
    def _is_in_transaction(self) -> bool:
        return bool(self._config.transactional_id) or self._member_id >= 0

    def _enter_transaction(self, block: object) -> None:
        if self._states.state is State.UNINITIALIZED:
            self.init_transactions()
        if self._states.state is State.ABORTING:
            self.abort_transaction()
        self.begin_transaction()
        self._block = block

    def _is_open(self, block: object) -> bool:
        return self._block is block

    def _may_be_committed(self) -> bool:
        return self._states.may_be_committed

    def _check_owner(self, call: str, timeout: float | None = None) -> None:
        self._host.check_open()
        check_timeout(timeout)
        if not self._config.transactional_id:
            raise InvalidTransactionStateError(f"{call}: set transactional_id when you create the producer")

    def _check_member(self, call: str, timeout: float | None) -> None:
        self._host.check_open()
        check_timeout(timeout)
        if self._config.transactional_id:
            raise InvalidTransactionStateError(f"{call}: a member is a producer without transactional_id")
        self._states.is_member = True

    def _check_takes_records(self) -> None:
        if self._is_in_transaction and (self._states.is_prepared or not self._states.takes_records):
            raise self._states.rejection("send")

    def _keep(self, record: SentRecord) -> None:
        if self._is_in_transaction:
            self._records.append(record)

    def _record_failed(self, error: Exception) -> None:
        if isinstance(error, TidelogError) and self._is_in_transaction:
            self._states.fail(error)

    def _end(self, *, is_committed: bool) -> None:
        with self._lock:
            self._states.move(Event.ENDED)
            (self.committed if is_committed else self.aborted).extend(self._records)
            if is_committed:
                for group, offsets in self._pending_offsets.items():
                    self.offsets.setdefault(group, {}).update(offsets)
            self._records, self._pending_offsets, self._states.is_prepared, self._block = [], {}, False, None
