"""Gives errors of a broker the class of their code, so that programs catch `TopicAlreadyExistsError`, not a code.

The class of such an error is a `RemoteError` and the class of the catalogue, in one.
"""

from __future__ import annotations

from tidelog.client.errors import OffsetOutOfRangeError
from tidelog.model import admin_errors, errors, group_errors, transaction_errors
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError

CLASSES: tuple[type[TidelogError], ...] = (
    errors.TopicAlreadyExistsError,
    errors.InvalidTopicError,
    errors.InvalidPartitionsError,
    errors.InvalidReplicationFactorError,
    errors.InvalidReplicaAssignmentError,
    errors.InvalidConfigError,
    errors.InvalidTimestampError,
    errors.InvalidRecordError,
    errors.PolicyViolationError,
    errors.TopicDeletionDisabledError,
    errors.UnknownTopicOrPartitionError,
    errors.UnknownTopicIdError,
    errors.RecordTooLargeError,
    errors.NotEnoughReplicasError,
    errors.NoReassignmentError,
    errors.ElectionNotNeededError,
    errors.PreferredLeaderUnavailableError,
    errors.EligibleLeadersUnavailableError,
    errors.OverloadedError,
    errors.InvalidRequestError,
    errors.LeaderNotAvailableError,
    errors.BrokerNotRegisteredError,
    errors.ReassignmentInProgressError,
    admin_errors.DuplicateVoterError,
    admin_errors.VoterNotFoundError,
    admin_errors.InvalidVoterKeyError,
    admin_errors.FeatureUpdateError,
    errors.UnsupportedVersionError,
    OffsetOutOfRangeError,
    admin_errors.LogDirNotFoundError,
    group_errors.GroupIdNotFoundError,
    group_errors.NonEmptyGroupError,
    group_errors.GroupSubscribedError,
    group_errors.GroupFullError,
    group_errors.InvalidGroupIdError,
    group_errors.UnknownMemberIdError,
    group_errors.FencedInstanceIdError,
    group_errors.UnreleasedInstanceIdError,
    group_errors.CoordinatorNotAvailableError,
    group_errors.CoordinatorLoadingError,
    group_errors.OffsetMetadataTooLargeError,
    group_errors.InvalidSessionTimeoutError,
    group_errors.UnsupportedAssignorError,
    group_errors.InconsistentGroupProtocolError,
    group_errors.InvalidPatternError,
    errors.InvalidTransactionStateError,
    transaction_errors.ConcurrentTransactionsError,
    transaction_errors.InvalidProducerIdMappingError,
    transaction_errors.InvalidTransactionTimeoutError,
    transaction_errors.ProducerFencedError,
    transaction_errors.TransactionAbortableError,
    transaction_errors.TransactionalIdNotFoundError,
    transaction_errors.OffsetMismatchError,
    transaction_errors.StaleFencingTokenError,
)
"""Catalogue entries that programs handle."""

_REMOTE: dict[ErrorCode, type[RemoteError]] = {
    kind.code: type(kind.__name__, (RemoteError, kind), {"__doc__": kind.__doc__}) for kind in CLASSES
}
globals().update({kind.__name__: kind for kind in _REMOTE.values()})  # pickle looks a class up in its module


def with_class(error: RemoteError) -> RemoteError:
    """The same error, of the class of its code."""
    kind = _REMOTE.get(error.code)
    if kind is None or type(error) is not RemoteError:
        return error
    return kind(*error.args, code=error.code, facts=error.facts)
