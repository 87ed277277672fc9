"""Translates the gRPC service `Transactions` to the transaction service. Only brokers serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.rpc.grpc.cluster import address_of
from tidelog.rpc.grpc.errors import as_message, coded
from tidelog.rpc.grpc.partition_rows import outcomes, refs
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import transactions_pb2 as pb
from tidelog.services.context import RequestContext
from tidelog.services.groups import OffsetToCommit
from tidelog.services.limits import ResponseSize
from tidelog.services.transaction_api import TransactionApi
from tidelog.services.transaction_requests import (
    CommitOffsetsInTransaction,
    EndTransaction,
    InitTransactions,
    JoinTransaction,
    PrepareTransaction,
    TransactionDetails,
    TransactionFilter,
)
from tidelog.world.slicing import sliced

IDS_MAX = 10_000
"""Transactional ids that one request names."""

N = TypeVar("N", int, str)


class TransactionsHandlers:
    def __init__(self, service: TransactionApi, image: Callable[[], ClusterImage]) -> None:
        """`image` returns the broker's current copy of the metadata."""
        self._service = service
        self._image = image

    async def find_coordinator(
        self, request: pb.FindTransactionCoordinatorRequest, context: RequestContext
    ) -> pb.FindTransactionCoordinatorResponse:
        ids = _checked(request.transactional_ids)
        listener = request.listener or context.listener
        brokers = await self._service.find_coordinators(context, ids)
        image = self._image()
        return pb.FindTransactionCoordinatorResponse(
            coordinators=[
                _coordinator(image, name, broker, listener) for name, broker in zip(ids, brokers, strict=True)
            ]
        )

    # The owner.

    async def init(self, request: pb.InitTransactionsRequest, context: RequestContext) -> pb.InitTransactionsResponse:
        reply = await self._service.init(
            context,
            InitTransactions(
                transactional_id=request.transactional_id,
                timeout_ms=request.transaction_timeout_ms,
                producer_id=request.producer_id if request.HasField("producer_id") else -1,
                epoch=request.producer_epoch if request.HasField("producer_epoch") else -1,
                keep_prepared=request.keep_prepared,
            ),
        )
        prepared = pb.PreparedTransaction(producer_id=reply.open_producer_id, producer_epoch=reply.open_epoch)
        return pb.InitTransactionsResponse(
            producer_id=reply.producer_id,
            producer_epoch=reply.epoch,
            prepared=prepared if reply.has_open else None,
            last_token=reply.last_token,
        )

    async def commit_offsets(
        self, request: pb.CommitTransactionOffsetsRequest, context: RequestContext
    ) -> pb.CommitTransactionOffsetsResponse:
        errors = await self._service.commit_offsets(
            context,
            CommitOffsetsInTransaction(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.producer_epoch,
                group=request.group,
                offsets={
                    ref: OffsetToCommit(item.offset, item.leader_epoch, item.metadata)
                    for ref, item in zip(await refs(request.offsets), request.offsets, strict=True)
                },
                member_id=request.member_id,
                member_epoch=request.member_epoch,
                instance_id=request.instance_id,
                sequence=request.sequence,
            ),
        )
        return pb.CommitTransactionOffsetsResponse(offsets=await outcomes(request.offsets, errors))

    async def end(self, request: pb.EndTransactionRequest, context: RequestContext) -> pb.EndTransactionResponse:
        reply = await self._service.end(
            context,
            EndTransaction(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.producer_epoch,
                is_commit=request.is_commit,
                members=tuple(request.members),
                token=request.token,
            ),
        )
        return pb.EndTransactionResponse(
            producer_id=reply.producer_id,
            producer_epoch=reply.epoch,
            was_done=reply.was_done,
            is_earlier=reply.is_earlier,
        )

    # Members.

    async def join(self, request: pb.JoinTransactionRequest, context: RequestContext) -> pb.JoinTransactionResponse:
        reply = await self._service.join(
            context, JoinTransaction(transactional_id=request.transactional_id, label=request.label)
        )
        return pb.JoinTransactionResponse(producer_id=reply.producer_id, producer_epoch=reply.epoch)

    async def prepare(
        self, request: pb.PrepareTransactionRequest, context: RequestContext
    ) -> pb.PrepareTransactionResponse:
        await self._service.prepare(
            context,
            PrepareTransaction(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                epoch=request.producer_epoch,
            ),
        )
        return pb.PrepareTransactionResponse()

    # Operators.

    async def abort(self, request: pb.AbortTransactionRequest, context: RequestContext) -> pb.AbortTransactionResponse:
        return pb.AbortTransactionResponse(was_open=await self._service.abort(context, request.transactional_id))

    async def list(self, request: pb.ListTransactionsRequest, context: RequestContext) -> pb.ListTransactionsResponse:
        rows, loading = await self._service.list(
            context,
            TransactionFilter(
                statuses=tuple(request.states),
                producer_ids=_checked(request.producer_ids),
                longer_than_ms=request.longer_than_ms if request.HasField("longer_than_ms") else -1,
            ),
        )
        response = pb.ListTransactionsResponse(loading=loading)
        async for row in sliced(rows, IDS_MAX):
            response.transactions.add(
                transactional_id=row.transactional_id, producer_id=row.producer_id, state=row.status
            )
        return response

    async def describe(
        self, request: pb.DescribeTransactionsRequest, context: RequestContext
    ) -> pb.DescribeTransactionsResponse:
        response, size = pb.DescribeTransactionsResponse(), ResponseSize("transactional ids")
        async for name in sliced(_checked(request.transactional_ids), 1):  # one may have 10,000 partitions
            try:
                size.check()
                details = await self._service.describe(context, name)
            except TidelogError as error:
                response.transactions.add(transactional_id=name, error=as_message(error), coordinator=-1)
            else:
                response.transactions.append(_description(details))
            size.add(response.transactions[-1].ByteSize())
        return response


