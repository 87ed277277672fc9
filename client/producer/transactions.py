"""The transactions of a producer, on the IO loop: as the owner of a transactional id, or as a member of one.

    owner     init -> begin -> records, offsets -> [prepare] -> commit | abort -> begin ...
    member    join -> records -> leave (reports the member's id to the owner, which names it in its commit) -> join ...

`transaction_state` has the states. What a program can rely on:

- A commit is requested when every record has been acknowledged, and no record is taken from then on.
- Records of an aborted transaction are not sent any more. Those in flight are fenced by the epoch, which rises with
  every end.
- A request without an answer is repeated until the timeout of the call. Repeating is safe: the coordinator knows
  requests by their epoch. After the timeout, or a cancellation, the same call may be made again.
- A commit whose answer is lost has an unknown outcome; only the same commit can be called then.

Requests to the coordinator run one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.connections import call_in_parts
from tidelog.client.consumer.arguments import ByPartition, read_offsets
from tidelog.client.coordinators import TRANSACTIONS, Coordinators, is_retriable
from tidelog.client.durations import check_timeout
from tidelog.client.errors import NoClusterError, TransactionAbortedError, TransactionTimeoutError, fresh
from tidelog.client.option_table import ProducerConfig, name_fault
from tidelog.client.producer.accumulator import Accumulator
from tidelog.client.producer.partition_queue import ProducerIdAndEpoch
from tidelog.client.producer.sender import Sender
from tidelog.client.producer.transaction_state import PREPARED, Event, State, TransactionStates, as_fatal, is_fatal
from tidelog.client.record import GroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.model.errors import (
    ErrorCode,
    InvalidTransactionStateError,
    TidelogError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.transaction_errors import TransactionAbortableError
from tidelog.rpc.grpc.methods import Method, method_named
from tidelog.rpc.v1 import transactions_pb2 as pb

LOGGER = logging.getLogger(__name__)

ATTEMPT_MS = 10_000
"""Of one attempt; then the coordinator is looked up again."""
CLOSE_S = 5.0
"""How long `close` tries to abort an open transaction; then the coordinator does, after its timeout."""
MEMBERS_MAX = 10_000
TOKEN_BYTES_MAX = 1_024
"""As `coordinator/transactions/limits.py`."""

IN_DOUBT = (
    "whether the transaction has committed is not known: read committed data, or, if the commit had a token, call "
    "last_token() of a new instance"
)

_INIT = method_named("Transactions", "Init")
_OFFSETS = method_named("Transactions", "CommitOffsets")
_END = method_named("Transactions", "End")
_PREPARE = method_named("Transactions", "Prepare")
_JOIN = method_named("Transactions", "Join")
_MOVED = frozenset({ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})
"""Retriable errors of the right coordinator."""

OffsetsToSend = ByPartition[OffsetAndMetadata | int]


class Transactions:
    """Used on one event loop. `drop` fails all records that have no outcome; `flush` waits for all outcomes."""

    def __init__(
        self,
        cluster: ClusterClient,
        config: ProducerConfig,
        sender: Sender,
        accumulator: Accumulator,
        *,
        flush: Callable[[], Awaitable[None]],
        drop: Callable[[TidelogError], None],
        batches: Callable[[], int],
    ) -> None:
        """`batches` counts those that were sent."""
        self.states = TransactionStates()
        self.token = b""
        self.block: object = None
        """The block `with transaction()` that has begun the open transaction."""
        self._cluster = cluster
        self._config = config
        self._sender = sender
        self._accumulator = accumulator
        self._flush = flush
        self._drop = drop
        self._batches = batches
        self._id = config.transactional_id or ""
        """Of the owner, or of the transaction that a member has joined."""
        self._identity = ProducerIdAndEpoch(-1, -1)
        self._coordinators = Coordinators(cluster, TRANSACTIONS)
        self._group_coordinators = Coordinators(cluster)
        self._lock = asyncio.Lock()
        self._entering = asyncio.Lock()
        """One block at a time begins: the next one then knows that a transaction is open."""
        self._batches_before = 0
        self._has_offsets = False
        self.states.is_prepared = False
        self._offset_requests = 0
        """Each has its number: one that was delayed cannot overwrite what a later one has sent."""
        self._commit: tuple[tuple[int, ...], bytes] = ((), b"")
        self._is_in_doubt = False
        """An attempt of the last call has no answer: it may have succeeded."""

    @property
    def is_used(self) -> bool:
        """Whether this producer is an owner, or has been a member."""
        return self.states.is_member or bool(self._config.transactional_id)

    # The owner.

    async def init_transactions(self, *, keep_prepared: bool = False, timeout: float | None = None) -> bool:
        """Start this instance of the transactional id: fence those before it, and abort what they have left open.

        Call it once, before the first transaction. With `keep_prepared` a prepared transaction of an earlier instance
        stays open, and belongs to this one: the result is True then, and only `commit_transaction` and
        `abort_transaction` can follow. `last_token` is known afterwards.

        Raises TransactionTimeoutError after `timeout` seconds (default: `max_block_ms`); call it again then.
        """
        async with self._call("init_transactions", timeout) as end_s:
            self._check_owner("init_transactions")
            if self.states.state is not State.UNINITIALIZED:
                raise self.states.rejection("init_transactions")
            request = pb.InitTransactionsRequest(
                transactional_id=self._id,
                transaction_timeout_ms=self._config.transaction_timeout_ms,
                keep_prepared=keep_prepared,
            )
            reply = await self._ask("init_transactions", _INIT, request, end_s)
            self._identity = ProducerIdAndEpoch(reply.producer_id, reply.producer_epoch, is_transactional=True)
            self.token = reply.last_token
            self.states.move(Event.INITIALIZED)
            self.states.is_prepared = reply.HasField("prepared")
            if self.states.is_prepared:
                self.states.move(Event.BEGUN)
            self._reject(PREPARED if self.states.is_prepared else "call begin_transaction first", has_error=False)
            return self.states.is_prepared

    async def begin_transaction(self) -> None:
        """Begin a transaction. All records from now on are part of it, until it ends."""
        async with self._call("begin_transaction", None):
            self._check_owner("begin_transaction")
            self.states.move(Event.BEGUN)
            self._begin()

    async def enter_transaction(self, block: object) -> None:
        """For `transaction()`: initialize if necessary, finish an abort that was not confirmed, and begin.

        Out of a block a TransactionTimeoutError means that its transaction may have committed: not so here.
        """
        async with self._entering:
            try:
                if self.states.state is State.UNINITIALIZED:
                    await self.init_transactions()
                if self.states.state is State.ABORTING:
                    await self.abort_transaction()
                await self.begin_transaction()
            except TransactionTimeoutError as error:
                raise TransactionAbortableError(f"the transaction has not begun: {error}") from error
            self.block = block

    async def send_offsets(self, offsets: OffsetsToSend, group: GroupMetadata, *, timeout: float | None = None) -> None:
        """Commit offsets of a consumer group in this transaction: with its records, or not at all.

        `offsets` maps partitions to the next offset to read, as `Consumer.commit` does; `group` is
        `Consumer.group_metadata()`, which fences a consumer that has lost its partitions. The consumer needs
        `enable_auto_commit=False`. Any error fails the transaction (TransactionAbortableError), also a timeout: it is
        not known then whether it has these offsets.
        """
        async with self._call("send_offsets", timeout) as end_s:
            self._check_owner("send_offsets")
            if not isinstance(group, GroupMetadata):
                raise TypeError(f"group is what Consumer.group_metadata() returns, not {type(group).__name__}")
            if not self._accepts_more:
                raise self.states.rejection("send_offsets")
            checked = read_offsets(offsets)
            if not checked:
                return
            try:
                await self._send_offsets(checked, group, end_s)
            except TidelogError as error:
                raise self._failed(error) from error
            except asyncio.CancelledError:
                self._failed(InvalidTransactionStateError("send_offsets was cancelled"))
                raise

    async def prepare_transaction(self, *, timeout: float | None = None) -> None:
        """Prepare the transaction, for a program that commits in two phases: it takes no more records, and stays open
        for transaction.prepared.timeout.ms, also if this process ends (`init_transactions(keep_prepared=True)`)."""
        async with self._call("prepare_transaction", timeout) as end_s:
            self._check_owner("prepare_transaction")
            if self.states.state is not State.IN_TRANSACTION:
                raise self.states.rejection("prepare_transaction")
            self._reject("prepare_transaction has begun: commit or abort the transaction")
            await self._wait_for_records("prepare_transaction", end_s)
            request = pb.PrepareTransactionRequest(transactional_id=self._id, **self._named())
            await self._ask("prepare_transaction", _PREPARE, request, end_s)
            self.states.is_prepared = True

    async def commit_transaction(
        self, *, members: Iterable[int] = (), token: bytes = b"", timeout: float | None = None
    ) -> bool:
        """Wait until all records are stored, and commit them, with the offsets and the records of `members`.

        `members` are the ids that `join_transaction` returned to other processes; records of all other members abort.
        `token` is stored with the commit (up to 1 KiB): `last_token` returns it, in later instances too. If it is the
        token that is stored already, this transaction was committed before: nothing changes, what was written now is
        aborted, and the result is False.

        Raises TransactionAbortableError if a record has failed or the transaction was aborted (call
        `abort_transaction`), TransactionTimeoutError after `timeout` seconds (default: `max_block_ms`). After a timeout
        or a cancellation the outcome is not known: call it again with the same arguments.
        """
        async with self._call("commit_transaction", timeout) as end_s:
            self._check_owner("commit_transaction")
            commit = (checked_members(members), checked_token(token))
            if self.states.may_be_committed and commit != self._commit:
                raise InvalidTransactionStateError(
                    "commit_transaction: the outcome of the last commit is not known: repeat it with the same members "
                    "and token"
                )
            self._is_in_doubt = self.states.may_be_committed
            self.states.move(Event.ENDING_COMMIT)
            self._commit = commit
            self._reject("the transaction is being committed")
            await self._wait_for_records("commit_transaction", end_s)
            try:
                return await self._end_commit(*commit, end_s)
            except TransactionTimeoutError:
                raise
            except TidelogError as error:
                if is_fatal(error) and self._is_in_doubt:
                    error.add_note(IN_DOUBT)
                raise self._failed(error) from error

    async def _end_commit(self, members: tuple[int, ...], token: bytes, end_s: float) -> bool:
        request = pb.EndTransactionRequest(
            transactional_id=self._id, members=members, token=token, is_commit=True, **self._named()
        )
        is_empty = self._batches() == self._batches_before and not self._has_offsets and not self.states.is_prepared
        if is_empty and not members and not token:
            request.is_commit = False  # there is nothing to commit; members that nobody named abort
        else:
            self.states.may_be_committed = True
        reply = await self._ask("commit_transaction", _END, request, end_s)
        is_committed = not reply.is_earlier
        if reply.is_earlier and self._is_mine(reply):
            # This transaction is still open; else its timeout has aborted it.
            request = pb.EndTransactionRequest(transactional_id=self._id, **self._named())
            reply = await self._ask("commit_transaction", _END, request, end_s)
        self.token = token or self.token
        self._end(reply)
        return is_committed

    async def abort_transaction(self, *, timeout: float | None = None) -> None:
        """Abort the transaction: readers of committed data get none of its records, and its offsets are dropped.

        Records that are not acknowledged yet fail with TransactionAbortedError. Raises TransactionTimeoutError after
        `timeout` seconds (default: `max_block_ms`): call it again; the coordinator aborts the transaction after
        `transaction_timeout_ms` in any case.
        """
        async with self._call("abort_transaction", timeout) as end_s:
            self._check_owner("abort_transaction")
            self.states.move(Event.ENDING_ABORT)
            self._reject("the transaction is being aborted")
            self._drop(TransactionAbortedError("the transaction was aborted before this record was acknowledged"))
            await self._wait_for_records("abort_transaction", end_s, is_abort=True)
            request = pb.EndTransactionRequest(transactional_id=self._id, **self._named())
            try:
                reply = await self._ask("abort_transaction", _END, request, end_s)
            except TransactionTimeoutError:
                raise
            except TidelogError as error:
                raise self._failed(error, is_fatal=True) from error
            self._end(reply)

    async def last_token(self) -> bytes:
        """Return the token of the last commit that had one, by any instance; b"" if there is none. Known after
        `init_transactions`."""
        self._check_owner("last_token")
        if self.states.state is State.UNINITIALIZED:
            raise self.states.rejection("last_token")
        return self.token

    # Members.

    async def join_transaction(self, transactional_id: str, *, label: str = "", timeout: float | None = None) -> int:
        """Become a member of the transaction of another process, its owner: of its open one, or of the next.

        All records from now on are part of it, until `leave_transaction`. They commit only if the owner names the
        returned id: `commit_transaction(members=[...])`. `label` names the member for people. For a producer without
        `transactional_id`; each call returns another id. Records sent before are waited for. Raises
        TransactionalIdNotFoundError if no producer has ever initialized the id.
        """
        async with self._call("join_transaction", timeout) as end_s:
            check_join(transactional_id, label)
            self._check_member("join_transaction")
            if self.states.state not in (State.UNINITIALIZED, State.READY):
                raise self.states.rejection("join_transaction")
            self._reject("call join_transaction first", has_error=False)
            await self._wait_for_records("join_transaction", end_s, is_abort=True)
            self._id = transactional_id
            request = pb.JoinTransactionRequest(transactional_id=transactional_id, label=label)
            reply = await self._ask("join_transaction", _JOIN, request, end_s)
            self._identity = ProducerIdAndEpoch(reply.producer_id, reply.producer_epoch, is_transactional=True)
            self.states.move(Event.BEGUN)
            self._begin()
            return self._identity.id

    async def leave_transaction(self, *, timeout: float | None = None) -> int:
        """Wait until all records of this member are stored, and take no more. Returns the member's id, for the owner.

        Raises TransactionAbortableError if a record has failed: do not report this member; its records abort. After
        that, and after a success, `join_transaction` may follow.
        """
        async with self._call("leave_transaction", timeout) as end_s:
            self._check_member("leave_transaction")
            if self.states.state not in (State.IN_TRANSACTION, State.ABORTABLE_ERROR):
                raise self.states.rejection("leave_transaction")
            self._reject("this member is leaving the transaction")
            await self._wait_for_records("leave_transaction", end_s, is_abort=True)
            error = self.states.error
            self.states.move(Event.ENDED)
            self._reject("call join_transaction first", has_error=False)
            if error is not None:
                raise fresh(error)
            return self._identity.id

    # For the core.

    def record_failed(self, error: Exception) -> None:
        """Called for each batch that fails, before its program can know."""
        if self.is_used and isinstance(error, TidelogError) and self.states.fail(error):
            if self.states.error is not None:
                self._reject("the transaction has failed")
            # Later: the sender reports batches, and is in the middle of that.
            asyncio.get_running_loop().call_soon(self._stop_records)

    async def close(self, timeout: float | None) -> None:
        """Abort what is open, as far as that is quick."""
        is_open = self.states.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR, State.ABORTING)
        if is_open and self.states.is_member:
            self._drop(TransactionAbortedError("the member was closed before this record was acknowledged"))
        elif is_open and not self.states.is_prepared:
            block = self.block
            try:
                await self.abort_transaction(timeout=CLOSE_S if timeout is None else min(timeout, CLOSE_S))
            except TidelogError as error:
                LOGGER.warning(
                    "transactional_id=%s closed with an open transaction, which aborts after %d ms: %s",
                    *(self._id, self._config.transaction_timeout_ms, error),
                )
            self.block = block  # its end raises ProducerClosedError

    # Parts.

    @asynccontextmanager
    async def _call(self, name: str, timeout: float | None) -> AsyncIterator[float]:
        """One call at a time. Yields when it has to end."""
        check_timeout(timeout)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (self._config.max_block_ms / 1000 if timeout is None else timeout)
        try:
            async with asyncio.timeout_at(end_s):
                await self._lock.acquire()
        except TimeoutError:
            raise TransactionTimeoutError(f"{name}: another call of this producer has not ended in time") from None
        try:
            yield end_s
        finally:
            self._lock.release()

    @property
    def _accepts_more(self) -> bool:
        return self.states.takes_records and self._accumulator.rejection is None

    def _check_owner(self, call: str) -> None:
        if not self._config.transactional_id:
            advice = "set transactional_id when you create the producer"
            if self.states.is_member and self.states.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR):
                advice = f"this producer is a member of the transaction of '{self._id}', whose owner ends it: call "
                advice += "leave_transaction"
            raise InvalidTransactionStateError(f"{call}: {advice}")

    def _check_member(self, call: str) -> None:
        self.states.is_member = not self._config.transactional_id
        if self._config.transactional_id:
            raise InvalidTransactionStateError(
                f"{call}: this producer owns transactional id '{self._config.transactional_id}'; a member is a "
                "producer without transactional_id"
            )

    def _named(self) -> dict[str, Any]:
        return {"producer_id": self._identity.id, "producer_epoch": self._identity.epoch}

    def _is_mine(self, reply: pb.EndTransactionResponse) -> bool:
        return (reply.producer_id, reply.producer_epoch) == (self._identity.id, self._identity.epoch)

    def _begin(self) -> None:
        self._batches_before, self._has_offsets, self.states.is_prepared = self._batches(), False, False
        self._sender.begin(self._id, self._identity)
        self._accumulator.reject(None)

    def _end(self, reply: pb.EndTransactionResponse) -> None:
        self._identity = ProducerIdAndEpoch(reply.producer_id, reply.producer_epoch, is_transactional=True)
        self.states.is_prepared, self.block = False, None
        self.states.move(Event.ENDED)
        self._reject("call begin_transaction first", has_error=False)

    def _reject(self, reason: str, *, has_error: bool = True) -> None:
        """Take no records from now on."""
        error = self.states.error if has_error else None
        self._accumulator.reject(error or InvalidTransactionStateError(f"the record was not taken: {reason}"))

    def _stop_records(self) -> None:
        """The transaction has failed: reject records, and fail those without an outcome."""
        error = self.states.error
        if error is not None:
            self._reject("the transaction has failed")
            self._drop(TransactionAbortedError(f"not sent, because an earlier record has failed: {error}"))

    def _failed(self, error: TidelogError, *, is_fatal: bool = False) -> TidelogError:
        """What to raise for an error of a request. `is_fatal`: whatever it is, nothing can follow it."""
        if is_fatal:
            error = as_fatal(error)
        self.states.fail(error)
        self._stop_records()
        return error if self.states.error is None else fresh(self.states.error)

    async def _wait_for_records(self, name: str, end_s: float, *, is_abort: bool = False) -> None:
        """Until all records have their outcome. Raises the error of a transaction that has failed."""
        try:
            async with asyncio.timeout_at(end_s):
                await self._flush()
        except TimeoutError:
            left = self._accumulator.count_unfinished()
            what = "1 record is" if left == 1 else f"{left} records are"
            raise TransactionTimeoutError(f"{name}: {what} not acknowledged in time") from None
        if self.states.error is not None and not is_abort:
            raise fresh(self.states.error)

    async def _send_offsets(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata, end_s: float
    ) -> None:
        self._has_offsets = True
        request = pb.CommitTransactionOffsetsRequest(
            transactional_id=self._id,
            group=group.group,
            member_id=group.member_id,
            member_epoch=group.member_epoch,
            instance_id=group.instance_id,
            **self._named(),
        )
        for key, offset in offsets.items():
            topic = await self._cluster.topic(key.topic)
            if not 0 <= key.partition < len(topic.partitions):
                raise UnknownTopicOrPartitionError(f"{key}: '{key.topic}' has {len(topic.partitions)} partitions")
            request.offsets.add(
                topic=key.topic,
                topic_id=topic.partitions[key.partition].topic_id.bytes,
                partition=key.partition,
                offset=offset.offset,
                leader_epoch=offset.leader_epoch,
                metadata=offset.metadata,
            )

        def failed_row(answer: pb.CommitTransactionOffsetsResponse) -> TidelogError | None:
            return next((error for row in answer.offsets if (error := error_in(row)) is not None), None)

        await self._ask("send_offsets", _OFFSETS, request, end_s, group=group.group, error_of=failed_row)

    async def _ask(
        self,
        name: str,
        method: Method,
        request: Message,
        end_s: float,
        *,
        group: str = "",
        error_of: Callable[[Any], TidelogError | None] = lambda _: None,
    ) -> Any:
        """The coordinator's answer; the coordinator is that of `group` if there is one. Repeats until `end_s`."""
        loop = asyncio.get_running_loop()
        coordinators, key = (self._group_coordinators, group) if group else (self._coordinators, self._id)
        backoff = self._cluster.backoff()
        while True:
            left_ms = max(1, int((end_s - loop.time()) * 1000))
            try:
                coordinator = await coordinators.find(key, timeout_ms=left_ms)
                left_ms = max(1, int((end_s - loop.time()) * 1000))
                call = partial(self._cluster.call_at, coordinator.address, method, timeout_ms=min(left_ms, ATTEMPT_MS))
                answer = await call_in_parts(method, request, partial(self._numbered, call))
                failure = error_of(answer)
                if failure is None:
                    return answer
                raise failure
            except TidelogError as error:
                if not is_retriable(error) or error.code is ErrorCode.STALE_MEMBER_EPOCH:
                    raise
                if isinstance(error, NoClusterError) and not self._cluster.answered:
                    raise
                self._is_in_doubt |= error.code not in _MOVED
                if error.code not in _MOVED:
                    coordinators.forget(key)
                pause_s = backoff.next_s()
                if loop.time() + pause_s >= end_s:
                    what = f"group '{group}'" if group else f"transactional id '{self._id}'"
                    raise TransactionTimeoutError(
                        f"{name}: {what}: no answer in time; the last error: {error}"
                    ) from error
            await asyncio.sleep(pause_s)

    def _numbered(self, call: Callable[[Message], Awaitable[Any]], part: Message) -> Awaitable[Any]:
        if isinstance(part, pb.CommitTransactionOffsetsRequest):
            self._offset_requests += 1
            part.sequence = self._offset_requests
        return call(part)


def check_join(transactional_id: object, label: object) -> None:
    if not isinstance(transactional_id, str) or not transactional_id:
        raise TypeError(f"a transactional id is a str that is not empty, not {transactional_id!r}")
    if not isinstance(label, str):
        raise TypeError(f"label={label!r}: must be a str")
    for name, text in (("transactional_id", transactional_id), ("label", label)):
        if fault := name_fault(text):
            raise ValueError(f"{name}: {fault}")


def checked_members(members: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(members, Iterable):
        raise TypeError(f"members: a list of the ids that join_transaction has returned, not {members!r}")
    checked = tuple(members)
    wrong = next((member for member in checked if type(member) is not int or member < 0), None)
    if wrong is not None:
        raise TypeError(f"members: {wrong!r} is not an id that join_transaction has returned")
    if len(checked) > MEMBERS_MAX:
        raise ValueError(f"{len(checked)} members; at most {MEMBERS_MAX}")
    return checked


def checked_token(token: object) -> bytes:
    if not isinstance(token, bytes):
        raise TypeError(f"token is bytes, not {type(token).__name__}")
    if len(token) > TOKEN_BYTES_MAX:
        raise ValueError(f"a token of {len(token)} bytes; at most {TOKEN_BYTES_MAX}")
    return token
