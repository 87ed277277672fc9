"""The one catalogue of errors: Kafka's names and codes, whether to retry, and what to do about it.

An error of the world (bytes from outside, a disk, a peer) is a `TidelogError` with facts as attributes; an error of
our own is an `assert`. `ErrorCode` is the row of the catalogue, an exception class is a row that Python code catches
by name. The Kafka door sends `code`, gRPC sends name and message.
"""

import errno
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the catalogue."""

    code: int
    retriable: bool
    advice: str


class ErrorCode(Enum):
    """Kafka's error names; the value is the row. Rows are added as the parts that raise them are built."""

    UNKNOWN_SERVER_ERROR = ErrorRow(-1, False, "look into the server's log")
    OFFSET_OUT_OF_RANGE = ErrorRow(1, False, "use an offset from the log's start offset to its end offset")
    CORRUPT_MESSAGE = ErrorRow(2, True, "send the batch again; if it repeats, the sender's encoder or memory is broken")
    INVALID_FETCH_SIZE = ErrorRow(4, False, "ask for at least one byte")
    REQUEST_TIMED_OUT = ErrorRow(7, True, "try again; the request may have been carried out")
    MESSAGE_TOO_LARGE = ErrorRow(10, False, "send smaller batches or raise max.message.bytes of the topic")
    NETWORK_EXCEPTION = ErrorRow(13, True, "the peer cannot be reached; try again, or look at the network")
    INVALID_TIMESTAMP = ErrorRow(32, False, "send timestamps inside message.timestamp.before/after.max.ms")
    NOT_CONTROLLER = ErrorRow(41, True, "ask the active controller; the error says which, if it is known")
    INVALID_REQUEST = ErrorRow(42, False, "the request cannot be carried out as it stands")
    UNSUPPORTED_FOR_MESSAGE_FORMAT = ErrorRow(43, False, "use record batches of magic 2 (any client since 2017)")
    OUT_OF_ORDER_SEQUENCE_NUMBER = ErrorRow(45, False, "a batch before this one is missing; resend from it")
    DUPLICATE_SEQUENCE_NUMBER = ErrorRow(46, False, "the batch is older than the last five; it was stored before")
    INVALID_PRODUCER_EPOCH = ErrorRow(47, False, "a newer producer with this id is at work; stop this one")
    INVALID_TXN_STATE = ErrorRow(48, False, "begin a transaction first")
    TRANSACTION_COORDINATOR_FENCED = ErrorRow(
        52, False, "a newer transaction coordinator has taken over; stop this one"
    )
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = ErrorRow(
        53, False, "use a transactional id that is allowed here; a cluster without transactions allows none"
    )
    STORAGE_ERROR = ErrorRow(56, True, "look at the disk; its partitions are led elsewhere meanwhile")
    UNKNOWN_PRODUCER_ID = ErrorRow(59, False, "ask for a new producer id")
    FETCH_SESSION_ID_NOT_FOUND = ErrorRow(70, True, "the fetch session has ended; begin a new one")
    INVALID_FETCH_SESSION_EPOCH = ErrorRow(71, True, "the fetch session has moved on; begin a new one")
    FETCH_SESSION_TOPIC_ID_ERROR = ErrorRow(106, True, "a fetch session has names or ids of topics; begin a new one")
    FENCED_LEADER_EPOCH = ErrorRow(74, True, "refresh metadata: a newer leader epoch exists")
    UNKNOWN_LEADER_EPOCH = ErrorRow(75, True, "this replica has not heard of that epoch yet; retry")
    UNSUPPORTED_COMPRESSION_TYPE = ErrorRow(76, False, "use none, gzip, snappy, lz4 or zstd")
    INVALID_RECORD = ErrorRow(87, False, "the records of the batch are not well formed for this topic")
    THROTTLING_QUOTA_EXCEEDED = ErrorRow(89, True, "too much is waiting; send more slowly and try again")
    SNAPSHOT_NOT_FOUND = ErrorRow(98, True, "a newer snapshot has replaced it; start again")
    INCONSISTENT_CLUSTER_ID = ErrorRow(104, False, "the address or the directory belongs to another cluster")
    DUPLICATE_VOTER = ErrorRow(126, False, "it is a voter already")
    VOTER_NOT_FOUND = ErrorRow(127, False, "no such voter; look at the quorum's description")
    UNKNOWN_TOPIC_OR_PARTITION = ErrorRow(3, True, "create the topic, or wait until the brokers have heard of it")
    LEADER_NOT_AVAILABLE = ErrorRow(5, True, "a leader is being elected; retry")
    NOT_LEADER_OR_FOLLOWER = ErrorRow(6, True, "refresh metadata: the partition is led elsewhere")
    REPLICA_NOT_AVAILABLE = ErrorRow(9, True, "retry when the replica is back")
    INVALID_TOPIC = ErrorRow(
        17, False, "topic names are 1 to 249 letters, digits, dots, dashes, underscores; not '.' or '..'"
    )
    NOT_ENOUGH_REPLICAS = ErrorRow(19, True, "fewer replicas are in sync than min.insync.replicas; bring brokers back")
    UNSUPPORTED_VERSION = ErrorRow(35, False, "use a client or a feature level that this version knows")
    TOPIC_ALREADY_EXISTS = ErrorRow(36, False, "choose another name or delete the topic first")
    INVALID_PARTITIONS = ErrorRow(37, False, "ask for at least one partition, and only ever for more")
    INVALID_REPLICATION_FACTOR = ErrorRow(38, False, "start more brokers or ask for fewer replicas")
    INVALID_REPLICA_ASSIGNMENT = ErrorRow(
        39, False, "give every partition the same number of distinct, registered brokers"
    )
    INVALID_CONFIG = ErrorRow(40, False, "see docs/configuration.md for the key's type and range")
    REASSIGNMENT_IN_PROGRESS = ErrorRow(60, False, "wait for the reassignment to end, or cancel it")
    TOPIC_DELETION_DISABLED = ErrorRow(73, False, "set delete.topic.enable=true")
    STALE_BROKER_EPOCH = ErrorRow(77, False, "the broker has registered anew since; this request is of its former life")
    OFFSET_NOT_AVAILABLE = ErrorRow(78, True, "the new leader is confirming its epoch; retry")
    PREFERRED_LEADER_NOT_AVAILABLE = ErrorRow(80, True, "the preferred replica is not live or not in sync")
    ELIGIBLE_LEADERS_NOT_AVAILABLE = ErrorRow(
        83, True, "no replica may lead; bring one back, or elect uncleanly and lose data"
    )
    ELECTION_NOT_NEEDED = ErrorRow(84, False, "the partition is led as asked already")
    NO_REASSIGNMENT_IN_PROGRESS = ErrorRow(85, False, "there is nothing to cancel")
    RESOURCE_NOT_FOUND = ErrorRow(91, False, "there is no such user, ACL or resource")
    UNSTABLE_OFFSET_COMMIT = ErrorRow(88, True, "the offset is not known now; ask again")
    DUPLICATE_RESOURCE = ErrorRow(92, False, "name each resource once in a request")
    UNACCEPTABLE_CREDENTIAL = ErrorRow(93, False, "use 4096 to 16384 iterations and a known mechanism")
    INVALID_UPDATE_VERSION = ErrorRow(95, True, "the partition has changed since; look again")
    FEATURE_UPDATE_FAILED = ErrorRow(96, False, "every registered node must support the level")
    UNKNOWN_TOPIC_ID = ErrorRow(100, True, "the topic was deleted, or the broker has not heard of it yet")
    DUPLICATE_BROKER_REGISTRATION = ErrorRow(101, False, "another live broker has this id; give each its own node.id")
    BROKER_ID_NOT_REGISTERED = ErrorRow(
        102, False, "`tidelog brokers list` shows the ids; a broker registers when it starts"
    )
    INELIGIBLE_REPLICA = ErrorRow(107, True, "a replica that is fenced or of a former life cannot join the in-sync set")
    NEW_LEADER_ELECTED = ErrorRow(108, False, "the change moved leadership; act as a follower")
    UNSUPPORTED_SASL_MECHANISM = ErrorRow(33, False, "use SCRAM-SHA-256 or SCRAM-SHA-512")
    ILLEGAL_SASL_STATE = ErrorRow(34, False, "connect without SASL: this listener does not authenticate")
    SECURITY_DISABLED = ErrorRow(54, False, "there are no access rules without an authorizer; everybody may do all")
    LOG_DIR_NOT_FOUND = ErrorRow(57, False, "use a log directory of this broker; DescribeLogDirs lists them")
    POLICY_VIOLATION = ErrorRow(
        44, False, "the request is past a limit of this cluster; ask for less, or raise the limit"
    )
    INVALID_REQUIRED_ACKS = ErrorRow(21, False, "acks is 0, 1 or -1 (all)")
    LISTENER_NOT_FOUND = ErrorRow(72, True, "the leader has no listener of this name; give every broker the same names")
    INVALID_VOTER_KEY = ErrorRow(125, False, "the voter's node id and directory id do not belong together")
    OFFSET_METADATA_TOO_LARGE = ErrorRow(12, False, "shorten the text, or raise offset.metadata.max.bytes")
    COORDINATOR_LOAD_IN_PROGRESS = ErrorRow(14, True, "the coordinator is reading its groups; retry")
    COORDINATOR_NOT_AVAILABLE = ErrorRow(15, True, "nobody coordinates the group now; retry")
    NOT_COORDINATOR = ErrorRow(16, True, "find the group's coordinator again")
    ILLEGAL_GENERATION = ErrorRow(22, False, "the group has moved on; join it again")
    INCONSISTENT_GROUP_PROTOCOL = ErrorRow(
        23,
        False,
        "its members speak another group protocol or share no assignor; use theirs, or wait until it is empty",
    )
    INVALID_GROUP_ID = ErrorRow(24, False, "name a group: 1 to 32,767 characters")
    UNKNOWN_MEMBER_ID = ErrorRow(25, False, "the group does not know this member; join it again")
    INVALID_SESSION_TIMEOUT = ErrorRow(26, False, "stay between group.min and group.max.session.timeout.ms")
    REBALANCE_IN_PROGRESS = ErrorRow(27, True, "join the group again")
    NON_EMPTY_GROUP = ErrorRow(68, False, "stop the group's members first")
    GROUP_ID_NOT_FOUND = ErrorRow(69, False, "there is no group of this name; see `tidelog groups list`")
    MEMBER_ID_REQUIRED = ErrorRow(79, True, "join again with the member id of this answer")
    GROUP_MAX_SIZE_REACHED = ErrorRow(81, False, "use fewer members, or raise group.consumer.max.size")
    FENCED_INSTANCE_ID = ErrorRow(82, False, "another member has this instance id; give each its own")
    GROUP_SUBSCRIBED_TO_TOPIC = ErrorRow(86, False, "stop the members that read the topic first")
    FENCED_MEMBER_EPOCH = ErrorRow(110, False, "the group has moved on without this member; join it again")
    UNRELEASED_INSTANCE_ID = ErrorRow(111, False, "another member lives under this instance id; stop it first")
    UNSUPPORTED_ASSIGNOR = ErrorRow(112, False, "use uniform, range or roundrobin")
    STALE_MEMBER_EPOCH = ErrorRow(113, True, "the member's epoch has risen; send it again with the new one")
    MISMATCHED_ENDPOINT_TYPE = ErrorRow(114, False, "ask a node of the type that is wanted; brokers describe brokers")
    UNSUPPORTED_ENDPOINT_TYPE = ErrorRow(115, False, "ask for brokers (1)")
    INVALID_REGULAR_EXPRESSION = ErrorRow(128, False, "mend the pattern")


