"""The error catalogue: Kafka's names and codes, whether a retry helps, and what to do. Pure.

An error of the environment (bytes from outside, a disk, a peer) is a `TidelogError` with details as attributes. A bug
of ours is an `assert`. `ErrorCode` lists the catalogue entries; an exception class exists for each entry that Python
code handles by name. The Kafka API sends `code`; gRPC sends name and message.
"""

import errno
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the catalogue."""

    code: int
    retriable: bool
    advice: str


class ErrorCode(Enum):
    """Kafka's error names; the value is the catalogue entry."""

    UNKNOWN_SERVER_ERROR = ErrorRow(-1, False, "see the log of the server")
    OFFSET_OUT_OF_RANGE = ErrorRow(1, False, "use an offset from the log's start offset to its end offset")
    CORRUPT_MESSAGE = ErrorRow(2, True, "send the batch again; if it repeats, the sender's encoder or memory is broken")
    INVALID_FETCH_SIZE = ErrorRow(4, False, "request at least one byte")
    REQUEST_TIMED_OUT = ErrorRow(7, True, "retry; the request may have been executed")
    MESSAGE_TOO_LARGE = ErrorRow(10, False, "send smaller batches or raise max.message.bytes of the topic")
    NETWORK_EXCEPTION = ErrorRow(13, True, "the peer is unreachable; retry, or check the network")
    TOPIC_AUTHORIZATION_FAILED = ErrorRow(29, False, "grant the principal this operation on the topic")
    GROUP_AUTHORIZATION_FAILED = ErrorRow(30, False, "grant the principal this operation on the group")
    CLUSTER_AUTHORIZATION_FAILED = ErrorRow(31, False, "grant the principal this operation on the cluster")
    INVALID_TIMESTAMP = ErrorRow(32, False, "send timestamps inside message.timestamp.before/after.max.ms")
    NOT_CONTROLLER = ErrorRow(41, True, "send the request to the active controller, which the error names if known")
    INVALID_REQUEST = ErrorRow(42, False, "the request is invalid; correct it")
    UNSUPPORTED_FOR_MESSAGE_FORMAT = ErrorRow(43, False, "use record batches of magic 2 (any client since 2017)")
    OUT_OF_ORDER_SEQUENCE_NUMBER = ErrorRow(45, False, "an earlier batch is missing; resend from that one")
    DUPLICATE_SEQUENCE_NUMBER = ErrorRow(46, False, "the batch is older than the last five and was stored before")
    INVALID_PRODUCER_EPOCH = ErrorRow(47, False, "a newer producer uses this id; stop this one")
    INVALID_TXN_STATE = ErrorRow(48, False, "begin a transaction first, and end it before the next one")
    INVALID_PRODUCER_ID_MAPPING = ErrorRow(
        49, False, "the transactional id has another producer id, or has expired; initialize the producer again"
    )
    INVALID_TRANSACTION_TIMEOUT = ErrorRow(50, False, "use a timeout from 1 ms to transaction.max.timeout.ms")
    CONCURRENT_TRANSACTIONS = ErrorRow(51, True, "the transaction before this one is being ended; retry")
    TRANSACTION_COORDINATOR_FENCED = ErrorRow(
        52, False, "a newer transaction coordinator has taken over; stop this one"
    )
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = ErrorRow(
        53, False, "grant the principal this operation on the transactional id"
    )
    STORAGE_ERROR = ErrorRow(56, True, "check the disk; other brokers lead its partitions meanwhile")
    UNKNOWN_PRODUCER_ID = ErrorRow(59, False, "request a new producer id")
    FETCH_SESSION_ID_NOT_FOUND = ErrorRow(70, True, "the fetch session has ended; start a new one")
    INVALID_FETCH_SESSION_EPOCH = ErrorRow(71, True, "the fetch session is at another epoch; start a new one")
    FETCH_SESSION_TOPIC_ID_ERROR = ErrorRow(
        106, True, "a fetch session uses either topic names or topic ids; start a new one"
    )
    FENCED_LEADER_EPOCH = ErrorRow(74, True, "refresh metadata: a newer leader epoch exists")
    UNKNOWN_LEADER_EPOCH = ErrorRow(75, True, "this replica does not know that epoch yet; retry")
    UNSUPPORTED_COMPRESSION_TYPE = ErrorRow(76, False, "use none, gzip, snappy, lz4 or zstd")
    INVALID_RECORD = ErrorRow(87, False, "the records of the batch are not valid for this topic")
    THROTTLING_QUOTA_EXCEEDED = ErrorRow(89, True, "too many requests are pending; slow down and retry")
    SNAPSHOT_NOT_FOUND = ErrorRow(98, True, "a newer snapshot has replaced it; start over")
    INCONSISTENT_CLUSTER_ID = ErrorRow(104, False, "the address or the directory belongs to another cluster")
    DUPLICATE_VOTER = ErrorRow(126, False, "the node is already a voter")
    VOTER_NOT_FOUND = ErrorRow(127, False, "no such voter; see `tidelog quorum describe`")
    UNKNOWN_TOPIC_OR_PARTITION = ErrorRow(3, True, "create the topic, or wait until the brokers know it")
    LEADER_NOT_AVAILABLE = ErrorRow(5, True, "a leader is being elected; retry")
    NOT_LEADER_OR_FOLLOWER = ErrorRow(6, True, "refresh metadata: another broker leads the partition")
    REPLICA_NOT_AVAILABLE = ErrorRow(9, True, "retry when the replica is back")
    INVALID_TOPIC = ErrorRow(
        17, False, "names have 1 to 249 letters, digits, dots, dashes, underscores; internal topics are not changed"
    )
    NOT_ENOUGH_REPLICAS = ErrorRow(
        19, True, "fewer replicas are in sync than min.insync.replicas; start the missing brokers"
    )
    UNSUPPORTED_VERSION = ErrorRow(35, False, "use a client or a feature level that this version supports")
    TOPIC_ALREADY_EXISTS = ErrorRow(36, False, "choose another name or delete the topic first")
    INVALID_PARTITIONS = ErrorRow(37, False, "use at least one partition; the number can only grow")
    INVALID_REPLICATION_FACTOR = ErrorRow(38, False, "start more brokers or use fewer replicas")
    INVALID_REPLICA_ASSIGNMENT = ErrorRow(
        39, False, "assign the same number of distinct, registered brokers to every partition"
    )
    INVALID_CONFIG = ErrorRow(40, False, "see docs/configuration.md for the key's type and range")
    REASSIGNMENT_IN_PROGRESS = ErrorRow(60, False, "wait for the reassignment to end, or cancel it")
    TOPIC_DELETION_DISABLED = ErrorRow(73, False, "set delete.topic.enable=true")
    STALE_BROKER_EPOCH = ErrorRow(
        77, False, "a newer incarnation of the broker has registered; this request is of an older one"
    )
    OFFSET_NOT_AVAILABLE = ErrorRow(78, True, "the new leader is confirming its epoch; retry")
    PREFERRED_LEADER_NOT_AVAILABLE = ErrorRow(80, True, "the preferred replica is not live or not in sync")
    ELIGIBLE_LEADERS_NOT_AVAILABLE = ErrorRow(
        83, True, "no replica may lead; start its broker, or elect uncleanly and lose data"
    )
    ELECTION_NOT_NEEDED = ErrorRow(84, False, "the requested leader already leads the partition")
    NO_REASSIGNMENT_IN_PROGRESS = ErrorRow(85, False, "there is nothing to cancel")
    RESOURCE_NOT_FOUND = ErrorRow(91, False, "there is no such user, ACL or resource")
    UNSTABLE_OFFSET_COMMIT = ErrorRow(88, True, "the offset is not stable yet; retry")
    DUPLICATE_RESOURCE = ErrorRow(92, False, "name each resource once in a request")
    UNACCEPTABLE_CREDENTIAL = ErrorRow(93, False, "use 4096 to 16384 iterations and a known mechanism")
    INVALID_UPDATE_VERSION = ErrorRow(95, True, "the partition has changed since; read its state again")
    FEATURE_UPDATE_FAILED = ErrorRow(96, False, "every registered node must support the level")
    UNKNOWN_TOPIC_ID = ErrorRow(100, True, "the topic was deleted, or the broker does not know it yet")
    DUPLICATE_BROKER_REGISTRATION = ErrorRow(101, False, "another live broker uses this id; use a unique node.id")
    BROKER_ID_NOT_REGISTERED = ErrorRow(
        102, False, "`tidelog brokers list` shows the ids; a broker registers when it starts"
    )
    INELIGIBLE_REPLICA = ErrorRow(107, True, "a fenced replica, or one of an older broker epoch, cannot join the ISR")
    NEW_LEADER_ELECTED = ErrorRow(108, False, "the change elected a new leader; become a follower")
    UNSUPPORTED_SASL_MECHANISM = ErrorRow(33, False, "use SCRAM-SHA-256 or SCRAM-SHA-512")
    ILLEGAL_SASL_STATE = ErrorRow(34, False, "connect without SASL: this listener does not authenticate")
    SASL_AUTHENTICATION_FAILED = ErrorRow(58, False, "check the mechanism, the user name and the password or token")
    SECURITY_DISABLED = ErrorRow(
        54, False, "no authorizer is configured, so there are no ACLs and everything is allowed"
    )
    LOG_DIR_NOT_FOUND = ErrorRow(57, False, "use a log directory of this broker; DescribeLogDirs lists them")
    POLICY_VIOLATION = ErrorRow(44, False, "the request exceeds a limit of this cluster; reduce it, or raise the limit")
    INVALID_REQUIRED_ACKS = ErrorRow(21, False, "acks is 0, 1 or -1 (all)")
    LISTENER_NOT_FOUND = ErrorRow(
        72, True, "the leader has no listener of this name; use the same listener names on every broker"
    )
    INVALID_VOTER_KEY = ErrorRow(125, False, "the voter's node id and directory id do not belong together")
    OFFSET_METADATA_TOO_LARGE = ErrorRow(12, False, "shorten the metadata, or raise offset.metadata.max.bytes")
    COORDINATOR_LOAD_IN_PROGRESS = ErrorRow(14, True, "the coordinator is loading its groups; retry")
    COORDINATOR_NOT_AVAILABLE = ErrorRow(15, True, "no coordinator is available for the group; retry")
    NOT_COORDINATOR = ErrorRow(16, True, "find the group's coordinator again")
    ILLEGAL_GENERATION = ErrorRow(22, False, "the group is in another generation; rejoin it")
    INCONSISTENT_GROUP_PROTOCOL = ErrorRow(
        23,
        False,
        "the members use another group protocol or share no assignor; use theirs, or wait until the group is empty",
    )
    INVALID_GROUP_ID = ErrorRow(24, False, "name a group: 1 to 32,767 characters")
    UNKNOWN_MEMBER_ID = ErrorRow(25, False, "the group does not know this member; rejoin it")
    INVALID_SESSION_TIMEOUT = ErrorRow(
        26, False, "use a value from group.min.session.timeout.ms to group.max.session.timeout.ms"
    )
    REBALANCE_IN_PROGRESS = ErrorRow(27, True, "rejoin the group")
    NON_EMPTY_GROUP = ErrorRow(68, False, "stop the group's members first")
    GROUP_ID_NOT_FOUND = ErrorRow(69, False, "no group has this name; see `tidelog groups list`")
    MEMBER_ID_REQUIRED = ErrorRow(79, True, "rejoin with the member id of this response")
    GROUP_MAX_SIZE_REACHED = ErrorRow(81, False, "use fewer members, or raise group.consumer.max.size")
    FENCED_INSTANCE_ID = ErrorRow(82, False, "another member uses this instance id; use a unique one")
    GROUP_SUBSCRIBED_TO_TOPIC = ErrorRow(86, False, "stop the members that read the topic first")
    FENCED_MEMBER_EPOCH = ErrorRow(110, False, "the group has fenced this member; rejoin it")
    UNRELEASED_INSTANCE_ID = ErrorRow(111, False, "another member uses this instance id; stop it first")
    UNSUPPORTED_ASSIGNOR = ErrorRow(112, False, "use uniform, range or roundrobin")
    STALE_MEMBER_EPOCH = ErrorRow(113, True, "the member epoch has risen; resend with the new one")
    MISMATCHED_ENDPOINT_TYPE = ErrorRow(
        114, False, "send the request to a node of the requested type; brokers describe brokers"
    )
    UNSUPPORTED_ENDPOINT_TYPE = ErrorRow(115, False, "use endpoint type 1 (brokers)")
    PRODUCER_FENCED = ErrorRow(90, False, "a newer instance uses this transactional id; stop this one")
    OPERATION_NOT_ATTEMPTED = ErrorRow(55, False, "another partition of the request has an error; correct that one")
    TRANSACTIONAL_ID_NOT_FOUND = ErrorRow(105, False, "see `tidelog transactions list`; the id may have expired")
    TRANSACTION_ABORTABLE = ErrorRow(120, False, "abort the transaction and begin another one")
    OFFSET_MISMATCH = ErrorRow(1001, False, "read the partition up to its end, and decide again")
    """Of our own: no Kafka client can get it."""
    STALE_FENCING_TOKEN = ErrorRow(1002, False, "another writer has claimed the partition; stop this one")
    """Of our own, too."""
    INVALID_REGULAR_EXPRESSION = ErrorRow(128, False, "correct the pattern")


