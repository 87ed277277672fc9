"""ACLs over the Kafka API, against whole brokers that enforce them: administration, decisions, and what they hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode
from tidelog.model.principals import ANONYMOUS, Principal
from tidelog.rpc.kafka import acls, dispatch, operations
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages.data import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from tidelog.rpc.kafka.messages.metadata import (
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsTopicRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from tidelog.rpc.kafka.messages.security import (
    AclCreation,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsRequest,
    DescribeAclsRequest,
)
from tidelog.rpc.kafka.messages.transactions import InitProducerIdRequest
from tidelog.services.acl_authorizer import AclAuthorizerConfig

BROKERS = (11, 12)
ROOT, ALICE = Principal("User", "root"), Principal("User", "alice")
ANY, ALL, READ, WRITE, DESCRIBE = 1, 2, 3, 4, 8
DENY, ALLOW = 2, 3
TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = 2, 3, 4, 5
MATCH, LITERAL, PREFIXED = 2, 3, 4
VERSIONS = range(1, 4)


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    """Controllers and brokers enforce ACLs: that they register and elect shows that nodes need none."""
    made = KafkaCluster(83, dispatch.handlers(), brokers=BROKERS)
    config = AclAuthorizerConfig(super_users=frozenset({"User:root"}))
    made.service_options = replace(made.service_options, acl=config)
    with made:
        yield made


@pytest.fixture(autouse=True)
def without_acls(brokers: KafkaCluster) -> None:
    remove(brokers)


def code(row: Any) -> str:
    return {one.value.code: one.name for one in ErrorCode}[row.error_code] if row.error_code else ""


def creation(operation: int = READ, **more: Any) -> AclCreation:
    fields = {
        "resource_type": TOPIC,
        "resource_name": "orders",
        "resource_pattern_type": LITERAL,
        "principal": "User:alice",
        "host": "*",
        "operation": operation,
        "permission_type": ALLOW,
    }
    return AclCreation(**{**fields, **more})


def create(brokers: KafkaCluster, *creations: AclCreation, principal: Principal = ROOT, **more: Any) -> list[str]:
    request = CreateAclsRequest(creations=list(creations))
    return [code(row) for row in brokers.send(apis.CREATE_ACLS, request, principal=principal, **more).results]


def acl_filter(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "resource_type_filter": ANY,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }
    return {**fields, **more}


def remove(brokers: KafkaCluster, principal: Principal = ROOT, version: int = 3, **more: Any) -> Any:
    request = DeleteAclsRequest(filters=[DeleteAclsFilter(**acl_filter(**more))])
    (row,) = brokers.send(apis.DELETE_ACLS, request, principal=principal, version=version).filter_results
    return row


def describe(brokers: KafkaCluster, principal: Principal = ROOT, version: int = 3, **more: Any) -> Any:
    request = DescribeAclsRequest(**acl_filter(**more))
    return brokers.send(apis.DESCRIBE_ACLS, request, principal=principal, version=version)


def topic_named(brokers: KafkaCluster, name: str) -> UUID:
    known: UUID | None = brokers.image().topic_ids.get(name)
    if known is None:
        (made,) = brokers.ask(CreateTopics(topics=(NewTopic(name=name, assignment=((11,),)),))).topics
        assert made.error is None
        brokers.until_same()
        known = made.topic_id
    assert known is not None
    return known


def metadata(brokers: KafkaCluster, *names: str | bytes, principal: Principal = ALICE) -> list[tuple[str, str]]:
    """(name, error) of each topic; of all of them without a name."""
    topics = [
        MetadataRequestTopic(name=None, topic_id=name) if isinstance(name, bytes) else MetadataRequestTopic(name=name)
        for name in names
    ]
    request = MetadataRequest(topics=topics or None, allow_auto_topic_creation=False)
    response = brokers.send(apis.METADATA, request, principal=principal)
    return [(row.name or "", code(row)) for row in response.topics]


def end_offset(brokers: KafkaCluster, topic: str, principal: Principal = ALICE) -> str:
    request = ListOffsetsRequest(
        topics=[ListOffsetsTopic(name=topic, partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)])]
    )
    (row,) = brokers.send(apis.LIST_OFFSETS, request, principal=principal).topics
    return code(row.partitions[0])


# Administration.


@pytest.mark.requirement("a:K-13")
@pytest.mark.parametrize("version", VERSIONS)
def test_acls_are_created_described_and_deleted_in_each_version(brokers: KafkaCluster, version: int) -> None:
    creations = (
        creation(READ),
        creation(WRITE, permission_type=DENY, host="10.0.0.7"),
        creation(ALL, resource_name="audit-", resource_pattern_type=PREFIXED, principal="User:*"),
        creation(8, resource_type=CLUSTER, resource_name="kafka-cluster"),
        creation(WRITE, resource_type=TRANSACTIONAL_ID, resource_name="*"),
    )
    assert create(brokers, *creations, version=version) == [""] * 5
    assert create(brokers, creations[0], version=version) == [""], "one that exists is no error"
    described = describe(brokers, version=version)
    assert not described.error_code
    rows = {
        AclCreation(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            resource_pattern_type=resource.pattern_type,
            principal=acl.principal,
            host=acl.host,
            operation=acl.operation,
            permission_type=acl.permission_type,
        ).__repr__()
        for resource in described.resources
        for acl in resource.acls
    }
    assert rows == {repr(each) for each in creations}
    assert [len(resource.acls) for resource in described.resources if resource.resource_name == "orders"] == [2]
    matching = describe(
        brokers,
        version=version,
        resource_type_filter=TOPIC,
        resource_name_filter="audit-log",
        pattern_type_filter=MATCH,
    )
    assert [resource.resource_name for resource in matching.resources] == ["audit-"]
    gone = remove(brokers, version=version, resource_type_filter=TOPIC, resource_name_filter="orders")
    assert [(row.operation, row.permission_type, row.host) for row in gone.matching_acls] == [
        (READ, ALLOW, "*"),
        (WRITE, DENY, "10.0.0.7"),
    ]
    assert len(describe(brokers, version=version).resources) == 3


def test_codes_that_nobody_knows_are_errors_of_their_row_only(brokers: KafkaCluster) -> None:
    wrong = (
        creation(operation=0),
        creation(operation=ANY),
        creation(operation=77),
        creation(resource_type=0),
        creation(resource_pattern_type=MATCH),
        creation(permission_type=ANY),
        creation(principal="alice"),
        creation(resource_type=CLUSTER, resource_name="my-cluster", operation=8),
        creation(resource_type=GROUP, operation=WRITE),
    )
    assert create(brokers, *wrong, creation()) == ["INVALID_REQUEST"] * len(wrong) + [""]
    assert code(describe(brokers, operation=0)) == code(describe(brokers, resource_type_filter=99)) == "INVALID_REQUEST"
    assert code(remove(brokers, permission_type=0)) == "INVALID_REQUEST"
    assert len(describe(brokers).resources) == 1


@pytest.mark.requirement("a:K-12", "a:K-26")
def test_only_those_who_may_alter_the_cluster_change_acls(brokers: KafkaCluster) -> None:
    for principal in (ALICE, ANONYMOUS):
        assert create(brokers, creation(), principal=principal) == ["CLUSTER_AUTHORIZATION_FAILED"]
        assert code(describe(brokers, principal)) == "CLUSTER_AUTHORIZATION_FAILED"
        assert describe(brokers, principal).resources == []
        assert code(remove(brokers, principal)) == "CLUSTER_AUTHORIZATION_FAILED"
    of_cluster = {"resource_type": CLUSTER, "resource_name": "kafka-cluster"}
    assert create(brokers, creation(DESCRIBE, **of_cluster)) == [""]
    assert code(describe(brokers, ALICE)) == ""
    assert create(brokers, creation(), principal=ALICE) == ["CLUSTER_AUTHORIZATION_FAILED"]
    assert create(brokers, creation(7, **of_cluster)) == [""]
    assert create(brokers, creation(), principal=ALICE) == [""]


def test_the_codes_are_those_of_the_authorized_operations() -> None:
    for operation in operations.Operation:
        assert acls.OPERATIONS[operation] == operation.name.lower().replace("_", "-")


# Decisions.


@pytest.mark.requirement("a:K-13", "a:K-14", "a:K-19", "a:K-26", "b:M-08")
def test_an_acl_counts_at_once_where_it_was_changed_and_soon_everywhere(brokers: KafkaCluster) -> None:
    topic_named(brokers, "orders")
    assert end_offset(brokers, "orders") == "TOPIC_AUTHORIZATION_FAILED"
    assert end_offset(brokers, "orders", ROOT) == ""
    assert create(brokers, creation(READ)) == [""]
    assert end_offset(brokers, "orders") == "", "Read implies Describe"
    assert create(brokers, creation(ALL, permission_type=DENY, host="10.0.0.9")) == [""]
    assert end_offset(brokers, "orders") == "TOPIC_AUTHORIZATION_FAILED"
    assert len(remove(brokers, permission_type=DENY).matching_acls) == 1
    assert end_offset(brokers, "orders") == ""
    assert len(remove(brokers).matching_acls) == 1
    assert end_offset(brokers, "orders") == "TOPIC_AUTHORIZATION_FAILED"
    brokers.until_same()
    row = brokers.send(apis.METADATA, MetadataRequest(topics=None), principal=ALICE, node=12)
    assert row.topics == []


@pytest.mark.requirement("a:K-26")
def test_nothing_tells_whether_a_topic_exists_that_may_not_be_described(brokers: KafkaCluster) -> None:
    hidden = topic_named(brokers, "hidden").bytes
    topic_named(brokers, "orders")
    assert create(brokers, creation(READ)) == [""]
    denied = "TOPIC_AUTHORIZATION_FAILED"
    assert metadata(brokers, "hidden", "missing") == [("hidden", denied), ("missing", denied)]
    missing = UUID(int=7).bytes
    assert metadata(brokers, hidden, missing) == [("", "UNKNOWN_TOPIC_ID")] * 2
    assert metadata(brokers) == [("orders", "")]
    assert {name for name, _ in metadata(brokers, principal=ROOT)} >= {"hidden", "orders"}
    assert end_offset(brokers, "hidden") == end_offset(brokers, "missing") == denied
    for names, expected in (
        ((), [("orders", "")]),
        (("hidden", "missing"), [("hidden", denied), ("missing", denied)]),
    ):
        asked = DescribeTopicPartitionsRequest(
            topics=[DescribeTopicPartitionsTopicRequest(name=name) for name in names], response_partition_limit=10
        )
        response = brokers.send(apis.DESCRIBE_TOPIC_PARTITIONS, asked, principal=ALICE)
        assert [(row.name, code(row)) for row in response.topics] == expected
        assert response.next_cursor is None


@pytest.mark.requirement("a:K-15")
def test_a_producer_needs_the_right_to_write_to_any_topic_or_idempotent_write(brokers: KafkaCluster) -> None:
    def init() -> str:
        request = InitProducerIdRequest(transactional_id=None, producer_id=-1, producer_epoch=-1)
        return code(brokers.send(apis.INIT_PRODUCER_ID, request, principal=ALICE))

    assert init() == "CLUSTER_AUTHORIZATION_FAILED"
    assert create(brokers, creation(READ)) == [""]
    assert init() == "CLUSTER_AUTHORIZATION_FAILED"
    assert create(brokers, creation(WRITE)) == [""]
    assert init() == ""
    remove(brokers)
    assert create(brokers, creation(12, resource_type=CLUSTER, resource_name="kafka-cluster")) == [""]
    assert init() == ""


def test_a_client_learns_which_operations_are_authorized(brokers: KafkaCluster) -> None:
    topic_named(brokers, "orders")
    assert create(
        brokers, creation(WRITE), creation(DESCRIBE, resource_type=CLUSTER, resource_name="kafka-cluster")
    ) == ["", ""]
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name="orders")],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    kinds = operations.Operation
    for principal, expected in (
        (ALICE, operations.bits(kinds.WRITE, kinds.DESCRIBE)),
        (ROOT, operations.TOPIC),
    ):
        (row,) = brokers.send(apis.METADATA, request, principal=principal).topics
        assert row.topic_authorized_operations == expected
    asked = DescribeClusterRequest(include_cluster_authorized_operations=True)
    found = brokers.send(apis.DESCRIBE_CLUSTER, asked, principal=ALICE)
    assert found.cluster_authorized_operations == operations.bits(kinds.DESCRIBE)
