"""Tidelog: a streaming log cluster.

The names of a program, imported on first use: `import tidelog` costs next to nothing.

    Producer, Consumer, Admin     clients of a cluster; `aio` has them for event loops
    ProducerOptions, ...          the types of their options
    ProducerProtocol, ...         what a client and its mock have in common
    TopicDescription, ...         what an admin takes and returns
    serializers                   objects to bytes and back
    read_arrow                    records of a topic as a table
    errors                        every error of the clients
    verify                        checkers of recorded histories
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog import aio as aio
    from tidelog import errors as errors
    from tidelog import serializers as serializers
    from tidelog import verify as verify
    from tidelog.client.admin.acl_values import AclBinding as AclBinding
    from tidelog.client.admin.acl_values import AclFilter as AclFilter
    from tidelog.client.admin.arguments import Resource as Resource
    from tidelog.client.admin.arguments import TopicsOrPartitions as TopicsOrPartitions
    from tidelog.client.admin.threaded import Admin as Admin
    from tidelog.client.admin.values import BrokerDescription as BrokerDescription
    from tidelog.client.admin.values import ClusterDescription as ClusterDescription
    from tidelog.client.admin.values import ConfigEntry as ConfigEntry
    from tidelog.client.admin.values import ConfigResource as ConfigResource
    from tidelog.client.admin.values import CreatedTopic as CreatedTopic
    from tidelog.client.admin.values import DrainedBroker as DrainedBroker
    from tidelog.client.admin.values import Feature as Feature
    from tidelog.client.admin.values import GroupDescription as GroupDescription
    from tidelog.client.admin.values import GroupList as GroupList
    from tidelog.client.admin.values import GroupListing as GroupListing
    from tidelog.client.admin.values import GroupOffset as GroupOffset
    from tidelog.client.admin.values import HangingTransaction as HangingTransaction
    from tidelog.client.admin.values import ListedOffset as ListedOffset
    from tidelog.client.admin.values import LogDir as LogDir
    from tidelog.client.admin.values import MemberDescription as MemberDescription
    from tidelog.client.admin.values import MetadataEntry as MetadataEntry
    from tidelog.client.admin.values import MetadataLog as MetadataLog
    from tidelog.client.admin.values import MetadataSnapshot as MetadataSnapshot
    from tidelog.client.admin.values import NewTopic as NewTopic
    from tidelog.client.admin.values import OffsetChange as OffsetChange
    from tidelog.client.admin.values import Outcomes as Outcomes
    from tidelog.client.admin.values import PartitionDescription as PartitionDescription
    from tidelog.client.admin.values import PartitionLag as PartitionLag
    from tidelog.client.admin.values import QuorumDescription as QuorumDescription
    from tidelog.client.admin.values import QuorumMember as QuorumMember
    from tidelog.client.admin.values import Reassignment as Reassignment
    from tidelog.client.admin.values import ReplicaSize as ReplicaSize
    from tidelog.client.admin.values import TopicDescription as TopicDescription
    from tidelog.client.admin.values import TopicListing as TopicListing
    from tidelog.client.admin.values import TransactionDescription as TransactionDescription
    from tidelog.client.admin.values import TransactionList as TransactionList
    from tidelog.client.admin.values import TransactionListing as TransactionListing
    from tidelog.client.admin.values import TransactionMember as TransactionMember
    from tidelog.client.admin.verification import DifferingReplica as DifferingReplica
    from tidelog.client.admin.verification import PartitionVerification as PartitionVerification
    from tidelog.client.admin.verification import ReplicaDifference as ReplicaDifference
    from tidelog.client.admin.verification import VerificationProgress as VerificationProgress
    from tidelog.client.consumer.arguments import ByPartition as ByPartition
    from tidelog.client.consumer.arguments import PartitionLike as PartitionLike
    from tidelog.client.consumer.arguments import Topics as Topics
    from tidelog.client.consumer.commits import CommitCallback as CommitCallback
    from tidelog.client.consumer.commits import Offsets as Offsets
    from tidelog.client.consumer.rebalance import RebalanceCallback as RebalanceCallback
    from tidelog.client.consumer.threaded import Consumer as Consumer
    from tidelog.client.durations import TimeLike as TimeLike
    from tidelog.client.options import AdminOptions as AdminOptions
    from tidelog.client.options import Bootstrap as Bootstrap
    from tidelog.client.options import CommonOptions as CommonOptions
    from tidelog.client.options import ConsumerOptions as ConsumerOptions
    from tidelog.client.options import DeserializerLike as DeserializerLike
    from tidelog.client.options import PlainConsumerOptions as PlainConsumerOptions
    from tidelog.client.options import ProducerOptions as ProducerOptions
    from tidelog.client.options import SerializerLike as SerializerLike
    from tidelog.client.producer.bulk import BulkDelivery as BulkDelivery
    from tidelog.client.producer.bulk import BulkMetadata as BulkMetadata
    from tidelog.client.producer.bulk import Range as Range
    from tidelog.client.producer.fast_path import Delivery as Delivery
    from tidelog.client.producer.fast_path import DeliveryCallback as DeliveryCallback
    from tidelog.client.producer.fast_path import Headers as Headers
    from tidelog.client.producer.fast_path import RecordMetadata as RecordMetadata
    from tidelog.client.producer.records import ProducerRecord as ProducerRecord
    from tidelog.client.producer.threaded import Producer as Producer
    from tidelog.client.protocols import AdminProtocol as AdminProtocol
    from tidelog.client.protocols import AsyncAdminProtocol as AsyncAdminProtocol
    from tidelog.client.protocols import AsyncConsumerProtocol as AsyncConsumerProtocol
    from tidelog.client.protocols import AsyncProducerProtocol as AsyncProducerProtocol
    from tidelog.client.protocols import ConsumerProtocol as ConsumerProtocol
    from tidelog.client.protocols import DeliveryProtocol as DeliveryProtocol
    from tidelog.client.protocols import ProducerProtocol as ProducerProtocol
    from tidelog.client.read_arrow import read_arrow as read_arrow
    from tidelog.client.record import ConsumerRecord as ConsumerRecord
    from tidelog.client.record import GroupMetadata as GroupMetadata
    from tidelog.client.record import OffsetAndMetadata as OffsetAndMetadata
    from tidelog.client.record import OffsetAndTimestamp as OffsetAndTimestamp
    from tidelog.client.record import TopicPartition as TopicPartition
    from tidelog.model.errors import TidelogError as TidelogError

__version__ = "0.1.0"

_NAMES = {
    "tidelog.client.admin.acl_values": (
        "AclBinding",
        "AclFilter",
    ),
    "tidelog.client.admin.arguments": (
        "Resource",
        "TopicsOrPartitions",
    ),
    "tidelog.client.admin.threaded": ("Admin",),
    "tidelog.client.admin.values": (
        "BrokerDescription",
        "ClusterDescription",
        "ConfigEntry",
        "ConfigResource",
        "CreatedTopic",
        "DrainedBroker",
        "Feature",
        "GroupDescription",
        "GroupList",
        "GroupListing",
        "GroupOffset",
        "HangingTransaction",
        "ListedOffset",
        "LogDir",
        "MemberDescription",
        "MetadataEntry",
        "MetadataLog",
        "MetadataSnapshot",
        "NewTopic",
        "OffsetChange",
        "Outcomes",
        "PartitionDescription",
        "PartitionLag",
        "QuorumDescription",
        "QuorumMember",
        "Reassignment",
        "ReplicaSize",
        "TopicDescription",
        "TopicListing",
        "TransactionDescription",
        "TransactionList",
        "TransactionListing",
        "TransactionMember",
    ),
    "tidelog.client.admin.verification": (
        "DifferingReplica",
        "PartitionVerification",
        "ReplicaDifference",
        "VerificationProgress",
    ),
    "tidelog.client.consumer.arguments": (
        "ByPartition",
        "PartitionLike",
        "Topics",
    ),
    "tidelog.client.consumer.commits": (
        "CommitCallback",
        "Offsets",
    ),
    "tidelog.client.consumer.rebalance": ("RebalanceCallback",),
    "tidelog.client.consumer.threaded": ("Consumer",),
    "tidelog.client.durations": ("TimeLike",),
    "tidelog.client.options": (
        "AdminOptions",
        "Bootstrap",
        "CommonOptions",
        "ConsumerOptions",
        "DeserializerLike",
        "PlainConsumerOptions",
        "ProducerOptions",
        "SerializerLike",
    ),
    "tidelog.client.producer.bulk": (
        "BulkDelivery",
        "BulkMetadata",
        "Range",
    ),
    "tidelog.client.producer.fast_path": (
        "Delivery",
        "DeliveryCallback",
        "Headers",
        "RecordMetadata",
    ),
    "tidelog.client.producer.records": ("ProducerRecord",),
    "tidelog.client.producer.threaded": ("Producer",),
    "tidelog.client.protocols": (
        "AdminProtocol",
        "AsyncAdminProtocol",
        "AsyncConsumerProtocol",
        "AsyncProducerProtocol",
        "ConsumerProtocol",
        "DeliveryProtocol",
        "ProducerProtocol",
    ),
    "tidelog.client.read_arrow": ("read_arrow",),
    "tidelog.client.record": (
        "ConsumerRecord",
        "GroupMetadata",
        "OffsetAndMetadata",
        "OffsetAndTimestamp",
        "TopicPartition",
    ),
    "tidelog.model.errors": ("TidelogError",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("aio", "errors", "serializers", "verify")

__all__ = [
    "AclBinding",
    "AclFilter",
    "Admin",
    "AdminOptions",
    "AdminProtocol",
    "AsyncAdminProtocol",
    "AsyncConsumerProtocol",
    "AsyncProducerProtocol",
    "Bootstrap",
    "BrokerDescription",
    "BulkDelivery",
    "BulkMetadata",
    "ByPartition",
    "ClusterDescription",
    "CommitCallback",
    "CommonOptions",
    "ConfigEntry",
    "ConfigResource",
    "Consumer",
    "ConsumerOptions",
    "ConsumerProtocol",
    "ConsumerRecord",
    "CreatedTopic",
    "Delivery",
    "DeliveryCallback",
    "DeliveryProtocol",
    "DeserializerLike",
    "DifferingReplica",
    "DrainedBroker",
    "Feature",
    "GroupDescription",
    "GroupList",
    "GroupListing",
    "GroupMetadata",
    "GroupOffset",
    "HangingTransaction",
    "Headers",
    "ListedOffset",
    "LogDir",
    "MemberDescription",
    "MetadataEntry",
    "MetadataLog",
    "MetadataSnapshot",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetChange",
    "Offsets",
    "Outcomes",
    "PartitionDescription",
    "PartitionLag",
    "PartitionLike",
    "PartitionVerification",
    "PlainConsumerOptions",
    "Producer",
    "ProducerOptions",
    "ProducerProtocol",
    "ProducerRecord",
    "QuorumDescription",
    "QuorumMember",
    "Range",
    "Reassignment",
    "RebalanceCallback",
    "RecordMetadata",
    "ReplicaDifference",
    "ReplicaSize",
    "Resource",
    "SerializerLike",
    "TidelogError",
    "TimeLike",
    "TopicDescription",
    "TopicListing",
    "TopicPartition",
    "Topics",
    "TopicsOrPartitions",
    "TransactionDescription",
    "TransactionList",
    "TransactionListing",
    "TransactionMember",
    "VerificationProgress",
    "__version__",
    "aio",
    "errors",
    "read_arrow",
    "serializers",
    "verify",
]

if not TYPE_CHECKING:  # a type checker rejects names that it does not see above

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value: Any = import_module(f"tidelog.{name}")
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module 'tidelog' has no attribute '{name}'")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES, *_MODULES})
