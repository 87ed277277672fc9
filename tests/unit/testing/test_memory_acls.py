"""ACLs end to end: clients of Tidelog against a `MemoryCluster` whose nodes enforce them.

Clients are `User:ANONYMOUS` until listeners authenticate: `allow.everyone.if.no.acl.found` lets them create the first
ACL, and ACLs that name resources restrict them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import tidelog
from tidelog import AclBinding, AclFilter
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.server.settings_table import Value
from tidelog.testing import MemoryCluster

OPEN: dict[str, Value] = {"authorizer": "acl", "super.users": "User:root", "allow.everyone.if.no.acl.found": True}
OTHERS = AclBinding(resource_type="topic", resource="secret", principal="User:bob", operation="read")
MINE = AclBinding(resource_type="topic", resource="secret", principal="User:ANONYMOUS", operation="all")


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(2, seed=5, node_settings=OPEN) as made:
        yield made


def error_of(call: Callable[[], object]) -> ErrorCode | None:
    try:
        call()
    except TidelogError as error:
        return error.code
    return None


def read_for_ever(consumer: tidelog.Consumer) -> None:
    while True:
        consumer.poll(10)


@pytest.mark.requirement("a:K-13", "a:K-16", "a:K-19", "a:K-26", "b:I-12", "b:M-08")
def test_a_principal_whose_acl_is_removed_is_refused_at_once(cluster: MemoryCluster) -> None:
    with (
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Producer(cluster.bootstrap) as producer,
        tidelog.Consumer(cluster.bootstrap) as consumer,
    ):
        admin.create_topic("secret", partitions=1)
        admin.create_topic("open", partitions=1)
        producer.send("secret", b"1").result(10)
        consumer.assign([("secret", 0)])
        consumer.seek_to_beginning()
        assert consumer.poll(10) is not None
        assert admin.describe_acls() == ()
        admin.create_acls([OTHERS, MINE])
        assert admin.describe_acls() == (MINE, OTHERS)
        producer.send("secret", b"2").result(10)
        assert admin.delete_acls([AclFilter(principal="User:ANONYMOUS")]).all() == {
            AclFilter(principal="User:ANONYMOUS"): (MINE,)
        }
        assert error_of(lambda: producer.send("secret", b"3").result(10)) is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert error_of(lambda: admin.list_offsets("secret")) is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert error_of(lambda: read_for_ever(consumer)) is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert [topic.name for topic in admin.list_topics()] == ["open"]
        assert error_of(lambda: admin.describe_topic("secret")) is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        producer.send("open", b"1").result(10)
        admin.create_acls([MINE])
        producer.send("secret", b"3").result(10)


@pytest.mark.requirement("a:K-12")
def test_only_those_who_may_alter_the_cluster_change_acls(cluster: MemoryCluster) -> None:
    read_only = AclBinding(resource_type="cluster", principal="User:ANONYMOUS", operation="describe")
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_acls([read_only])
        assert admin.describe_acls() == (read_only,)
        denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert error_of(lambda: admin.create_acls([OTHERS])) is denied
        assert error_of(lambda: admin.delete_acls([AclFilter()])) is denied
        assert error_of(lambda: admin.create_acls([OTHERS], validate_only=True)) is denied
        assert admin.describe_acls() == (read_only,)


def test_acls_are_checked_row_by_row_and_validation_changes_nothing(cluster: MemoryCluster) -> None:
    wrong = AclBinding(resource_type="topic", resource="t", principal="bob", operation="read")
    with tidelog.Admin(cluster.bootstrap) as admin:
        outcomes = admin.create_acls([wrong, OTHERS], partial=True)
        assert list(outcomes.errors) == [wrong]
        assert list(outcomes) == [OTHERS]
        with pytest.raises(TidelogError, match="User:name"):
            admin.create_acls([wrong])
        assert list(admin.create_acls([MINE], validate_only=True)) == [MINE]
        everything = AclFilter()
        assert admin.delete_acls([everything], validate_only=True)[everything] == (OTHERS,)
        assert admin.describe_acls() == (OTHERS,)
        matching = AclFilter(resource_type="topic", resource="secret", pattern_type="match")
        assert admin.describe_acls(matching) == (OTHERS,)
        assert admin.describe_acls(AclFilter(resource="secrets", pattern_type="match")) == ()
        with pytest.raises(TypeError, match="a list of AclBinding"):
            admin.create_acls(OTHERS)  # type: ignore[arg-type]
        with pytest.raises(TidelogError, match="at least one AclFilter"):
            admin.delete_acls([])


def test_an_admin_of_an_event_loop_has_the_same_operations(cluster: MemoryCluster) -> None:
    async def run() -> None:
        async with tidelog.aio.Admin(cluster.bootstrap) as admin:
            await admin.create_acls([OTHERS])
            assert await admin.describe_acls() == (OTHERS,)
            assert (await admin.delete_acls([AclFilter()]))[AclFilter()] == (OTHERS,)

    asyncio.run(run())


@pytest.mark.requirement("a:K-12")
def test_a_cluster_without_an_authorizer_has_no_acls() -> None:
    with MemoryCluster(1) as cluster, tidelog.Admin(cluster.bootstrap) as admin:
        for call in (
            admin.describe_acls,
            lambda: admin.create_acls([OTHERS]),
            lambda: admin.delete_acls([AclFilter()]),
        ):
            assert error_of(call) is ErrorCode.SECURITY_DISABLED


def test_brokers_that_enforce_acls_restart_and_replicate(cluster: MemoryCluster) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        deny_all = AclBinding(resource_type="cluster", principal="User:*", operation="all", permission="deny")
        admin.create_topic("t", partitions=2, replication_factor=2)
        admin.create_acls([deny_all])
    cluster.kill(1)
    cluster.restart(1)
    with tidelog.Producer(cluster.bootstrap, acks="all") as producer:
        for partition in range(2):
            producer.send("t", b"x", partition=partition).result(20)
    cluster.check()
