"""Appends record batches to the partitions that this broker leads, and waits for their acknowledgement.

    acks=0     acknowledged when appended
    acks=1     when this broker has synced it
    acks=-1    when the high watermark has passed it; a duplicate when it has passed the original

Several batches of one item are one append: all are stored, or none. They are acknowledged together, new batches and
duplicates alike.

Errors of a whole request are raised. Errors of one partition are in its result, with the leader if another broker
leads it. Checks of the records, before the log validates the batches:

    the item has records                                        INVALID_RECORD
    of magic 2                                                  INVALID_RECORD
    of one batch, if the API allows one only                    INVALID_RECORD
    zstd only if the version of the API has it                  UNSUPPORTED_COMPRESSION_TYPE
    the request names the partition once                        INVALID_REQUEST, for each repetition
    a condition, a transactional id come with acks=-1           INVALID_REQUIRED_ACKS

Transactions (`replication.partition_transactions`). Batches that the coordinator must be asked about first are appended
after the others of the request, when it has answered for all of them. Until then the request holds up those behind it
on its connection, so that they stay in order.

Limits: `request_bytes_max` bytes of produce requests that wait for acknowledgement; `ATTEMPTS_MAX` attempts to append
the batches of an item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from tidelog.log.admission import NeedsDecodingError, RecordRules
from tidelog.log.batch import Codec
from tidelog.log.batch_header import CODEC_MASK, HEADER_BYTES, LENGTH_PREFIX_BYTES
from tidelog.log.log import AppendInfo
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import (
    DuplicateSequenceError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    LeaderNotAvailableError,
    OverloadedError,
    RequestTimedOutError,
    TidelogError,
    UnsupportedCompressionError,
    UnsupportedVersionError,
)
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import ConcurrentTransactionsError
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition_transactions import ProducerTransaction, UnverifiedError
from tidelog.replication.replicas import Replicas
from tidelog.replication.transaction_verifier import TransactionVerifier
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.partition_lookup import (
    REPEATED,
    PartitionLookup,
    PartitionRef,
    check_named,
    find_leader,
    leader_hint,
)
from tidelog.services.quotas import Charge
from tidelog.world.slicing import sliced
from tidelog.world.work import Work

ACKS_NONE, ACKS_LEADER, ACKS_ALL = 0, 1, -1
DECODED_BYTES_INLINE = 64 << 10
DECODES_INLINE = 8
"""Items of a request whose records are decoded inline, each up to `DECODED_BYTES_INLINE` decompressed: some 10 ms.
Larger ones are decoded by a worker."""
ATTEMPTS_MAX = 4
"""Attempts to append a batch while the settings of its topic change, or markers void what its coordinator says."""
APPENDS_PER_SLICE = 50
"""Appends of a request in one turn of the event loop: some 5 ms."""

_MAGIC = 2
_LENGTH_AT, _MAGIC_AT = 8, 16
_ATTRIBUTES_AT = 22
"""The low byte of the attributes: codec and flags."""


@dataclass(slots=True)
class ProduceItem:
    """Never changed, like `ProduceResult`. Frozen dataclasses are slow to create, and each batch has one."""

    partition: PartitionRef
    batches: bytes | memoryview
    leader_epoch: int = -1
    condition: AppendCondition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceRequest:
    items: Sequence[ProduceItem]
    acks: int = ACKS_ALL
    timeout_ms: int = 0
    """For the acknowledgement; 0: the broker's default. The deadline of the request applies too."""
    transactional_id: str | None = None
    transaction_version: int = 2
    """See `ProducerTransaction`."""
    is_single_batch: bool = False
    """An item has exactly one batch, as in Kafka's protocol."""
    allows_zstd: bool = True


@dataclass(slots=True)
class ProduceResult:
    error: TidelogError | None = None
    base_offset: int = -1
    append_time_ms: int = -1
    start_offset: int = -1
    leader_epoch: int = -1
    leader: int = -1


