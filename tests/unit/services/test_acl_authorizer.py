"""Rules of `AclAuthorizer` one by one; `tests/property/test_acl_decisions.py` compares it with a naive evaluator."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tidelog.metadata.records import CreateAcl
from tidelog.model.errors import InvalidConfigError
from tidelog.model.principals import Principal
from tidelog.services import acl_authorizer
from tidelog.services.acl_authorizer import AclAuthorizer, AclAuthorizerConfig, parse_super_users
from tidelog.services.authorization import CLUSTER, Operation, Resource, ResourceType
from tidelog.services.context import INTERNAL, Api, RequestContext

ALICE = RequestContext(Api.GRPC, Principal("User", "alice"), client_host="10.0.0.1")
ORDERS = Resource(ResourceType.TOPIC, "orders")


def acl(operation: str = "read", **more: str) -> CreateAcl:
    fields: dict[str, Any] = {
        "resource_type": "topic",
        "resource": "orders",
        "pattern_type": "literal",
        "principal": "User:alice",
        "host": "*",
        "operation": operation,
        "permission": "allow",
    }
    return CreateAcl(acl_id=UUID(int=0), **{**fields, **more})


class Stored:
    def __init__(self, *acls: CreateAcl) -> None:
        self.acls: dict[UUID, CreateAcl] = {}
        self.change(*acls)

    def change(self, *acls: CreateAcl) -> None:
        self.acls = {UUID(int=number): each for number, each in enumerate(acls)}

    def authorizer(self, *super_users: str, is_open: bool = False) -> AclAuthorizer:
        config = AclAuthorizerConfig(super_users=frozenset(super_users), allow_everyone_if_no_acl=is_open)
        return AclAuthorizer(lambda: self.acls, config)


def allowed(authorizer: AclAuthorizer, context: RequestContext = ALICE, resource: Resource = ORDERS) -> set[str]:
    return {operation.value for operation in Operation if authorizer.authorize(context, operation, resource)}


@pytest.mark.requirement("a:K-14", "a:X3-55")
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("read", {"Read", "Describe"}),
        ("write", {"Write", "Describe"}),
        ("delete", {"Delete", "Describe"}),
        ("alter", {"Alter", "Describe"}),
        ("alter-configs", {"AlterConfigs", "DescribeConfigs"}),
        ("describe", {"Describe"}),
        ("create", {"Create"}),
        ("all", {operation.value for operation in Operation}),
    ],
)
def test_an_allowed_operation_implies_those_of_kafka(operation: str, expected: set[str]) -> None:
    assert allowed(Stored(acl(operation)).authorizer()) == expected


@pytest.mark.requirement("a:K-13", "a:X3-55")
def test_a_denial_wins_over_every_allowance_and_denies_nothing_else() -> None:
    stored = Stored(acl("all"), acl("read", permission="deny"))
    assert "Read" not in allowed(stored.authorizer())
    assert {"Describe", "Write"} <= allowed(stored.authorizer())
    stored.change(acl("all"), acl("all", permission="deny", host="10.0.0.1"))
    authorizer = stored.authorizer()
    assert allowed(authorizer) == set()
    elsewhere = RequestContext(Api.GRPC, ALICE.principal, client_host="10.0.0.2")
    assert "Read" in allowed(authorizer, elsewhere)


@pytest.mark.requirement("a:K-16", "a:X3-55")
def test_a_super_user_is_not_deniable() -> None:
    stored = Stored(acl("all", principal="User:*", permission="deny"))
    assert allowed(stored.authorizer("User:alice")) == {operation.value for operation in Operation}
    assert allowed(stored.authorizer("User:bob")) == set()
    assert stored.authorizer("User:alice").authorize_any(ALICE, Operation.WRITE, ResourceType.TOPIC)


@pytest.mark.requirement("a:K-16")
def test_everybody_uses_resources_without_acls_only_if_the_setting_says_so() -> None:
    stored = Stored(acl("read", principal="User:bob"))
    payments = Resource(ResourceType.TOPIC, "payments")
    assert allowed(stored.authorizer(), resource=payments) == set()
    assert "Write" in allowed(stored.authorizer(is_open=True), resource=payments)
    assert allowed(stored.authorizer(is_open=True)) == set(), "an ACL of somebody else names this topic"


@pytest.mark.requirement("a:K-13", "a:K-24")
def test_a_prefix_names_every_resource_that_begins_with_it_and_of_its_type_only() -> None:
    authorizer = Stored(acl("write", resource="customer", pattern_type="prefixed")).authorizer()
    for name, expected in (("customer", True), ("customer-events", True), ("custom", False), ("a-customer", False)):
        assert authorizer.authorize(ALICE, Operation.WRITE, Resource(ResourceType.TOPIC, name)) is expected
    assert not authorizer.authorize(ALICE, Operation.WRITE, Resource(ResourceType.TRANSACTIONAL_ID, "customer"))


@pytest.mark.requirement("a:K-19")
def test_a_decision_is_kept_until_the_acls_are_others() -> None:
    stored = Stored(acl("read"))
    authorizer = stored.authorizer()
    assert authorizer.authorize(ALICE, Operation.READ, ORDERS)
    index = authorizer._index
    assert authorizer.authorize(ALICE, Operation.READ, ORDERS)
    assert authorizer._index is index
    stored.change()
    assert not authorizer.authorize(ALICE, Operation.READ, ORDERS)
    stored.change(acl("read"))
    assert authorizer.authorize(ALICE, Operation.READ, ORDERS)


def test_the_kept_decisions_are_bounded_whatever_names_clients_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl_authorizer, "DECISIONS_MAX", 10)
    authorizer = Stored(acl("read", resource="*")).authorizer()
    for number in range(25):
        context = RequestContext(Api.KAFKA, ALICE.principal, client_host=f"10.0.0.{number % 4}")
        assert authorizer.authorize(context, Operation.READ, Resource(ResourceType.TOPIC, f"t-{number}"))
        assert sum(map(len, authorizer._decisions.values())) <= 10
    long = Resource(ResourceType.TOPIC, "x" * 513)
    before = {key: dict(some) for key, some in authorizer._decisions.items()}
    assert authorizer.authorize(ALICE, Operation.READ, long)
    assert authorizer._decisions == before


def test_requests_of_nodes_need_no_acl() -> None:
    authorizer = Stored(acl("all", principal="User:*", permission="deny", resource="*")).authorizer()
    node = RequestContext(Api.INTERNAL, Principal("Node", "3"))
    for context in (INTERNAL, node):
        assert authorizer.authorize(context, Operation.CLUSTER_ACTION, CLUSTER)
        assert authorizer.authorize(context, Operation.READ, ORDERS)
        assert authorizer.authorize_any(context, Operation.WRITE, ResourceType.TOPIC)
    pretender = RequestContext(Api.KAFKA, Principal("Node", "3"))
    assert not authorizer.authorize(pretender, Operation.CLUSTER_ACTION, CLUSTER)


def test_a_host_of_ipv4_is_the_same_on_a_listener_of_ipv6() -> None:
    authorizer = Stored(acl("all"), acl("all", permission="deny", host="10.0.0.1")).authorizer()
    assert allowed(authorizer, RequestContext(Api.GRPC, ALICE.principal, client_host="::ffff:10.0.0.1")) == set()


def test_super_users_are_principals_separated_by_semicolons() -> None:
    assert parse_super_users(" User:a; User:CN=b,O=c ;") == {"User:a", "User:CN=b,O=c"}
    assert parse_super_users("") == frozenset()
    for wrong in ("alice", "User:", ":alice", "User:a;bob"):
        with pytest.raises(InvalidConfigError, match=r"User:name;User:name"):
            parse_super_users(wrong)
