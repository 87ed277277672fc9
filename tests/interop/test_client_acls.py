"""ACLs through confluent-kafka's AdminClient, and their enforcement against its producer, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import admin as untyped_admin

from tidelog.testing import LocalCluster

kafka: Any = untyped_admin
ME = "User:ANONYMOUS"
WAIT_S = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"authorizer": "acl", "super.users": "User:root", "allow.everyone.if.no.acl.found": True}
    with LocalCluster(1, settings=settings) as made:
        yield made


def binding(
    operation: Any, principal: str = ME, permission: Any = kafka.AclPermissionType.ALLOW, name: str = "o"
) -> Any:
    return kafka.AclBinding(
        kafka.ResourceType.TOPIC, name, kafka.ResourcePatternType.LITERAL, principal, "*", operation, permission
    )


def everything(**more: Any) -> Any:
    fields = {
        "restype": kafka.ResourceType.ANY,
        "name": None,
        "resource_pattern_type": kafka.ResourcePatternType.ANY,
        "principal": None,
        "host": None,
        "operation": kafka.AclOperation.ANY,
        "permission_type": kafka.AclPermissionType.ANY,
    }
    return kafka.AclBindingFilter(**{**fields, **more})


def delivery(producer: Producer, topic: str) -> KafkaError | None:
    errors: list[KafkaError | None] = []
    producer.produce(topic, b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(WAIT_S)
    (error,) = errors
    return error


@pytest.mark.requirement("a:K-13", "a:K-17", "a:K-26", "b:M-08")
def test_confluent_kafka_manages_acls_and_its_producer_obeys_them(cluster: LocalCluster) -> None:
    admin = kafka.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})
    for future in admin.create_topics([kafka.NewTopic("o", 1, 1), kafka.NewTopic("free", 1, 1)]).values():
        future.result(WAIT_S)
    producer = Producer({"bootstrap.servers": cluster.kafka_bootstrap, "message.timeout.ms": 10_000})
    assert delivery(producer, "o") is None
    created = [
        binding(kafka.AclOperation.READ, "User:bob"),
        binding(kafka.AclOperation.WRITE),
        binding(kafka.AclOperation.ALL, permission=kafka.AclPermissionType.DENY, name="other"),
    ]
    for future in admin.create_acls(created).values():
        assert future.result(WAIT_S) is None
    assert set(admin.describe_acls(everything()).result(WAIT_S)) == set(created)
    (match,) = admin.describe_acls(
        everything(
            restype=kafka.ResourceType.TOPIC, name="other", resource_pattern_type=kafka.ResourcePatternType.MATCH
        )
    ).result(WAIT_S)
    assert match == created[2]
    assert delivery(producer, "o") is None
    (deleted,) = admin.delete_acls([everything(name="o", principal=ME)]).values()
    assert deleted.result(WAIT_S) == [created[1]]
    error = delivery(producer, "o")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert delivery(producer, "free") is None
    (wrong,) = admin.create_acls([binding(kafka.AclOperation.READ, principal="bob")]).values()
    with pytest.raises(KafkaException) as raised:
        wrong.result(WAIT_S)
    assert raised.value.args[0].code() == KafkaError.INVALID_REQUEST
