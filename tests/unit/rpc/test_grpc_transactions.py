"""The service Transactions: what its handlers ask of the transaction service, and what they make of its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tidelog.coordinator.requests import OffsetToCommit
from tidelog.coordinator.transactions.requests import EndReply, InitReply, JoinReply
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import UnknownMemberIdError
from tidelog.model.transaction_errors import ProducerFencedError, TransactionalIdNotFoundError
from tidelog.rpc.grpc.dispatch import grpc_context
from tidelog.rpc.grpc.transactions import IDS_MAX, TransactionsHandlers
from tidelog.rpc.v1 import transactions_pb2 as pb
from tidelog.services import transaction_requests as requests
from tidelog.services.context import RequestContext
from tidelog.services.partition_lookup import PartitionRef
from tidelog.services.transaction_api import TransactionApi


class RecordedService(TransactionApi):
    """Records its requests, and replies with what a test sets."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.reply: Any = None
        self.error: TidelogError | None = None

    def _answer(self, request: Any) -> Any:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return self.reply(request) if callable(self.reply) else self.reply

    async def find_coordinators(
        self, context: RequestContext, transactional_ids: Sequence[str]
    ) -> list[int | TidelogError]:
        reply: list[int | TidelogError] = self._answer(tuple(transactional_ids))
        return reply

    async def init(self, context: RequestContext, request: requests.InitTransactions) -> InitReply:
        reply: InitReply = self._answer(request)
        return reply

    async def add_partitions(
        self, context: RequestContext, request: requests.AddPartitionsToTransaction
    ) -> list[TidelogError | None]:
        raise AssertionError("only Kafka clients of version 1 add partitions")

    async def add_offsets(self, context: RequestContext, request: requests.AddOffsetsToTransaction) -> None:
        raise AssertionError("only Kafka clients of version 1 add offsets")

    async def commit_offsets(
        self, context: RequestContext, request: requests.CommitOffsetsInTransaction
    ) -> Mapping[PartitionRef, TidelogError | None]:
        reply: Mapping[PartitionRef, TidelogError | None] = self._answer(request)
        return reply

    async def end(self, context: RequestContext, request: requests.EndTransaction) -> EndReply:
        reply: EndReply = self._answer(request)
        return reply

    async def join(self, context: RequestContext, request: requests.JoinTransaction) -> JoinReply:
        reply: JoinReply = self._answer(request)
        return reply

    async def prepare(self, context: RequestContext, request: requests.PrepareTransaction) -> None:
        self._answer(request)

    async def abort(self, context: RequestContext, transactional_id: str) -> bool:
        reply: bool = self._answer(transactional_id)
        return reply

    async def list(
        self, context: RequestContext, request: requests.TransactionFilter
    ) -> tuple[Sequence[requests.TransactionSummary], int]:
        reply: tuple[Sequence[requests.TransactionSummary], int] = self._answer(request)
        return reply

    async def describe(self, context: RequestContext, transactional_id: str) -> requests.TransactionDetails:
        reply: requests.TransactionDetails = self._answer(transactional_id)
        return reply


Call = Callable[[str, Any], Any]


@pytest.fixture
def service() -> RecordedService:
    return RecordedService()


@pytest.fixture
def call(service: RecordedService) -> Call:
    handlers = TransactionsHandlers(service, ClusterImage)

    def run(name: str, request: Any) -> Any:
        return asyncio.run(getattr(handlers, name)(request, grpc_context()))

    return run


def test_init_distinguishes_a_new_instance_from_one_that_recovers(service: RecordedService, call: Call) -> None:
    service.reply = InitReply(producer_id=7, epoch=3, last_token=b"batch 4")
    response = call("init", pb.InitTransactionsRequest(transactional_id="t", transaction_timeout_ms=60_000))
    assert service.requests == [requests.InitTransactions(transactional_id="t", timeout_ms=60_000)]
    assert (response.producer_id, response.producer_epoch, response.last_token) == (7, 3, b"batch 4")
    assert not response.HasField("prepared")

    service.reply = InitReply(producer_id=7, epoch=4, has_open=True, open_producer_id=7, open_epoch=2)
    request = pb.InitTransactionsRequest(transactional_id="t", producer_id=0, producer_epoch=0, keep_prepared=True)
    response = call("init", request)
    assert service.requests[1].producer_id == service.requests[1].epoch == 0
    assert service.requests[1].keep_prepared
    assert (response.prepared.producer_id, response.prepared.producer_epoch) == (7, 2)