class ProduceService:
    def __init__(
        self,
        replicas: Replicas,
        lookup: PartitionLookup,
        limits: RequestLimits,
        guard: Guard,
        verifier: TransactionVerifier | None = None,
    ) -> None:
        """`verifier` asks transaction coordinators; None: the broker reaches none."""
        self.limits = limits
        self.queued_bytes = 0
        """Bytes of requests that wait for acknowledgement."""
        self.verifier = verifier
        self._replicas = replicas
        self._lookup = lookup
        self._guard = guard

    async def produce(self, context: RequestContext, request: ProduceRequest) -> list[ProduceResult]:
        """Appends the items in order and returns their results in the same order, when each is acknowledged or failed.

        A write that timed out may be stored all the same.
        """
        return await (await self.start(context, request)).finish()

    async def start(self, context: RequestContext, request: ProduceRequest) -> PendingProduce:
        """As `produce`, but returns when the items are appended. The timeout begins here.

        Other tasks run after every `APPENDS_PER_SLICE` items and while records are decoded, so two requests that are
        started at the same time have no order.
        """
        items, acks = request.items, request.acks
        check_named(items)
        if acks not in (ACKS_NONE, ACKS_LEADER, ACKS_ALL):
            raise InvalidRequiredAcksError(f"acks={acks}: use 0, 1 or -1 (all in-sync replicas)")
        transaction = None if request.transactional_id is None else self._transaction(context, request)
        size = sum([len(item.batches) for item in items])
        if self.queued_bytes and self.queued_bytes + size > self.limits.request_bytes_max:
            raise OverloadedError(
                f"{self.queued_bytes} bytes of other requests wait for acknowledgement; the limit is "
                f"{self.limits.request_bytes_max}"
            )
        self._guard.charge(context, Charge.PRODUCE_BYTES, size)
        pending = PendingProduce(
            self, size, self.limits.produce_timeout(request.timeout_ms), context.deadline_s, transaction
        )
        try:
            if len(items) == 1:
                await pending.append(items[0], request, self._find(context, items[0], request))
                if pending.unverified:
                    await pending.append_unverified(request)
                return pending
            seen: set[PartitionId] = set()
            async for item in sliced(items, APPENDS_PER_SLICE):
                found = self._find(context, item, request)
                if isinstance(found, PartitionId):
                    if found in seen:
                        found = InvalidRequestError(REPEATED)
                    else:
                        seen.add(found)
                await pending.append(item, request, found)
            if pending.unverified:
                await pending.append_unverified(request)
        except BaseException:
            pending.abandon()
            raise
        return pending

    def _transaction(self, context: RequestContext, request: ProduceRequest) -> ProducerTransaction:
        transactional_id = request.transactional_id
        if not transactional_id:
            raise InvalidRequestError("the transactional id is empty: name one, or send none")
        self._guard.authorize(context, Operation.WRITE, Resource(ResourceType.TRANSACTIONAL_ID, transactional_id))
        if self.verifier is None:
            raise UnsupportedVersionError("this broker has no transactions: produce without a transactional id")
        if request.acks != ACKS_ALL:
            raise InvalidRequiredAcksError(
                f"acks={request.acks} in a transaction: a failover could lose a record of a commit; use -1 (all)"
            )
        return ProducerTransaction(transactional_id, request.transaction_version)

    def _find(self, context: RequestContext, item: ProduceItem, request: ProduceRequest) -> PartitionId | TidelogError:
        found = self._lookup.find_or_error(context, Operation.WRITE, item.partition)
        if isinstance(found, PartitionId):
            try:
                _check_records(item.batches, request)
            except TidelogError as error:
                return error
        return found

    @property
    def admission_work(self) -> Work | None:
        return self._replicas.admission_work

    def find_leader(self, partition: PartitionId, leader_epoch: int) -> LeaderReplica:
        return find_leader(self._replicas, partition, leader_epoch)

    def failed(self, partition: PartitionId, error: TidelogError) -> ProduceResult:
        leader, leader_epoch = leader_hint(self._replicas, partition)
        return ProduceResult(error, leader_epoch=leader_epoch, leader=leader)


def _check_records(records: bytes | memoryview, request: ProduceRequest) -> None:
    """Checks the headers of all batches. The log rejects a truncated, corrupt or control batch."""
    if not records:
        raise InvalidRecordError("a partition without a record batch")
    if len(records) > _MAGIC_AT and records[_MAGIC_AT] < _MAGIC:
        raise InvalidRecordError(
            f"the item is a message set of magic {records[_MAGIC_AT]}: send record batches (magic {_MAGIC})"
        )
    if len(records) < HEADER_BYTES:
        return
    if request.is_single_batch:
        size = int.from_bytes(records[_LENGTH_AT:LENGTH_PREFIX_BYTES], "big") + LENGTH_PREFIX_BYTES
        if HEADER_BYTES <= size < len(records):
            raise InvalidRecordError(f"{len(records) - size} bytes follow the record batch: send exactly one batch")
    at = 0
    while at + HEADER_BYTES <= len(records):
        flags = records[at + _ATTRIBUTES_AT]
        if not request.allows_zstd and flags & CODEC_MASK == Codec.ZSTD:
            raise UnsupportedCompressionError(
                "this version of the request has no zstd: use a newer one or another codec"
            )
        size = int.from_bytes(records[at + _LENGTH_AT : at + LENGTH_PREFIX_BYTES], "big") + LENGTH_PREFIX_BYTES
        at += max(size, HEADER_BYTES)


_PENDING = ProduceResult()
"""Of an item that is neither appended nor rejected yet."""


