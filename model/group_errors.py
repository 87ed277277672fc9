"""Exceptions of group coordination. Their catalogue entries are in `model.errors`. Pure."""

from tidelog.model.errors import ErrorCode, TidelogError


class NotCoordinatorError(TidelogError):
    """`coordinator` coordinates the group, as far as this broker knows."""

    code = ErrorCode.NOT_COORDINATOR

    def __init__(self, message: str, *, coordinator: int = -1) -> None:
        super().__init__(message)
        self.coordinator = coordinator


class OffsetMetadataTooLargeError(TidelogError):
    code = ErrorCode.OFFSET_METADATA_TOO_LARGE


class CoordinatorLoadingError(TidelogError):
    code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


class CoordinatorNotAvailableError(TidelogError):
    code = ErrorCode.COORDINATOR_NOT_AVAILABLE


class IllegalGenerationError(TidelogError):
    code = ErrorCode.ILLEGAL_GENERATION


class InconsistentGroupProtocolError(TidelogError):
    code = ErrorCode.INCONSISTENT_GROUP_PROTOCOL


class InvalidGroupIdError(TidelogError):
    code = ErrorCode.INVALID_GROUP_ID


class UnknownMemberIdError(TidelogError):
    code = ErrorCode.UNKNOWN_MEMBER_ID


class InvalidSessionTimeoutError(TidelogError):
    code = ErrorCode.INVALID_SESSION_TIMEOUT


class RebalanceInProgressError(TidelogError):
    code = ErrorCode.REBALANCE_IN_PROGRESS


class NonEmptyGroupError(TidelogError):
    code = ErrorCode.NON_EMPTY_GROUP


class GroupIdNotFoundError(TidelogError):
    code = ErrorCode.GROUP_ID_NOT_FOUND


class MemberIdRequiredError(TidelogError):
    code = ErrorCode.MEMBER_ID_REQUIRED

    def __init__(self, message: str, *, member_id: str = "") -> None:
        super().__init__(message)
        self.member_id = member_id


class GroupFullError(TidelogError):
    code = ErrorCode.GROUP_MAX_SIZE_REACHED


class FencedInstanceIdError(TidelogError):
    code = ErrorCode.FENCED_INSTANCE_ID


class GroupSubscribedError(TidelogError):
    code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC


class FencedMemberEpochError(TidelogError):
    code = ErrorCode.FENCED_MEMBER_EPOCH


class UnreleasedInstanceIdError(TidelogError):
    code = ErrorCode.UNRELEASED_INSTANCE_ID


class UnsupportedAssignorError(TidelogError):
    code = ErrorCode.UNSUPPORTED_ASSIGNOR


class StaleMemberEpochError(TidelogError):
    code = ErrorCode.STALE_MEMBER_EPOCH


class InvalidPatternError(TidelogError):
    code = ErrorCode.INVALID_REGULAR_EXPRESSION


class UnstableOffsetError(TidelogError):
    """An open transaction has an offset for the partition: what is committed may change with its end."""

    code = ErrorCode.UNSTABLE_OFFSET_COMMIT