class TidelogError(Exception):
    """An error of the world. `code` is its row in the catalogue; the message says what is wrong."""

    code: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR

    @property
    def retriable(self) -> bool:
        return self.code.value.retriable

    @property
    def advice(self) -> str:
        return self.code.value.advice


class CorruptBatchError(TidelogError):
    """Bytes that are not a whole, sound record batch: length, CRC, counts or structure are wrong."""

    code = ErrorCode.CORRUPT_MESSAGE


class UnsupportedMagicError(TidelogError):
    """A message set of magic 0 or 1, or of a magic that does not exist."""

    code = ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


class UnsupportedCompressionError(TidelogError):
    code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


class RecordTooLargeError(TidelogError):
    """A batch over its limit, or one that would decompress past its limit."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class InvalidRecordError(TidelogError):
    """Sound bytes that this log does not take: a null key on a compacted topic, a count of zero, ..."""

    code = ErrorCode.INVALID_RECORD


class InvalidTimestampError(TidelogError):
    code = ErrorCode.INVALID_TIMESTAMP


class OffsetOutOfRangeError(TidelogError):
    """An offset outside of the log; `start` and `end` say what there is."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, offset: int, start: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.start = start
        self.end = end


class OutOfOrderSequenceError(TidelogError):
    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class DuplicateSequenceError(TidelogError):
    """A repeat of a batch that is older than the five that are remembered. The original lies below `below_offset`:
    clients take this error for an acknowledgement, so it is sent once the high watermark has reached that."""

    code = ErrorCode.DUPLICATE_SEQUENCE_NUMBER

    def __init__(self, message: str, *, below_offset: int = 0) -> None:
        super().__init__(message)
        self.below_offset = below_offset


