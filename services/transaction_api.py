"""`TransactionApi`: what API servers call for transactions. `TransactionService` implements it.

Errors of a whole request are raised. `list` and `describe` are answered from the state that this broker coordinates: a
client asks every broker for its list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidelog.coordinator.transactions.requests import EndReply, InitReply, JoinReply
from tidelog.model.errors import TidelogError
from tidelog.services.context import RequestContext
from tidelog.services.partition_lookup import PartitionRef
from tidelog.services.transaction_requests import (
    AddOffsetsToTransaction,
    AddPartitionsToTransaction,
    CommitOffsetsInTransaction,
    EndTransaction,
    InitTransactions,
    JoinTransaction,
    PrepareTransaction,
    TransactionDetails,
    TransactionFilter,
    TransactionSummary,
)


class TransactionApi(Protocol):
    async def find_coordinators(
        self, context: RequestContext, transactional_ids: Sequence[str]
    ) -> list[int | TidelogError]:
        """Returns the broker that coordinates each id. Creates `__transaction_state` if it does not exist."""
        ...

    async def init(self, context: RequestContext, request: InitTransactions) -> InitReply: ...

    async def add_partitions(
        self, context: RequestContext, request: AddPartitionsToTransaction
    ) -> list[TidelogError | None]: ...

    async def add_offsets(self, context: RequestContext, request: AddOffsetsToTransaction) -> None: ...

    async def commit_offsets(
        self, context: RequestContext, request: CommitOffsetsInTransaction
    ) -> Mapping[PartitionRef, TidelogError | None]: ...

    async def end(self, context: RequestContext, request: EndTransaction) -> EndReply: ...

    async def join(self, context: RequestContext, request: JoinTransaction) -> JoinReply: ...

    async def prepare(self, context: RequestContext, request: PrepareTransaction) -> None: ...

    async def abort(self, context: RequestContext, transactional_id: str) -> bool:
        """Of an operator. Returns whether a transaction was open."""
        ...

    async def list(
        self, context: RequestContext, request: TransactionFilter
    ) -> tuple[Sequence[TransactionSummary], int]:
        """Returns the ids that this broker coordinates, and how many of its partitions are not loaded."""
        ...

    async def describe(self, context: RequestContext, transactional_id: str) -> TransactionDetails:
        """Raises TransactionalIdNotFoundError."""
        ...
