"""The transactional ids of a `MockAdmin`: what the test has set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from tidelog.client.record import TopicPartition
from tidelog.model.errors import InvalidRequestError, TidelogError, UnsupportedVersionError
from tidelog.model.transaction_errors import TransactionalIdNotFoundError
from tidelog.services.context import RequestContext
from tidelog.services.transaction_api import TransactionApi
from tidelog.services.transaction_requests import (
    MemberDetails,
    TransactionDetails,
    TransactionFilter,
    TransactionSummary,
)

TIMEOUT_MS = 60_000


def _no_producer() -> NoReturn:
    raise UnsupportedVersionError("a MockAdmin has no producers: use a MockProducer, or a MemoryCluster")


class ScriptedTransactions(TransactionApi):
    """The live broker with the lowest number, which `broker` returns, coordinates all ids."""

    def __init__(self, broker: Callable[[], int]) -> None:
        self._broker = broker
        self._ids: dict[str, TransactionDetails] = {}

    def add(
        self,
        transactional_id: str,
        *,
        state: str,
        producer_id: int,
        partitions: Sequence[TopicPartition],
        members: Mapping[str, tuple[int, Sequence[TopicPartition]]],
        open_for_s: float,
        last_token: bytes,
    ) -> None:
        is_open = state in ("Ongoing", "PrepareCommit", "PrepareAbort")
        self._ids[transactional_id] = TransactionDetails(
            transactional_id=transactional_id,
            coordinator=-1,
            producer_id=producer_id,
            epoch=0,
            status=state,
            timeout_ms=TIMEOUT_MS,
            started_ms=int((time.time() - open_for_s) * 1000) if is_open else -1,
            prepared_ms=-1,
            partitions=sorted(partitions),
            members=[
                MemberDetails(producer_id=number, label=label, partitions=sorted(places))
                for label, (number, places) in sorted(members.items())
            ],
            last_token=last_token,
        )

    async def find_coordinators(
        self, context: RequestContext, transactional_ids: Sequence[str]
    ) -> list[int | TidelogError]:
        empty = InvalidRequestError("a transactional id is not empty")
        return [self._broker() if name else empty for name in transactional_ids]

    async def list(
        self, context: RequestContext, request: TransactionFilter
    ) -> tuple[Sequence[TransactionSummary], int]:
        if not context.peer.startswith(f"broker-{self._broker()}."):
            return [], 0
        now_ms = int(time.time() * 1000)
        return [
            TransactionSummary(transactional_id=name, producer_id=row.producer_id, status=row.status)
            for name, row in sorted(self._ids.items())
            if (not request.statuses or row.status in request.statuses)
            and (not request.producer_ids or not _producers(row).isdisjoint(request.producer_ids))
            and (request.longer_than_ms < 0 or 0 <= row.started_ms <= now_ms - request.longer_than_ms)
        ], 0

    async def describe(self, context: RequestContext, transactional_id: str) -> TransactionDetails:
        return replace(self._known(transactional_id), coordinator=self._broker())

    async def abort(self, context: RequestContext, transactional_id: str) -> bool:
        row = self._known(transactional_id)
        if row.status != "Ongoing":
            return False
        self._ids[transactional_id] = replace(row, status="CompleteAbort", started_ms=-1, partitions=(), members=())
        return True

    def _known(self, transactional_id: str) -> TransactionDetails:
        if transactional_id not in self._ids:
            raise TransactionalIdNotFoundError(f"there is no transactional id {transactional_id!r}")
        return self._ids[transactional_id]

    async def init(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def add_partitions(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def add_offsets(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def commit_offsets(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def end(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def join(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()

    async def prepare(self, context: RequestContext, request: object) -> NoReturn:
        _no_producer()


def _producers(row: TransactionDetails) -> set[int]:
    return {row.producer_id, *(member.producer_id for member in row.members)}
