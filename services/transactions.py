"""Transactions of clients: `TransactionApi`, over the shards that this broker coordinates.

Queries are answered from committed state, by a shard whose epoch is still the one in the metadata. The first request
for a coordinator creates the topic `__transaction_state`. A request that comes while the transaction before is being
ended waits for its end, for `END_WAIT_S` at most, then gets CONCURRENT_TRANSACTIONS: retry.

Limits: requests without a reply (`TransactionCoordinator.waiting_max` for each shard, then THROTTLING_QUOTA_EXCEEDED),
the wait for a reply (`REPLY_S`, then REQUEST_TIMED_OUT: it may be done), and those of `TransactionLimits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import coordinator_errors
from tidelog.coordinator.patterns import compile_pattern
from tidelog.coordinator.transactions.coordinator import END_WAIT_S, TransactionCoordinator
from tidelog.coordinator.transactions.queries import describe, matches, status_name
from tidelog.coordinator.transactions.requests import (
    Abort,
    AddPartitions,
    End,
    EndReply,
    InitProducer,
    InitReply,
    Join,
    JoinReply,
    Prepare,
)
from tidelog.coordinator.transactions.shard import TransactionShard
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    InvalidTopicError,
    RemoteError,
    RequestTimedOutError,
    TidelogError,
)
from tidelog.model.group_errors import CoordinatorNotAvailableError, InvalidPatternError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.transaction_errors import ConcurrentTransactionsError
from tidelog.replication.marker_receiver import OFFSETS_TOPIC
from tidelog.replication.transaction_messages import TransactionPeers
from tidelog.services.authorization import CLUSTER, Operation, Resource, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.groups import GroupService
from tidelog.services.guard import Guard
from tidelog.services.hanging_transactions import HangingTransactions
from tidelog.services.internal_topics import InternalTopic
from tidelog.services.partition_lookup import PartitionLookup, PartitionRef, check_named
from tidelog.services.transaction_requests import (
    AddOffsetsToTransaction,
    AddPartitionsToTransaction,
    CommitOffsetsInTransaction,
    EndTransaction,
    HangingTransaction,
    InitTransactions,
    JoinTransaction,
    MemberDetails,
    PrepareTransaction,
    TransactionDetails,
    TransactionFilter,
    TransactionSummary,
)
from tidelog.services.transactional_offsets import TransactionalOffsets
from tidelog.world.slicing import sliced

T = TypeVar("T")

REPLY_S = 10.0
INIT_WAIT_S = 30.0
"""How long `init` waits for the end of the transaction before."""
IDS_PER_SLICE = 500


class TransactionService:
    """Implements `TransactionApi`."""

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        tail: MetadataTail,
        client: ControllerClient,
        groups: GroupService,
        peers: TransactionPeers,
        *,
        guard: Guard | None = None,
        hanging: HangingTransactions,
    ) -> None:
        self.coordinator = coordinator
        self._tail = tail
        self._groups = groups
        self._guard = guard or Guard()
        self._topic = InternalTopic(coordinator, tail, client)
        self._lookup = PartitionLookup(lambda: tail.image, self._guard.authorizer)
        self._hanging = hanging
        self._offsets = TransactionalOffsets(groups.router, self._lookup, self._guard, peers)

    def _admit(self, context: RequestContext, operation: Operation, transactional_id: str) -> None:
        self._guard.authorize(context, operation, Resource(ResourceType.TRANSACTIONAL_ID, transactional_id))
        self._guard.charge(context)
        self._check_name(transactional_id)

    def _check_name(self, transactional_id: str) -> None:
        longest = self.coordinator.limits.name_length_max
        if not 1 <= len(transactional_id) <= longest:
            raise InvalidRequestError(f"a transactional id has 1 to {longest} characters")

    async def _ask(self, shard: TransactionShard, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(REPLY_S):
                return await coordinator_errors(shard, work)
        except TimeoutError:
            raise RequestTimedOutError(f"not replicated in {REPLY_S:g} s; it may be yet") from None

    async def _submit(self, request: Any) -> Any:
        """Submit it to its shard, once the transaction before is complete."""
        shard = self.coordinator.shard_of(request.transactional_id)
        return await self._ask(shard, shard.submit_after_end(request, wait_s=END_WAIT_S))

    # Coordinators.

    @ends_at_deadline
    async def find_coordinators(
        self, context: RequestContext, transactional_ids: Sequence[str]
    ) -> list[int | TidelogError]:
        """Returns the broker of each id, or why there is none. Creates the topic if it does not exist."""
        if not transactional_ids:
            raise InvalidRequestError("the request names no transactional id")
        errors: dict[str, TidelogError] = {}
        async for transactional_id in sliced(transactional_ids, IDS_PER_SLICE):
            try:
                self._admit(context, Operation.DESCRIBE, transactional_id)
            except TidelogError as error:
                errors[transactional_id] = error
        if len(errors) == len(set(transactional_ids)):
            return [errors[transactional_id] for transactional_id in transactional_ids]
        topic = await self._topic.get()
        brokers: list[int | TidelogError] = []
        async for transactional_id in sliced(transactional_ids, IDS_PER_SLICE):
            leader = topic.partitions[partition_for(transactional_id, len(topic.partitions))].leader
            missing = f"the partition of transactional id {transactional_id!r} in {topic.name} has no leader"
            found = leader if leader >= 0 else CoordinatorNotAvailableError(missing)
            brokers.append(errors.get(transactional_id, found))
        return brokers

    # The owner.

    @ends_at_deadline
    async def init(self, context: RequestContext, request: InitTransactions) -> InitReply:
        self._admit(context, Operation.WRITE, request.transactional_id)
        end_s = asyncio.get_running_loop().time() + INIT_WAIT_S
        while True:
            # Again after each wait: the coordinator may have moved.
            shard = self.coordinator.shard_of(request.transactional_id)
            asked = InitProducer(
                transactional_id=request.transactional_id,
                timeout_ms=request.timeout_ms,
                now_ms=self.coordinator.now_ms(),
                producer_id=request.producer_id,
                epoch=request.epoch,
                keep_prepared=request.keep_prepared,
            )
            reply: InitReply = await self._ask(shard, shard.submit(asked))
            if not reply.is_ending:
                return reply
            if request.waits:
                waiting = shard.wait_for_end(request.transactional_id, end_s)
                if await coordinator_errors(shard, waiting):
                    continue
            raise ConcurrentTransactionsError(
                f"transactional id {request.transactional_id!r}: the transaction before is being ended: retry"
            )

    @ends_at_deadline
    async def add_partitions(
        self, context: RequestContext, request: AddPartitionsToTransaction
    ) -> list[TidelogError | None]:
        operation = Operation.WRITE
        if request.is_broker:
            self._guard.authorize(context, Operation.CLUSTER_ACTION, CLUSTER)
            self._guard.charge(context)
            self._check_name(request.transactional_id)
            operation = Operation.DESCRIBE
        else:
            self._admit(context, operation, request.transactional_id)
        check_named(request.partitions)
        found = await self._lookup.find_all(context, operation, request.partitions)
        found = {ref: self._checked(where, is_broker=request.is_broker) for ref, where in found.items()}
        if any(isinstance(where, TidelogError) for where in found.values()):
            skipped = RemoteError("another partition has an error", code=ErrorCode.OPERATION_NOT_ATTEMPTED)
            outcomes = {ref: where if isinstance(where, TidelogError) else skipped for ref, where in found.items()}
            return [outcomes[ref] for ref in request.partitions]
        partitions = frozenset(where for where in found.values() if isinstance(where, PartitionId))
        await self._add(request, partitions, version=request.version, verify_only=request.verify_only)
        return [None] * len(request.partitions)

    def _checked(self, where: PartitionId | TidelogError, *, is_broker: bool) -> PartitionId | TidelogError:
        """Reject a partition that no marker could be written to: its transaction would never end. A broker names the
        partition of a group whose offsets are committed."""
        if isinstance(where, TidelogError):
            return where
        topic = self._tail.image.topics.get(where.topic_id)
        if topic is None or topic.name not in INTERNAL_TOPICS or (is_broker and topic.name == OFFSETS_TOPIC):
            return where
        return InvalidTopicError(f"{topic.name} is an internal topic: it is no part of a transaction")

    @ends_at_deadline
    async def add_offsets(self, context: RequestContext, request: AddOffsetsToTransaction) -> None:
        self._admit(context, Operation.WRITE, request.transactional_id)
        self._guard.authorize(context, Operation.READ, Resource(ResourceType.GROUP, request.group))
        topic = await self._groups.router.topic.get()
        partition = PartitionId(TopicId(topic.topic_id), partition_for(request.group, len(topic.partitions)))
        await self._add(request, frozenset([partition]))

    async def _add(
        self,
        request: AddPartitionsToTransaction | AddOffsetsToTransaction,
        partitions: frozenset[PartitionId],
        *,
        version: int = 1,
        verify_only: bool = False,
    ) -> None:
        await self._submit(
            AddPartitions(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.epoch,
                partitions=partitions,
                now_ms=self.coordinator.now_ms(),
                version=version,
                verify_only=verify_only,
            )
        )

    async def commit_offsets(
        self, context: RequestContext, request: CommitOffsetsInTransaction
    ) -> Mapping[PartitionRef, TidelogError | None]:
        """Answered by the broker that coordinates the group."""
        return await self._offsets.commit(context, request)

    @ends_at_deadline
    async def end(self, context: RequestContext, request: EndTransaction) -> EndReply:
        self._admit(context, Operation.WRITE, request.transactional_id)
        reply: EndReply = await self._submit(
            End(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.epoch,
                is_commit=request.is_commit,
                now_ms=self.coordinator.now_ms(),
                version=request.version,
                members=tuple(request.members),
                token=request.token,
            )
        )
        return reply

    @ends_at_deadline
    async def prepare(self, context: RequestContext, request: PrepareTransaction) -> None:
        self._admit(context, Operation.WRITE, request.transactional_id)
        await self._submit(
            Prepare(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.epoch,
                now_ms=self.coordinator.now_ms(),
            )
        )

    # Members.

    @ends_at_deadline
    async def join(self, context: RequestContext, request: JoinTransaction) -> JoinReply:
        self._admit(context, Operation.WRITE, request.transactional_id)
        joined = Join(transactional_id=request.transactional_id, now_ms=self.coordinator.now_ms(), label=request.label)
        reply: JoinReply = await self._submit(joined)
        return reply

    # Operators.

    @ends_at_deadline
    async def abort(self, context: RequestContext, transactional_id: str) -> bool:
        """Returns whether a transaction was open. Needs the right to alter the cluster."""
        self._guard.admit_change(context)
        self._check_name(transactional_id)
        shard = self.coordinator.shard_of(transactional_id)
        request = Abort(transactional_id=transactional_id, now_ms=self.coordinator.now_ms())
        was_open: bool = await self._ask(shard, shard.submit(request))
        return was_open

    async def abort_hanging(
        self, context: RequestContext, transactions: Sequence[HangingTransaction]
    ) -> Sequence[TidelogError | None]:
        """Abort transactions that no coordinator knows, in the partitions that this broker leads."""
        return await self._hanging.abort(context, transactions)

    @ends_at_deadline
    async def list(
        self, context: RequestContext, request: TransactionFilter
    ) -> tuple[Sequence[TransactionSummary], int]:
        """Returns the ids that this broker coordinates and the principal may describe, by name, and how many partitions
        it is still loading. Describe on the cluster is the right to describe all of them here. Other tasks run in
        between; the ids of one partition are consistent."""
        may_see_all = self._guard.allows(context, Operation.DESCRIBE, CLUSTER)
        self._guard.charge(context)
        now_ms = self.coordinator.now_ms()
        has_name = self._name_filter(request.pattern)
        summaries: list[TransactionSummary] = []
        for shard in list(self.coordinator.leading_shards()):
            async for transactional_id, transaction in sliced(shard.state.ids.items(), IDS_PER_SLICE):
                is_matching = has_name(transactional_id) and matches(
                    transaction,
                    now_ms=now_ms,
                    statuses=request.statuses,
                    producer_ids=request.producer_ids,
                    longer_than_ms=request.longer_than_ms,
                )
                resource = Resource(ResourceType.TRANSACTIONAL_ID, transactional_id)
                if is_matching and (may_see_all or self._guard.allows(context, Operation.DESCRIBE, resource)):
                    summaries.append(
                        TransactionSummary(
                            transactional_id=transactional_id,
                            producer_id=transaction.producer_id,
                            status=status_name(transaction),
                            members=[member.producer_id for member in transaction.members],
                        )
                    )
        return sorted(summaries, key=lambda summary: summary.transactional_id), self.coordinator.loading

    def _name_filter(self, pattern: str) -> Callable[[str], bool]:
        if not pattern:
            return lambda _: True
        longest = self.coordinator.limits.name_length_max
        if len(pattern) > longest:
            raise InvalidPatternError(f"a pattern has at most {longest} characters")
        return compile_pattern(pattern)

    @ends_at_deadline
    async def describe(self, context: RequestContext, transactional_id: str) -> TransactionDetails:
        """Raises `TransactionalIdNotFoundError`."""
        self._admit(context, Operation.DESCRIBE, transactional_id)
        transaction = describe(self.coordinator.shard_of(transactional_id).state, transactional_id)
        return TransactionDetails(
            transactional_id=transactional_id,
            coordinator=self.coordinator.me,
            producer_id=transaction.producer_id,
            epoch=transaction.epoch,
            status=status_name(transaction),
            timeout_ms=transaction.timeout_ms,
            started_ms=transaction.started_ms,
            prepared_ms=transaction.prepared_ms,
            partitions=self._named(context, transaction.partitions),
            members=[
                MemberDetails(
                    producer_id=member.producer_id,
                    label=member.label,
                    partitions=self._named(context, member.partitions),
                )
                for member in transaction.members
            ],
            last_token=transaction.last_token,
        )

    def _named(self, context: RequestContext, partitions: Iterable[PartitionId]) -> Sequence[tuple[str, int]]:
        """Those of topics that the principal may describe, and of deleted ones."""
        topics, guard = self._tail.image.topics, self._guard
        return sorted(
            (topics[each.topic_id].name if each.topic_id in topics else str(each.topic_id), each.partition)
            for each in partitions
            if each.topic_id not in topics or guard.allows(context, Operation.DESCRIBE, topics[each.topic_id].name)
        )
