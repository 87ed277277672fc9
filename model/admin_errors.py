"""Errors of requests about users, voters, features and log directories. Pure."""

from tidelog.model.errors import ErrorCode, TidelogError


class ResourceNotFoundError(TidelogError):
    code = ErrorCode.RESOURCE_NOT_FOUND


class DuplicateResourceError(TidelogError):
    code = ErrorCode.DUPLICATE_RESOURCE


class UnacceptableCredentialError(TidelogError):
    code = ErrorCode.UNACCEPTABLE_CREDENTIAL


class UnsupportedSaslMechanismError(TidelogError):
    code = ErrorCode.UNSUPPORTED_SASL_MECHANISM


class IllegalSaslStateError(TidelogError):
    code = ErrorCode.ILLEGAL_SASL_STATE


class SaslAuthenticationError(TidelogError):
    """A login failed. The text that a server sends is the same for every failure."""

    code = ErrorCode.SASL_AUTHENTICATION_FAILED


class SecurityDisabledError(TidelogError):
    code = ErrorCode.SECURITY_DISABLED


class LogDirNotFoundError(TidelogError):
    code = ErrorCode.LOG_DIR_NOT_FOUND


class FeatureUpdateError(TidelogError):
    code = ErrorCode.FEATURE_UPDATE_FAILED


class DuplicateVoterError(TidelogError):
    code = ErrorCode.DUPLICATE_VOTER


class VoterNotFoundError(TidelogError):
    code = ErrorCode.VOTER_NOT_FOUND


class InvalidVoterKeyError(TidelogError):
    """A voter has this node id and another directory id."""

    code = ErrorCode.INVALID_VOTER_KEY
