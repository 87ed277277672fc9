"""The methods of transactions of both producers, and the blocks `with producer.transaction()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tidelog.client.core_host import CoreHost
from tidelog.client.errors import ForkedError, ProducerClosedError, TransactionTimeoutError
from tidelog.client.operations import awaited, blocking
from tidelog.client.producer.core import ProducerCore
from tidelog.client.producer.transaction_state import as_abortable
from tidelog.client.producer.transactions import Transactions
from tidelog.model.errors import TidelogError
from tidelog.model.transaction_errors import TransactionFatalError

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
        an exception leaves it, which is raised then. If the commit fails, or is interrupted, before the coordinator was
        asked, it aborts and raises the error (TransactionAbortableError after a timeout, also of the begin). If the
        answer is missing (TransactionTimeoutError, Ctrl-C, a cancellation), the outcome is not known; a note of the
        error says so: call `commit_transaction` again.

        `abort_transaction` or `commit_transaction` inside ends the transaction there; the end of the block does nothing
        then. Blocks do not nest, and records that other threads send meanwhile are part of the transaction.
        """
        return TransactionBlock(self)

    def _is_open(self, block: object) -> bool:
        return is_open(self._host, block)

    def _may_be_committed(self) -> bool:
        return may_be_committed(self._host)

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

    def _is_open(self, block: object) -> bool:
        return is_open(self._host, block)

    def _may_be_committed(self) -> bool:
        return may_be_committed(self._host)

    async def _run(self, call: Call[T]) -> T:
        self._callbacks.use_this_loop()
        return await self._host.run_async(lambda core: call(core.transactions))


def is_open(host: CoreHost[ProducerCore], block: object) -> bool:
    """Whether the transaction that this block has begun is open, or its end has no outcome yet. True in a forked child,
    whose calls raise."""
    return host.core is None or host.core.transactions.block is block


def may_be_committed(host: CoreHost[ProducerCore]) -> bool:
    return host.core is not None and host.core.transactions.states.may_be_committed


class Transactional(Protocol):
    """What a `TransactionBlock` calls."""

    def _enter_transaction(self, block: object) -> None: ...

    def _is_open(self, block: object) -> bool: ...

    def _may_be_committed(self) -> bool: ...

    def commit_transaction(self) -> bool: ...

    def abort_transaction(self) -> None: ...


class TransactionBlock:
    """See `TransactionMethods.transaction`."""

    def __init__(self, producer: Transactional) -> None:
        self._producer = producer

    def __enter__(self) -> None:
        try:
            self._producer._enter_transaction(self)
        except TidelogError:
            raise
        except BaseException as error:  # Ctrl-C may come after the transaction has begun
            self._abort(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort(error)
            return
        if not self._producer._is_open(self):
            return
        try:
            self._producer.commit_transaction()
        except BaseException as failure:
            if needs_abort(failure, may_be_committed=self._producer._may_be_committed()):
                self._abort(failure)
                raise_as_aborted(failure)
            raise

    def _abort(self, error: BaseException) -> None:
        if not self._producer._is_open(self):
            return
        try:
            self._producer.abort_transaction()
        except TidelogError as failure:
            note_failed_abort(error, failure)


class AsyncTransactionBlock:
    """See `TransactionMethods.transaction`."""

    def __init__(self, producer: AsyncTransactionMethods) -> None:
        self._producer = producer

    async def __aenter__(self) -> None:
        try:
            await self._producer._enter_transaction(self)
        except TidelogError:
            raise
        except BaseException as error:  # a cancellation may come after the transaction has begun
            await self._abort(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._abort(error)
            return
        if not self._producer._is_open(self):
            return
        try:
            await self._producer.commit_transaction()
        except BaseException as failure:
            if needs_abort(failure, may_be_committed=self._producer._may_be_committed()):
                await self._abort(failure)
                raise_as_aborted(failure)
            raise

    async def _abort(self, error: BaseException) -> None:
        if not self._producer._is_open(self):
            return
        try:
            await self._producer.abort_transaction()
        except TidelogError as failure:
            note_failed_abort(error, failure)


def needs_abort(failure: BaseException, *, may_be_committed: bool) -> bool:
    """Whether a block whose commit has failed, or was interrupted, has to abort."""
    if isinstance(failure, TransactionFatalError | ProducerClosedError | ForkedError):
        return False
    if may_be_committed:
        failure.add_note("whether the transaction has committed is not known: call commit_transaction again")
    return not may_be_committed


def raise_as_aborted(failure: BaseException) -> None:
    """A commit that timed out before the coordinator was asked is no commit: repeating it, as after another timeout,
    would be wrong."""
    if isinstance(failure, TransactionTimeoutError):
        raise as_abortable(failure) from failure


def note_failed_abort(error: BaseException, failure: TidelogError) -> None:
    """The error of the block is raised; the abort is repeated by the next block, or by the coordinator's timeout."""
    if isinstance(failure, ForkedError) or (
        isinstance(failure, TransactionFatalError) and isinstance(error, TransactionFatalError)
    ):
        return  # the parent owns the transaction; `error` says already that another instance does
    error.add_note(f"the abort of the transaction failed too: {failure}")
    LOGGER.warning("the abort of a transaction failed: %s", failure)
