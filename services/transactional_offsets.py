"""Commits offsets of groups in transactions, on the broker that coordinates the group.

    the producer has pending offsets of this epoch      nothing is asked
      in this shard
    it has none, or of a lower epoch                    the coordinator of its transaction adds the shard's partition of
                                                        `__consumer_offsets` once the transaction before is complete,
                                                        or rejects the producer
    a marker comes between its answer and the decision  the decision rejects the commit: the answer's number is over
    a later request of the producer comes meanwhile     this one is rejected: it would set offsets back

A retry, a lost reply and a cancelled request leave at most a partition without pending offsets in the transaction: its
marker finds nothing there.
"""

from __future__ import annotations

from tidelog.coordinator.pending_offsets import UnverifiedTransactionError
from tidelog.coordinator.requests import CommitPendingOffsets, OffsetToCommit, PartitionErrors
from tidelog.coordinator.shard import Shard
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.transaction_messages import AddPartitions, TransactionPeers
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.group_router import GroupRouter, MissingGroupError, by_ref, kind_of, split_in_pieces
from tidelog.services.guard import Guard
from tidelog.services.partition_lookup import PartitionLookup, PartitionRef, check_named
from tidelog.services.transaction_requests import CommitOffsetsInTransaction

ATTEMPTS_MAX = 3
"""Decisions for one request. Another one is needed if the pending offsets that it relied on are gone by then."""


class TransactionalOffsets:
    def __init__(self, router: GroupRouter, lookup: PartitionLookup, guard: Guard, peers: TransactionPeers) -> None:
        self._router = router
        self._lookup = lookup
        self._guard = guard
        self._peers = peers

    @ends_at_deadline
    async def commit(
        self, context: RequestContext, request: CommitOffsetsInTransaction
    ) -> dict[PartitionRef, TidelogError | None]:
        """Return an error or None for each partition. Any offset is stored, as by Kafka."""
        group = request.group
        transactional_id = Resource(ResourceType.TRANSACTIONAL_ID, request.transactional_id)
        self._guard.authorize(context, Operation.WRITE, transactional_id)
        self._guard.authorize(context, Operation.READ, Resource(ResourceType.GROUP, group))
        self._guard.charge(context)
        if not request.transactional_id or request.producer_id < 0 or request.epoch < 0:
            raise InvalidRequestError("a transaction has a transactional id, a producer id and its epoch")
        check_named(list(request.offsets))
        found = await self._lookup.find_all(context, Operation.READ, request.offsets, is_change=True)
        named = {where: request.offsets[ref] for ref, where in found.items() if isinstance(where, PartitionId)}
        if not named:
            return by_ref(found, {})
        shard = self._router.shard_of(group)
        self._router.check_group_count(shard, group)
        shard.check_pending_order(_producer(request), request.epoch, request.sequence)
        try:
            if request.member_id or request.instance_id or request.member_epoch >= 0:
                shard.rounds.check_commit(group, request.member_id, request.member_epoch, request.instance_id)
            committed = await self._commit(shard, request, named)
        except UnknownMemberIdError as error:
            if kind_of(shard, group) is None:
                raise MissingGroupError(str(error)) from error
            raise
        counts = self._router.counts
        counts.commits += 1
        counts.committed_offsets += sum(error is None for error in committed.values())
        return by_ref(found, committed)

    async def _commit(
        self, shard: Shard, request: CommitOffsetsInTransaction, named: dict[PartitionId, OffsetToCommit]
    ) -> PartitionErrors:
        for attempt in range(ATTEMPTS_MAX):
            number = await self._verified_number(shard, request, must_ask=attempt > 0)
            requests = [
                CommitPendingOffsets(
                    group=request.group,
                    member_id=request.member_id,
                    member_epoch=request.member_epoch,
                    instance_id=request.instance_id,
                    offsets={partition: named[partition] for partition in piece},
                    now_ms=self._router.now_ms(),
                    producer_id=request.producer_id,
                    epoch=request.epoch,
                    number=number,
                )
                for piece in split_in_pieces(list(named))
            ]
            pieces = [(made, list(made.offsets)) for made in requests]

            def check() -> None:
                shard.check_newest_pending(_producer(request), request.epoch, request.sequence)

            check()
            try:
                return await self._router.ask_in_pieces(shard, pieces, check)
            except UnverifiedTransactionError as error:
                unverified = error
        raise unverified

    async def _verified_number(
        self, shard: Shard, request: CommitOffsetsInTransaction, *, must_ask: bool
    ) -> int | None:
        """Ask the coordinator of the transaction for its number. None: the decision needs none, since the producer has
        pending offsets here or is known to be fenced."""
        shard.check()
        state = shard.runtime.speculative
        fence, pending = state.fences.get(request.producer_id), state.open_transaction(request.producer_id)
        is_fenced = fence is not None and request.epoch < fence.epoch
        is_known = pending is not None and request.epoch <= pending.epoch
        if not must_ask and (is_fenced or is_known):
            return None
        question = AddPartitions(
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            epoch=request.epoch,
            partitions=frozenset([shard.leader.replica.partition_id]),
            version=request.version,
            verify_only=request.version < 2,
        )
        try:
            return (await self._peers.add_partitions(question)).number
        except (NotCoordinatorError, CoordinatorNotAvailableError, CoordinatorLoadingError) as error:
            # It speaks of the transaction's coordinator: the client must not look for another one of its group.
            raise CoordinatorLoadingError(
                f"the coordinator of transactional id {request.transactional_id!r} does not answer: {error}"
            ) from error


def _producer(request: CommitOffsetsInTransaction) -> tuple[str, int]:
    """With the transactional id, for which the client is authorized: nobody can number the requests of others."""
    return request.transactional_id, request.producer_id