class TidelogError(Exception):
    """An error of the environment. `code` is its catalogue entry; the message says what is wrong."""

    code: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR

    @property
    def retriable(self) -> bool:
        return self.code.value.retriable

    @property
    def advice(self) -> str:
        return self.code.value.advice

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied by its state: constructors of subclasses take arguments that are not in `args`."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[TidelogError], args: tuple[Any, ...], state: dict[str, Any]) -> TidelogError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class CorruptBatchError(TidelogError):
    """The bytes are no valid record batch: length, CRC, counts or structure are wrong."""

    code = ErrorCode.CORRUPT_MESSAGE


class UnsupportedMagicError(TidelogError):
    """The message set has magic 0 or 1, or an unknown magic."""

    code = ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


class UnsupportedCompressionError(TidelogError):
    code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


class RecordTooLargeError(TidelogError):
    """A batch exceeds its size limit, as it is or decompressed."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class InvalidRecordError(TidelogError):
    """A valid batch that this log rejects: a null key on a compacted topic, a count of zero, ..."""

    code = ErrorCode.INVALID_RECORD


class InvalidTimestampError(TidelogError):
    code = ErrorCode.INVALID_TIMESTAMP


class OffsetOutOfRangeError(TidelogError):
    """The offset is outside of the log, which holds `start` to `end`."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, offset: int, start: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.start = start
        self.end = end