@dataclass(frozen=True, slots=True)
class _Unverified:
    """An item whose batch of this producer is part of a transaction that the coordinator must confirm."""

    at: int
    item: ProduceItem
    partition: PartitionId
    producer_id: int
    epoch: int


class PendingProduce:
    """A produce request whose items are appended or rejected. `finish` waits for it, `abandon` gives it up."""

    __slots__ = (
        "_deadline_s",
        "_decodes",
        "_on_done",
        "_partitions",
        "_results",
        "_service",
        "_size",
        "_timeout_ms",
        "_timer",
        "_transaction",
        "_waiting",
        "_waits",
        "unverified",
    )

    def __init__(
        self,
        service: ProduceService,
        size: int,
        timeout_ms: int,
        deadline_s: float | None = None,
        transaction: ProducerTransaction | None = None,
    ) -> None:
        """`deadline_s` ends the wait earlier."""
        self._service = service
        self._size = size
        self._timeout_ms = timeout_ms
        now_s = asyncio.get_running_loop().time()
        self._deadline_s = now_s + timeout_ms / 1000
        if deadline_s is not None and deadline_s < self._deadline_s:
            self._deadline_s, self._timeout_ms = deadline_s, max(0, round((deadline_s - now_s) * 1000))
        self._decodes = 0
        self._partitions: list[PartitionId | None] = []
        self._results: list[ProduceResult] = []
        self._waits: dict[int, tuple[LeaderReplica, asyncio.Future[None], TidelogError | None]] = {}
        self._on_done: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transaction = transaction
        self._waiting = 0
        self.unverified: list[_Unverified] = []
        """Items that `append_unverified` appends."""
        service.queued_bytes += size

    async def append(self, item: ProduceItem, request: ProduceRequest, found: PartitionId | TidelogError) -> None:
        """Appends the next item, or records why it is rejected."""
        if not isinstance(found, PartitionId):
            self._partitions.append(None)
            self._results.append(ProduceResult(found))
            return
        self._partitions.append(found)
        self._results.append(_PENDING)
        await self._append_decoded(len(self._results) - 1, item, found, request.acks)

    async def _append_decoded(self, at: int, item: ProduceItem, found: PartitionId, acks: int) -> None:
        """Sets the result of the item, or keeps it in `unverified`."""
        batches = item.batches
        decoded: RecordRules | None = None
        for _ in range(ATTEMPTS_MAX):
            try:
                self._append(at, found, item.leader_epoch, batches, decoded, acks, item.condition)
                return
            except NeedsDecodingError as needed:
                decoded = needed.rules
            except UnverifiedError as needed:
                self.unverified.append(_Unverified(at, item, found, needed.producer_id, needed.epoch))
                return
            try:
                batches = await self._decode(found, item, decoded)
            except TidelogError as error:
                self._results[at] = self._service.failed(found, error)
                return
        rejection = LeaderNotAvailableError("the settings of the topic change faster than a batch can be decoded")
        self._results[at] = self._service.failed(found, rejection)

    async def append_unverified(self, request: ProduceRequest) -> None:
        """Asks the coordinator about all items that need it, then appends them. A marker may void its answer."""
        for _ in range(ATTEMPTS_MAX):
            waiting, self.unverified = self.unverified, []
            if not waiting:
                return
            producers: dict[tuple[int, int], list[_Unverified]] = {}
            for each in waiting:
                producers.setdefault((each.producer_id, each.epoch), []).append(each)
            for (producer_id, epoch), items in producers.items():
                await self._verify(producer_id, epoch, items)
            async for each in sliced(waiting, APPENDS_PER_SLICE):
                if self._results[each.at] is _PENDING:
                    await self._append_decoded(each.at, each.item, each.partition, request.acks)
        for each in self.unverified:
            rejection = ConcurrentTransactionsError("transactions end faster than the coordinator can be asked")
            self._results[each.at] = self._service.failed(each.partition, rejection)
        self.unverified = []

    async def _verify(self, producer_id: int, epoch: int, items: Sequence[_Unverified]) -> None:
        """Sets the results of items that fail."""
        assert self._transaction is not None, "only a batch of a transaction is verified"
        assert self._service.verifier is not None, "`ProduceService.start` has checked it"
        leaders: list[LeaderReplica] = []
        asked: list[_Unverified] = []
        for each in items:
            try:
                leaders.append(self._service.find_leader(each.partition, each.item.leader_epoch))
                asked.append(each)
            except TidelogError as error:
                self._results[each.at] = self._service.failed(each.partition, error)
        if not leaders:
            return
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._service.verifier.verify(leaders, self._transaction, producer_id, epoch)
            return
        except TimeoutError:
            rejection: TidelogError = CoordinatorNotAvailableError(
                f"the transaction coordinator has not answered in {self._timeout_ms} ms; the batch is not stored"
            )
        except TidelogError as error:
            rejection = error
        for each in asked:
            self._results[each.at] = self._service.failed(each.partition, rejection)

    async def _decode(self, partition: PartitionId, item: ProduceItem, rules: RecordRules) -> bytes:
        leader = self._service.find_leader(partition, item.leader_epoch)
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await leader.inspect_records(bytes(item.batches), rules, work=self._service.admission_work)
        except TimeoutError:
            raise RequestTimedOutError(f"not decoded in {self._timeout_ms} ms; it is not stored") from None

    def _append(
        self,
        at: int,
        partition: PartitionId,
        leader_epoch: int,
        batches: bytes | memoryview,
        decoded: RecordRules | None,
        acks: int,
        condition: AppendCondition | None,
    ) -> None:
        """Append the batches of one item. It has no await, so it sees all that changed while records were decoded."""
        try:
            leader = self._service.find_leader(partition, leader_epoch)
            leader.state.check_acks(acks)
            if condition is not None and acks != ACKS_ALL:
                raise InvalidRequiredAcksError(
                    f"acks={acks}: what a condition was checked against could be lost; use -1 (all)"
                )
            inline_bytes_max = DECODED_BYTES_INLINE if self._decodes < DECODES_INLINE else 0
            self._decodes += leader.log.config.needs_decoding
            appended = leader.append(
                batches,
                inspected=decoded,
                inline_bytes_max=inline_bytes_max,
                transaction=self._transaction,
                condition=condition,
            )
        except DuplicateSequenceError as error:
            self._results[at] = self._service.failed(partition, error)
            # Clients treat DUPLICATE_SEQUENCE as success, so the reply waits until the original is replicated.
            if acks == ACKS_ALL and leader.high_watermark < error.below_offset:
                self._waits[at] = leader, leader.acks.wait(error.below_offset), error
            elif acks == ACKS_LEADER:
                self._waits[at] = leader, leader.log.wait_durable(error.below_offset - 1), error
        except TidelogError as error:
            self._results[at] = self._service.failed(partition, error)
        else:
            self._results[at] = _stored(leader, appended)
            if acks == ACKS_ALL and leader.high_watermark <= appended.last_offset:
                self._waits[at] = leader, leader.acks.wait(appended.last_offset + 1), None
            elif acks == ACKS_LEADER:
                self._waits[at] = leader, leader.log.wait_durable(appended.last_offset), None

    # Waiting.

    @property
    def is_done(self) -> bool:
        """Whether no item waits for its acknowledgement."""
        for _, future, _ in self._waits.values():  # noqa: SIM110
            if not future.done():
                return False
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, in a later turn of the loop, when no item waits or the timeout is over; not after
        `abandon`. For callers that need no task to wait in: they call `results` then."""
        assert self._on_done is None, "one callback"
        loop = asyncio.get_running_loop()
        self._on_done = callback
        self._timer = loop.call_at(self._deadline_s, self._end_wait)
        for _, future, _ in self._waits.values():
            if not future.done():
                self._waiting += 1
                future.add_done_callback(self._item_done)
        if self._waiting == 0:
            loop.call_soon(self._end_wait)

    def _item_done(self, _future: asyncio.Future[None]) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._end_wait()

    def _end_wait(self) -> None:
        callback = self._on_done
        self._stop_waiting()
        if callback is not None:
            callback()

    def _stop_waiting(self) -> None:
        self._on_done = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def finish(self) -> list[ProduceResult]:
        try:
            waiting = [future for _, future, _ in self._waits.values() if not future.done()]
            if waiting:
                left_s = self._deadline_s - asyncio.get_running_loop().time()
                await asyncio.wait(waiting, timeout=max(0.0, left_s))
            return self.results()
        finally:
            self.abandon()

    def results(self) -> list[ProduceResult]:
        """Results of all items; an item that is not acknowledged by now has timed out."""
        try:
            for at, (_, future, rejection) in self._waits.items():
                error: TidelogError | None = rejection
                if not future.done():
                    error = RequestTimedOutError(f"not replicated in {self._timeout_ms} ms; it may be yet")
                elif future.exception() is not None:
                    error = cast(TidelogError, future.exception())
                if error is not None:
                    partition = self._partitions[at]
                    assert partition is not None, "an item that waits was appended"
                    self._results[at] = self._service.failed(partition, error)
            return self._results
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends the wait and frees the memory of the request. Idempotent."""
        self._stop_waiting()
        for leader, future, _ in self._waits.values():
            if not future.done():
                leader.acks.forget(future)
        self._waits = {}
        self._service.queued_bytes -= self._size
        self._size = 0


def _stored(leader: LeaderReplica, appended: AppendInfo) -> ProduceResult:
    log = leader.log
    return ProduceResult(None, appended.base_offset, appended.append_time, log.start_offset, leader.leader_epoch)
