"""The methods of transactions of both producers, and the blocks `with producer.transaction()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tidelog.client.core_host import CoreHost
from tidelog.client.operations import awaited, blocking
from tidelog.client.producer.core import ProducerCore
from tidelog.client.producer.transactions import Transactions
from tidelog.model.errors import TidelogError
from tidelog.model.transaction_errors import TransactionAbortableError

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[Transactions], Coroutine[Any, Any, T]]


class TransactionMethods:
    _host: CoreHost[ProducerCore]

    init_transactions = blocking(Transactions.init_transactions)
    begin_transaction = blocking(Transactions.begin_transaction)
    send_offsets = blocking(Transactions.send_offsets)
    prepare_transaction = blocking(Transactions.prepare_transaction)
    commit_transaction = blocking(Transactions.commit_transaction)
    abort_transaction = blocking(Transactions.abort_transaction)
    last_token = blocking(Transactions.last_token)
    join_transaction = blocking(Transactions.join_transaction)
    leave_transaction = blocking(Transactions.leave_transaction)
    _enter_transaction = blocking(Transactions.enter_transaction)

    def transaction(self) -> TransactionBlock:
        """Return a block that is one transaction: `with producer.transaction(): ...`.

        It begins a transaction (and calls `init_transactions` if that was not done), commits at its end, and aborts if
        an exception leaves it, which is raised then. If the commit fails with TransactionAbortableError, it aborts and
        raises it. After TransactionTimeoutError, or a cancellation of the commit, the outcome is not known: call
        `commit_transaction` again to learn it.
        """
        return TransactionBlock(self)

    def _run(self, call: Call[T]) -> T:
        return self._host.run(lambda core: call(core.transactions))


class AsyncTransactionMethods:
    _host: CoreHost[ProducerCore]
    _callbacks: Any

    init_transactions = awaited(Transactions.init_transactions)
    begin_transaction = awaited(Transactions.begin_transaction)
    send_offsets = awaited(Transactions.send_offsets)
    prepare_transaction = awaited(Transactions.prepare_transaction)
    commit_transaction = awaited(Transactions.commit_transaction)
    abort_transaction = awaited(Transactions.abort_transaction)
    last_token = awaited(Transactions.last_token)
    join_transaction = awaited(Transactions.join_transaction)
    leave_transaction = awaited(Transactions.leave_transaction)
    _enter_transaction = awaited(Transactions.enter_transaction)

    def transaction(self) -> AsyncTransactionBlock:
        """As `tidelog.Producer.transaction`: `async with producer.transaction(): ...`."""
        return AsyncTransactionBlock(self)

    async def _run(self, call: Call[T]) -> T:
        self._callbacks.use_this_loop()
        return await self._host.run_async(lambda core: call(core.transactions))


class Transactional(Protocol):
    """What a `TransactionBlock` calls."""

    def _enter_transaction(self) -> None: ...

    def commit_transaction(self) -> bool: ...

    def abort_transaction(self) -> None: ...


class TransactionBlock:
    """See `TransactionMethods.transaction`."""

    def __init__(self, producer: Transactional) -> None:
        self._producer = producer

    def __enter__(self) -> None:
        self._producer._enter_transaction()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort(error)
            return
        try:
            self._producer.commit_transaction()
        except TransactionAbortableError as failure:
            self._abort(failure)
            raise

    def _abort(self, error: BaseException) -> None:
        try:
            self._producer.abort_transaction()
        except TidelogError as failure:
            note_failed_abort(error, failure)


class AsyncTransactionBlock:
    """See `TransactionMethods.transaction`."""

    def __init__(self, producer: AsyncTransactionMethods) -> None:
        self._producer = producer

    async def __aenter__(self) -> None:
        await self._producer._enter_transaction()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._abort(error)
            return
        try:
            await self._producer.commit_transaction()
        except TransactionAbortableError as failure:
            await self._abort(failure)
            raise

    async def _abort(self, error: BaseException) -> None:
        try:
            await self._producer.abort_transaction()
        except TidelogError as failure:
            note_failed_abort(error, failure)


def note_failed_abort(error: BaseException, failure: TidelogError) -> None:
    """The error of the block is raised; the abort is repeated by the next block, or by the coordinator's timeout."""
    error.add_note(f"the abort of the transaction failed too: {failure}")
    LOGGER.warning("an abort failed: %s", failure)