def test_offsets_have_their_outcomes_in_the_order_of_the_request(service: RecordedService, call: Call) -> None:
    service.reply = {("a", 0): None, ("b", 1): UnknownMemberIdError("gone")}
    offsets = [
        pb.TransactionOffset(topic="a", partition=0, offset=5, leader_epoch=2, metadata="m"),
        pb.TransactionOffset(topic="b", partition=1, offset=9, leader_epoch=-1),
    ]
    request = pb.CommitTransactionOffsetsRequest(
        transactional_id="t", producer_id=7, producer_epoch=3, group="g", offsets=offsets, member_id="m", member_epoch=4
    )
    rows = call("commit_offsets", request).offsets
    assert [row.error.name for row in rows] == ["", "UNKNOWN_MEMBER_ID"]
    (asked,) = service.requests
    assert asked.offsets == {("a", 0): OffsetToCommit(5, 2, "m"), ("b", 1): OffsetToCommit(9, -1, "")}
    assert (asked.producer_id, asked.epoch, asked.member_id, asked.member_epoch, asked.version) == (7, 3, "m", 4, 2)

    request.offsets.append(offsets[0])
    with pytest.raises(InvalidRequestError):
        call("commit_offsets", request)
    assert len(service.requests) == 1, "an ambiguous request changes nothing"


def test_end_carries_members_and_token_and_aborts_by_default(service: RecordedService, call: Call) -> None:
    service.reply = EndReply(producer_id=8, epoch=0, was_done=True, is_earlier=True)
    request = pb.EndTransactionRequest(
        transactional_id="t", producer_id=7, producer_epoch=3, is_commit=True, members=[9, 11], token=b"x"
    )
    response = call("end", request)
    assert (response.producer_id, response.producer_epoch) == (8, 0)
    assert response.was_done
    assert response.is_earlier
    assert service.requests == [
        requests.EndTransaction(
            transactional_id="t", producer_id=7, epoch=3, is_commit=True, members=(9, 11), token=b"x"
        )
    ]
    call("end", pb.EndTransactionRequest(transactional_id="t"))
    assert not service.requests[1].is_commit
    service.error = ProducerFencedError("a newer instance")
    with pytest.raises(ProducerFencedError):
        call("end", request)


def test_members_join_and_the_owner_prepares(service: RecordedService, call: Call) -> None:
    service.reply = JoinReply(producer_id=21, epoch=0)
    assert call("join", pb.JoinTransactionRequest(transactional_id="t", label="task 4")).producer_id == 21
    call("prepare", pb.PrepareTransactionRequest(transactional_id="t", producer_id=7, producer_epoch=3))
    assert service.requests == [
        requests.JoinTransaction(transactional_id="t", label="task 4"),
        requests.PrepareTransaction(transactional_id="t", producer_id=7, epoch=3),
    ]


def test_operators_list_describe_and_abort(service: RecordedService, call: Call) -> None:
    summary = requests.TransactionSummary(transactional_id="t", producer_id=7, status="Ongoing")
    service.reply = ([summary], 2)
    response = call("list", pb.ListTransactionsRequest(states=["Ongoing"], producer_ids=[7], longer_than_ms=0))
    assert [(row.transactional_id, row.producer_id, row.state) for row in response.transactions] == [
        ("t", 7, "Ongoing")
    ]
    assert response.loading == 2
    wanted = requests.TransactionFilter(statuses=("Ongoing",), producer_ids=(7,), longer_than_ms=0)
    assert service.requests.pop() == wanted
    call("list", pb.ListTransactionsRequest())
    assert service.requests.pop() == requests.TransactionFilter()

    details = requests.TransactionDetails(
        transactional_id="t",
        coordinator=2,
        producer_id=7,
        epoch=3,
        status="Ongoing",
        timeout_ms=60_000,
        started_ms=1_000,
        prepared_ms=-1,
        partitions=[("orders", 0), ("orders", 1)],
        members=[requests.MemberDetails(producer_id=21, label="task 4", partitions=[("orders", 2)])],
        last_token=b"x",
    )

    def describe(name: str) -> requests.TransactionDetails:
        if name != "t":
            raise TransactionalIdNotFoundError(f"no transactional id '{name}'")
        return details

    service.reply = describe
    missing, row = call("describe", pb.DescribeTransactionsRequest(transactional_ids=["u", "t"])).transactions
    assert missing.error.name == "TRANSACTIONAL_ID_NOT_FOUND"
    assert (row.coordinator, row.producer_epoch, row.state, row.started_ms, row.prepared_ms) == (
        *(2, 3, "Ongoing", 1_000),
        -1,
    )
    assert [(place.topic, place.partition) for place in row.partitions] == [("orders", 0), ("orders", 1)]
    assert [(place.topic, place.partition) for place in row.members[0].partitions] == [("orders", 2)]
    service.reply = True
    assert call("abort", pb.AbortTransactionRequest(transactional_id="t")).was_open


def test_an_unknown_coordinator_is_an_error_of_its_id_and_too_many_ids_are_rejected(
    service: RecordedService, call: Call
) -> None:
    service.reply = [3, TransactionalIdNotFoundError("an empty id")]
    rows = call(
        "find_coordinator", pb.FindTransactionCoordinatorRequest(transactional_ids=["t", ""], listener="GRPC")
    ).coordinators
    assert [(row.transactional_id, row.error.name) for row in rows] == [
        ("t", "LISTENER_NOT_FOUND"),
        ("", "TRANSACTIONAL_ID_NOT_FOUND"),
    ]
    with pytest.raises(InvalidRequestError, match="at most"):
        call("find_coordinator", pb.FindTransactionCoordinatorRequest(transactional_ids=["t"] * (IDS_MAX + 1)))
