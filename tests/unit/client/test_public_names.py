"""The public names: what `tidelog` exports, and that everything that the documentation names is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import tidelog
from tidelog.client.cluster import error_in
from tidelog.client.remote_errors import CLASSES
from tidelog.model.errors import RemoteError
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.v1 import log_pb2

# fmt: off
NAMES = [
    "AclBinding", "AclFilter",
    "Admin", "AdminOptions", "AdminProtocol", "AsyncAdminProtocol", "AsyncConsumerProtocol", "AsyncProducerProtocol",
    "Bootstrap", "BrokerDescription", "BulkDelivery", "BulkMetadata", "ByPartition", "ClusterDescription",
    "CommitCallback", "CommonOptions", "ConfigEntry", "ConfigResource", "Consumer", "ConsumerOptions",
    "ConsumerProtocol", "ConsumerRecord", "CreatedTopic", "Delivery", "DeliveryCallback", "DeliveryProtocol",
    "DeserializerLike", "DifferingReplica", "DrainedBroker", "Feature", "GroupDescription", "GroupList", "GroupListing",
    "GroupMetadata", "GroupOffset", "HangingTransaction", "Headers", "ListedOffset", "LogDir", "MemberDescription",
    "MetadataEntry",
    "MetadataLog", "MetadataSnapshot", "NewTopic", "OffsetAndMetadata", "OffsetAndTimestamp", "OffsetChange", "Offsets",
    "Outcomes", "PartitionDescription", "PartitionLag", "PartitionLike", "PartitionVerification",
    "PlainConsumerOptions", "Producer", "ProducerOptions", "ProducerProtocol", "ProducerRecord", "QuorumDescription",
    "QuorumMember", "Range", "Reassignment", "RebalanceCallback", "RecordMetadata", "ReplicaDifference", "ReplicaSize",
    "Resource", "SerializerLike", "TidelogError", "TimeLike", "TopicDescription", "TopicListing", "TopicPartition",
    "Topics", "TopicsOrPartitions", "TransactionDescription", "TransactionList", "TransactionListing",
    "TransactionMember", "VerificationProgress", "__version__", "aio", "errors", "read_arrow", "serializers",
    "verify",
]
# fmt: on
PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def test_package_exports_these_names() -> None:
    assert sorted(tidelog.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(tidelog, name) is not None
    assert set(NAMES) <= set(dir(tidelog))


def test_page_names_only_what_is_exported() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^###+ ([A-Z]\w+)$", text, re.MULTILINE)
    aliases = re.findall(r"^([A-Z]\w+) = ", text, re.MULTILINE)
    assert {"Producer", "Consumer", "Admin", "RecordMetadata", "Range", "Outcomes", "MetadataLog"} <= set(headings)
    assert {"Topics", "PartitionLike", "TimeLike", "DeliveryCallback"} <= set(aliases)
    assert set(re.findall(r"`(\w+(?:Protocol|Options))`", text)) <= set(tidelog.__all__)
    for name in {*headings, *aliases} - {"Histories", "Protocols"}:
        assert name in tidelog.__all__, name
    for module, name in re.findall(r"^### tidelog\.(\w+)\.(\w+)$", text, re.MULTILINE):
        assert hasattr(import_module(f"tidelog.{module}"), name), (module, name)
    errors = re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE)
    assert set(errors) <= set(tidelog.errors.__all__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_of_a_broker_has_the_class_of_its_code(kind: type[tidelog.TidelogError]) -> None:
    row = log_pb2.ProducedPartition()
    row.error.CopyFrom(as_message(RemoteError("from a broker", code=kind.code)))
    error = error_in(row)
    assert isinstance(error, kind)
    assert isinstance(error, RemoteError)
    assert str(error) == "from a broker"
    assert error.code is kind.code
    assert kind.__name__ in tidelog.errors.__all__