class OutOfOrderSequenceError(TidelogError):
    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class DuplicateSequenceError(TidelogError):
    """A duplicate of a batch that is older than the five remembered ones. The original is below `below_offset`. Clients
    treat this error as an acknowledgement, so it is sent once the high watermark has reached that offset."""

    code = ErrorCode.DUPLICATE_SEQUENCE_NUMBER

    def __init__(self, message: str, *, below_offset: int = 0) -> None:
        super().__init__(message)
        self.below_offset = below_offset


class InvalidProducerEpochError(TidelogError):
    code = ErrorCode.INVALID_PRODUCER_EPOCH


class InvalidTransactionStateError(TidelogError):
    code = ErrorCode.INVALID_TXN_STATE


class TransactionCoordinatorFencedError(TidelogError):
    """The marker is of a transaction coordinator that a newer one has replaced."""

    code = ErrorCode.TRANSACTION_COORDINATOR_FENCED


class FencedLeaderEpochError(TidelogError):
    code = ErrorCode.FENCED_LEADER_EPOCH


class StorageError(TidelogError):
    """A disk or state store failed. `path` names the file; `number` is the system's `errno` if known (it crosses
    process boundaries, the cause of an exception does not)."""

    code = ErrorCode.STORAGE_ERROR

    def __init__(self, message: str, *, path: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.number = number


PROCESS_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The process lacks open files or memory, for now. The device is sound."""

DISK_FULL_ADVICE = "nothing was written; free space on the disk of this log directory, no restart is needed"


class DiskFullError(StorageError):
    """The disk is full: nothing of the write was kept, and the same write may succeed once there is space. A sync never
    raises it: a failed sync is final."""


class UnsyncedError(StorageError):
    """A sync failed, and the failure could not be stored: the directory is usable only after a restart."""


class CorruptStateError(StorageError):
    """A value of the state store fails its CRC."""


class DamagedLogError(StorageError):
    """The log ends below, or is corrupt below, what was recorded as synced. The trusted part ends at `good_end`."""

    def __init__(self, message: str, *, path: str, good_end: int) -> None:
        super().__init__(message, path=path)
        self.good_end = good_end


class WorkFailedError(TidelogError):
    """A helper process returned no result: it died, or the result cannot be pickled. The error says nothing about the
    data that the work was for, so clients may retry."""

    code = ErrorCode.STORAGE_ERROR


class UnformattedDirectoryError(StorageError):
    """The directory is not formatted. Formatting it is the operator's decision."""


class LostStateError(StorageError):
    """A formatted directory has lost its epoch and vote, or they are unreadable: the node could vote twice."""


class WrongDirectoryError(StorageError):
    """The directory belongs to another cluster or node, or mixes files of two."""

    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class TransportError(TidelogError):
    """Peer `node` was unreachable, or the connection broke. What was sent may have arrived."""

    code = ErrorCode.NETWORK_EXCEPTION

    def __init__(self, message: str, *, node: int = -1) -> None:
        super().__init__(message)
        self.node = node


class UnreachableError(TransportError):
    """Connection refused, no address, or no route: nothing was executed.

    `is_refused`: the machine answered, and nothing listens on the port.
    """

    def __init__(self, message: str, *, node: int = -1, is_refused: bool = False) -> None:
        super().__init__(message, node=node)
        self.is_refused = is_refused


class CallTimeoutError(TransportError):
    """The peer did not respond in time."""

    code = ErrorCode.REQUEST_TIMED_OUT


class StreamBrokenError(TransportError):
    """The stream is broken, or was closed on this side. A suffix of what was sent may be lost."""


class StreamClosedError(TransportError):
    """The peer has closed the stream; everything that it sent was received."""


class WrongClusterError(TransportError):
    """The peer or a directory belongs to another cluster or another node."""

    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class RemoteError(TidelogError):
    """A catalogue error that a handler of the peer raised; `facts` are its attributes."""

    def __init__(
        self, message: str, *, code: ErrorCode, facts: dict[str, int | str | bytes | bool | None] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.facts = facts or {}


class NotLeaderError(TidelogError):
    """This node does not lead the Raft group. `leader` leads, as far as this node knows. Nothing was done."""

    code = ErrorCode.NOT_CONTROLLER

    def __init__(self, message: str, *, leader: int | None = None) -> None:
        super().__init__(message)
        self.leader = leader


class UnknownOutcomeError(TidelogError):
    """The node lost leadership before the proposal committed: it may commit later, or never."""

    code = ErrorCode.REQUEST_TIMED_OUT


class MovedLogError(TidelogError):
    """The replicated log does not end where the decision expects, or is in another leader epoch. Nothing was done."""

    code = ErrorCode.INVALID_UPDATE_VERSION


class OverloadedError(TidelogError):
    """Too many requests are pending. Nothing was done."""

    code = ErrorCode.THROTTLING_QUOTA_EXCEEDED


class MembershipChangeError(TidelogError):
    """A change of the voters was rejected; the message says why."""

    code = ErrorCode.INVALID_REQUEST


class InvalidReplicationFactorError(TidelogError):
    code = ErrorCode.INVALID_REPLICATION_FACTOR


class RecordsTruncatedError(FencedLeaderEpochError):
    """The log truncated records whose commit was pending: another leader's records replaced them."""


class ProtocolError(TidelogError):
    """The bytes from a peer are no valid message: type, length, a field's type or a bound is wrong."""

    code = ErrorCode.INVALID_REQUEST


class RaftStoppedError(TidelogError):
    """This member is closed, has failed, or was not started. Nothing was done; else it is an `UnknownOutcomeError`."""

    code = ErrorCode.NOT_CONTROLLER


class InvalidRequestError(TidelogError):
    """The request is invalid, whatever the state of the cluster."""

    code = ErrorCode.INVALID_REQUEST


class UnsupportedVersionError(TidelogError):
    code = ErrorCode.UNSUPPORTED_VERSION


class InconsistentClusterIdError(TidelogError):
    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class DuplicateBrokerError(TidelogError):
    """Another live process uses the broker id."""

    code = ErrorCode.DUPLICATE_BROKER_REGISTRATION


class BrokerNotRegisteredError(TidelogError):
    code = ErrorCode.BROKER_ID_NOT_REGISTERED


class StaleBrokerEpochError(TidelogError):
    """The request is of an older incarnation of the broker."""

    code = ErrorCode.STALE_BROKER_EPOCH


class InvalidTopicError(TidelogError):
    """The topic name is invalid, or collides with another one."""

    code = ErrorCode.INVALID_TOPIC


class TopicAlreadyExistsError(TidelogError):
    code = ErrorCode.TOPIC_ALREADY_EXISTS


class UnknownTopicOrPartitionError(TidelogError):
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class UnknownTopicIdError(TidelogError):
    code = ErrorCode.UNKNOWN_TOPIC_ID


class InvalidPartitionsError(TidelogError):
    code = ErrorCode.INVALID_PARTITIONS


class InvalidReplicaAssignmentError(TidelogError):
    code = ErrorCode.INVALID_REPLICA_ASSIGNMENT


class InvalidConfigError(TidelogError):
    """The key does not exist, or the value is not allowed."""

    code = ErrorCode.INVALID_CONFIG


class TopicDeletionDisabledError(TidelogError):
    code = ErrorCode.TOPIC_DELETION_DISABLED


class PolicyViolationError(TidelogError):
    """The request exceeds a limit of a request, of a broker or of the cluster."""

    code = ErrorCode.POLICY_VIOLATION


class ReassignmentInProgressError(TidelogError):
    code = ErrorCode.REASSIGNMENT_IN_PROGRESS


class NoReassignmentError(TidelogError):
    code = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


class PreferredLeaderUnavailableError(TidelogError):
    code = ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE


class EligibleLeadersUnavailableError(TidelogError):
    code = ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


class ElectionNotNeededError(TidelogError):
    code = ErrorCode.ELECTION_NOT_NEEDED


class InvalidUpdateVersionError(TidelogError):
    """The partition has changed since the sender read its state."""

    code = ErrorCode.INVALID_UPDATE_VERSION


class IneligibleReplicaError(TidelogError):
    code = ErrorCode.INELIGIBLE_REPLICA


class NotEnoughReplicasError(TidelogError):
    """A write with acks=all was rejected: fewer than min.insync.replicas replicas are in sync. Nothing was written."""

    code = ErrorCode.NOT_ENOUGH_REPLICAS


class NotLeaderOrFollowerError(TidelogError):
    """This broker does not serve the partition, or not in this role. `leader` leads, as far as this broker knows."""

    code = ErrorCode.NOT_LEADER_OR_FOLLOWER

    def __init__(self, message: str, *, leader: int = -1) -> None:
        super().__init__(message)
        self.leader = leader


class UnknownLeaderEpochError(TidelogError):
    code = ErrorCode.UNKNOWN_LEADER_EPOCH


class OffsetNotAvailableError(TidelogError):
    code = ErrorCode.OFFSET_NOT_AVAILABLE


class RequestTimedOutError(TidelogError):
    """The request may still be executed."""

    code = ErrorCode.REQUEST_TIMED_OUT


class ReplicaNotAvailableError(TidelogError):
    code = ErrorCode.REPLICA_NOT_AVAILABLE


class InvalidRequiredAcksError(TidelogError):
    code = ErrorCode.INVALID_REQUIRED_ACKS


class LeaderNotAvailableError(TidelogError):
    code = ErrorCode.LEADER_NOT_AVAILABLE


def first_error(error: BaseException) -> BaseException:
    """Returns the first error of an exception group; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
