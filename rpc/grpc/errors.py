"""Errors of the catalogue in gRPC: messages inside of responses, and the status of a whole call.

The status is coarse: it is for tools that do not know the catalogue. The exact error is in the trailing metadata
`tidelog-error-bin`, encoded by `world.transport.encode_error`.
"""

from __future__ import annotations

from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.rpc.v1 import common_pb2 as common

ERROR_KEY = "tidelog-error-bin"
DETAILS_LENGTH_MAX = 1024
"""Characters of the message beside the status; metadata has to stay small."""

_E = ErrorCode
_STATUS: dict[str, tuple[ErrorCode, ...]] = {
    "INVALID_ARGUMENT": (
        _E.INVALID_REQUEST,
        _E.INVALID_REQUIRED_ACKS,
        _E.INVALID_TOPIC,
        _E.INVALID_PARTITIONS,
        _E.INVALID_REPLICATION_FACTOR,
        _E.INVALID_REPLICA_ASSIGNMENT,
        _E.INVALID_CONFIG,
        _E.INVALID_TIMESTAMP,
        _E.INVALID_FETCH_SIZE,
        _E.INVALID_RECORD,
        _E.CORRUPT_MESSAGE,
        _E.UNSUPPORTED_COMPRESSION_TYPE,
        _E.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        _E.INVALID_GROUP_ID,
        _E.INVALID_SESSION_TIMEOUT,
        _E.INVALID_REGULAR_EXPRESSION,
        _E.OFFSET_METADATA_TOO_LARGE,
        _E.UNSUPPORTED_ASSIGNOR,
        _E.INVALID_TRANSACTION_TIMEOUT,
    ),
    "NOT_FOUND": (
        _E.UNKNOWN_TOPIC_OR_PARTITION,
        _E.UNKNOWN_TOPIC_ID,
        _E.RESOURCE_NOT_FOUND,
        _E.BROKER_ID_NOT_REGISTERED,
        _E.VOTER_NOT_FOUND,
        _E.SNAPSHOT_NOT_FOUND,
        _E.GROUP_ID_NOT_FOUND,
        _E.UNKNOWN_MEMBER_ID,
        _E.TRANSACTIONAL_ID_NOT_FOUND,
    ),
    "UNAUTHENTICATED": (_E.SASL_AUTHENTICATION_FAILED,),
    "PERMISSION_DENIED": (
        _E.TOPIC_AUTHORIZATION_FAILED,
        _E.GROUP_AUTHORIZATION_FAILED,
        _E.CLUSTER_AUTHORIZATION_FAILED,
        _E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
    "ALREADY_EXISTS": (
        _E.TOPIC_ALREADY_EXISTS,
        _E.DUPLICATE_RESOURCE,
        _E.DUPLICATE_VOTER,
        _E.DUPLICATE_BROKER_REGISTRATION,
    ),
    "ABORTED": (_E.CONCURRENT_TRANSACTIONS, _E.TRANSACTION_ABORTABLE, _E.PRODUCER_FENCED),
    "DEADLINE_EXCEEDED": (_E.REQUEST_TIMED_OUT,),
    "RESOURCE_EXHAUSTED": (
        _E.THROTTLING_QUOTA_EXCEEDED,
        _E.POLICY_VIOLATION,
        _E.MESSAGE_TOO_LARGE,
        _E.GROUP_MAX_SIZE_REACHED,
    ),
    "OUT_OF_RANGE": (_E.OFFSET_OUT_OF_RANGE,),
    "UNIMPLEMENTED": (_E.UNSUPPORTED_VERSION,),
    "UNAVAILABLE": (
        _E.NETWORK_EXCEPTION,
        _E.NOT_CONTROLLER,
        _E.NOT_LEADER_OR_FOLLOWER,
        _E.LEADER_NOT_AVAILABLE,
        _E.LISTENER_NOT_FOUND,
        _E.REPLICA_NOT_AVAILABLE,
        _E.OFFSET_NOT_AVAILABLE,
        _E.STORAGE_ERROR,
        _E.COORDINATOR_LOAD_IN_PROGRESS,
        _E.COORDINATOR_NOT_AVAILABLE,
        _E.NOT_COORDINATOR,
    ),
    "INTERNAL": (_E.UNKNOWN_SERVER_ERROR,),
}
STATUS_NAMES: dict[ErrorCode, str] = {code: status for status, codes in _STATUS.items() for code in codes}


def status_name(error: TidelogError) -> str:
    """Returns the name of the gRPC status; FAILED_PRECONDITION for a code in no list."""
    return STATUS_NAMES.get(error.code, "FAILED_PRECONDITION")


def as_message(error: TidelogError) -> common.Error:
    return coded(error.code, str(error))


def coded(code: ErrorCode, message: str) -> common.Error:
    row = code.value
    return common.Error(code=row.code, name=code.name, message=message, retriable=row.retriable, advice=row.advice)


def outcome(code: ErrorCode | None, message: str) -> common.Error | None:
    """Returns None for success: the field stays unset."""
    return None if code is None else coded(code, message)


def as_exception(message: common.Error) -> RemoteError:
    """Returns what a client raises; an unknown name is UNKNOWN_SERVER_ERROR."""
    known = ErrorCode.__members__.get(message.name)
    text = message.message if known is not None else f"{message.name}: {message.message}"
    return RemoteError(text, code=known or ErrorCode.UNKNOWN_SERVER_ERROR)