class InvalidProducerEpochError(TidelogError):
    code = ErrorCode.INVALID_PRODUCER_EPOCH


class InvalidTransactionStateError(TidelogError):
    code = ErrorCode.INVALID_TXN_STATE


class TransactionalIdRefusedError(TidelogError):
    """Nobody may produce under this transactional id."""

    code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


class TransactionCoordinatorFencedError(TidelogError):
    """A marker from a transaction coordinator that has been replaced by a newer one."""

    code = ErrorCode.TRANSACTION_COORDINATOR_FENCED


class FencedLeaderEpochError(TidelogError):
    code = ErrorCode.FENCED_LEADER_EPOCH


class StorageError(TidelogError):
    """A disk or state store did not do what it was asked; `path` says where, `number` is the system's `errno` if it is
    known (it travels between processes, as the cause of an error does not)."""

    code = ErrorCode.STORAGE_ERROR

    def __init__(self, message: str, *, path: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.number = number


OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Open files and memory that a process lacks and may get again: nothing is wrong with the device."""

FULL_ADVICE = "nothing of it was written; make room on the disk of this log directory, no restart is needed"


class DiskFullError(StorageError):
    """No space left: nothing of the write was kept, and the same write may succeed when there is room. Never of a sync:
    one that fails is final."""


class UnsyncedError(StorageError):
    """A sync failed, and that could not be stored: only a restart may look at the directory again."""


class CorruptStateError(StorageError):
    """A value of the state store fails its CRC."""


class DamagedLogError(StorageError):
    """A log that ends below, or is corrupt below, what was recorded as synced; `good_end` is what can be trusted."""

    def __init__(self, message: str, *, path: str, good_end: int) -> None:
        super().__init__(message, path=path)
        self.good_end = good_end


class WorkFailedError(TidelogError):
    """Work for a helper process ended without an answer: the helper died, or the answer cannot travel. It says nothing
    about what the work was done on, so clients may retry."""

    code = ErrorCode.STORAGE_ERROR


class UnformattedDirectoryError(StorageError):
    """A directory that was never prepared for a cluster; formatting it is the operator's decision."""


class LostStateError(StorageError):
    """A formatted directory whose epoch and vote are gone or unreadable: running on it could mean to vote twice."""


class WrongDirectoryError(StorageError):
    """A directory of another cluster, another node, or put together from two."""

    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class TransportError(TidelogError):
    """A peer was not reached, or the way to it broke; `node` is the peer. What was sent may have arrived."""

    code = ErrorCode.NETWORK_EXCEPTION

    def __init__(self, message: str, *, node: int = -1) -> None:
        super().__init__(message)
        self.node = node


class UnreachableError(TransportError):
    """Refused, no address, or no route: nothing was carried out.

    `is_refused`: the machine answered, and nothing listens there.
    """

    def __init__(self, message: str, *, node: int = -1, is_refused: bool = False) -> None:
        super().__init__(message, node=node)
        self.is_refused = is_refused


class CallTimeoutError(TransportError):
    """No answer in time."""

    code = ErrorCode.REQUEST_TIMED_OUT


class StreamBrokenError(TransportError):
    """The stream is broken, or was closed on this side; a suffix of what was sent may be lost."""


class StreamClosedError(TransportError):
    """The peer has closed the stream in order; all that it sent was received."""


class WrongClusterError(TransportError):
    """The peer, or a directory, belongs to another cluster, or is another node than was meant."""

    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class RemoteError(TidelogError):
    """An error of the catalogue that a peer's handler raised; `facts` are its attributes."""

    def __init__(
        self, message: str, *, code: ErrorCode, facts: dict[str, int | str | bytes | bool | None] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.facts = facts or {}


class NotLeaderError(TidelogError):
    """This node does not lead the Raft group; `leader` is who does, as far as is known here. Nothing was done."""

    code = ErrorCode.NOT_CONTROLLER

    def __init__(self, message: str, *, leader: int | None = None) -> None:
        super().__init__(message)
        self.leader = leader


class UnknownOutcomeError(TidelogError):
    """Leadership was lost before the proposal was seen to commit: it may commit yet, or never."""

    code = ErrorCode.REQUEST_TIMED_OUT


class MovedLogError(TidelogError):
    """A replicated log does not end where a decision belongs, or is led in another epoch; nothing was done."""

    code = ErrorCode.INVALID_UPDATE_VERSION


class OverloadedError(TidelogError):
    """Too much is waiting already; nothing was done."""

    code = ErrorCode.THROTTLING_QUOTA_EXCEEDED


class MembershipChangeError(TidelogError):
    """A change of the voters that was not taken; the message says why."""

    code = ErrorCode.INVALID_REQUEST


class InvalidReplicationFactorError(TidelogError):
    code = ErrorCode.INVALID_REPLICATION_FACTOR


class RecordsTruncatedError(FencedLeaderEpochError):
    """Records that somebody waited for were cut from the log: another leader's records stand in their place."""


class ProtocolError(TidelogError):
    """Bytes from a peer that are no message of the protocol: type, length, a field's type or a bound is wrong."""

    code = ErrorCode.INVALID_REQUEST


class RaftStoppedError(TidelogError):
    """This member does not run: it was closed, has failed, or was not started. What was asked may be done or not."""

    code = ErrorCode.NOT_CONTROLLER


class InvalidRequestError(TidelogError):
    """A request that makes no sense as it stands, whatever the state of the cluster."""

    code = ErrorCode.INVALID_REQUEST


class UnsupportedVersionError(TidelogError):
    code = ErrorCode.UNSUPPORTED_VERSION


class InconsistentClusterIdError(TidelogError):
    code = ErrorCode.INCONSISTENT_CLUSTER_ID


class DuplicateBrokerError(TidelogError):
    """A broker's id is taken by another live process."""

    code = ErrorCode.DUPLICATE_BROKER_REGISTRATION


class BrokerNotRegisteredError(TidelogError):
    code = ErrorCode.BROKER_ID_NOT_REGISTERED


class StaleBrokerEpochError(TidelogError):
    """A request of a former incarnation of a broker."""

    code = ErrorCode.STALE_BROKER_EPOCH


class InvalidTopicError(TidelogError):
    """A name that no topic may have, or that collides with another's."""

    code = ErrorCode.INVALID_TOPIC


class TopicExistsError(TidelogError):
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
    """A key that does not exist here, or a value outside of what it allows."""

    code = ErrorCode.INVALID_CONFIG


class TopicDeletionDisabledError(TidelogError):
    code = ErrorCode.TOPIC_DELETION_DISABLED


class PolicyViolationError(TidelogError):
    """Past a limit on what one request, one broker or the whole cluster may hold."""

    code = ErrorCode.POLICY_VIOLATION


class NoReassignmentError(TidelogError):
    code = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


class PreferredLeaderUnavailableError(TidelogError):
    code = ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE


class EligibleLeadersUnavailableError(TidelogError):
    code = ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


class ElectionNotNeededError(TidelogError):
    code = ErrorCode.ELECTION_NOT_NEEDED


class InvalidUpdateVersionError(TidelogError):
    """The partition has changed since the sender looked."""

    code = ErrorCode.INVALID_UPDATE_VERSION


class IneligibleReplicaError(TidelogError):
    code = ErrorCode.INELIGIBLE_REPLICA


class NotEnoughReplicasError(TidelogError):
    """A write with acks=all while fewer than min.insync.replicas are in sync. Nothing was written."""

    code = ErrorCode.NOT_ENOUGH_REPLICAS


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
    """A voter of this node id is there, with another directory."""

    code = ErrorCode.INVALID_VOTER_KEY


class NotLeaderOrFollowerError(TidelogError):
    """This broker does not serve the partition, or not in this role; `leader` is who leads, as far as is known here."""

    code = ErrorCode.NOT_LEADER_OR_FOLLOWER

    def __init__(self, message: str, *, leader: int = -1) -> None:
        super().__init__(message)
        self.leader = leader


class UnknownLeaderEpochError(TidelogError):
    code = ErrorCode.UNKNOWN_LEADER_EPOCH


class OffsetNotAvailableError(TidelogError):
    """A new leader has not confirmed its epoch yet."""

    code = ErrorCode.OFFSET_NOT_AVAILABLE


class RequestTimedOutError(TidelogError):
    """What was asked may be done yet."""

    code = ErrorCode.REQUEST_TIMED_OUT


class ReplicaNotAvailableError(TidelogError):
    code = ErrorCode.REPLICA_NOT_AVAILABLE


class InvalidRequiredAcksError(TidelogError):
    code = ErrorCode.INVALID_REQUIRED_ACKS


class LeaderNotAvailableError(TidelogError):
    """Nobody leads the partition, or who does is still opening its log."""

    code = ErrorCode.LEADER_NOT_AVAILABLE