def _checked(names: Iterable[N]) -> tuple[N, ...]:
    distinct = tuple(names)
    if len(distinct) > IDS_MAX:
        raise InvalidRequestError(f"{len(distinct)} ids in one request; at most {IDS_MAX}: split it")
    return distinct


def _coordinator(
    image: ClusterImage, name: str, broker: int | TidelogError, listener: str
) -> pb.TransactionCoordinator:
    if isinstance(broker, TidelogError):
        return pb.TransactionCoordinator(transactional_id=name, error=as_message(broker), broker=-1)
    registered = image.brokers.get(broker)
    endpoint = None if registered is None else address_of(registered, listener)
    if endpoint is None:
        message = f"broker {broker}, which coordinates the transactional id, has no listener {listener[:100]!r}"
        error = coded(ErrorCode.LISTENER_NOT_FOUND, message)
        return pb.TransactionCoordinator(transactional_id=name, error=error, broker=broker)
    return pb.TransactionCoordinator(transactional_id=name, broker=broker, host=endpoint[0], port=endpoint[1])


def _description(details: TransactionDetails) -> pb.TransactionDescription:
    return pb.TransactionDescription(
        transactional_id=details.transactional_id,
        coordinator=details.coordinator,
        producer_id=details.producer_id,
        producer_epoch=details.epoch,
        state=details.status,
        transaction_timeout_ms=details.timeout_ms,
        started_ms=details.started_ms,
        prepared_ms=details.prepared_ms,
        partitions=_partitions(details.partitions),
        members=[
            pb.TransactionMember(
                producer_id=member.producer_id, label=member.label, partitions=_partitions(member.partitions)
            )
            for member in details.members
        ],
        last_token=details.last_token,
    )


def _partitions(partitions: Iterable[tuple[str, int]]) -> list[common.TopicPartition]:
    return [common.TopicPartition(topic=topic, partition=number) for topic, number in partitions]
