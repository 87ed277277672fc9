"""Exceptions of transactions. Their catalogue entries are in `model.errors`. Pure."""

from tidelog.model.errors import ErrorCode, TidelogError


class TransactionFatalError(TidelogError):
    """This producer cannot continue: close it. Another one with the transactional id aborts what is open. `code` says
    why."""

    code = ErrorCode.PRODUCER_FENCED

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidProducerIdMappingError(TransactionFatalError):
    """The transactional id has another producer id, or is unknown."""

    code = ErrorCode.INVALID_PRODUCER_ID_MAPPING


class InvalidTransactionTimeoutError(TidelogError):
    code = ErrorCode.INVALID_TRANSACTION_TIMEOUT


class ConcurrentTransactionsError(TidelogError):
    """The transaction before this one is being ended: retry."""

    code = ErrorCode.CONCURRENT_TRANSACTIONS


class ProducerFencedError(TransactionFatalError):
    """A newer instance uses the transactional id."""

    code = ErrorCode.PRODUCER_FENCED


class TransactionalIdNotFoundError(TidelogError):
    code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


class TransactionAbortableError(TidelogError):
    """The transaction cannot commit: abort it and begin another one. Nothing of it is visible to readers of committed
    data."""

    code = ErrorCode.TRANSACTION_ABORTABLE


class OffsetMismatchError(TidelogError):
    """The partition does not end at the expected offset, but at `end_offset`. Nothing was stored."""

    code = ErrorCode.OFFSET_MISMATCH

    def __init__(self, message: str, *, end_offset: int = -1) -> None:
        super().__init__(message)
        self.end_offset = end_offset


class StaleFencingTokenError(TidelogError):
    """The newest claim of the partition is at offset `claim` (-1: the log has none), not at the fencing token. Nothing
    was stored."""

    code = ErrorCode.STALE_FENCING_TOKEN

    def __init__(self, message: str, *, claim: int = -1) -> None:
        super().__init__(message)
        self.claim = claim
