"""`AclAuthorizer` decides as an evaluator that knows no index and no cache, after every change of the ACLs."""

from __future__ import annotations

import itertools
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.metadata.records import CreateAcl
from tidelog.model.principals import Principal
from tidelog.services.acl_authorizer import OPERATION_NAMES, TYPE_NAMES, AclAuthorizer, AclAuthorizerConfig
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import Api, RequestContext

PRINCIPALS = ("User:a", "User:b", "Group:a", "User:*")
HOSTS = ("10.0.0.1", "10.0.0.2", "*")
NAMES = ("a", "aa", "ab", "b", "*")
KINDS = (ResourceType.TOPIC, ResourceType.GROUP)
ALL_NAMES = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product("abc", repeat=length)]
"""One name at least is outside of any set of patterns over `NAMES` that does not contain all names."""

ACLS = st.lists(
    st.builds(
        CreateAcl,
        acl_id=st.just(UUID(int=0)),
        resource_type=st.sampled_from([TYPE_NAMES[kind] for kind in KINDS]),
        resource=st.sampled_from(NAMES),
        pattern_type=st.sampled_from(("literal", "prefixed")),
        principal=st.sampled_from(PRINCIPALS),
        host=st.sampled_from(HOSTS),
        operation=st.sampled_from([*OPERATION_NAMES.values(), "all"]),
        permission=st.sampled_from(("allow", "allow", "deny")),
    ),
    max_size=8,
)
CONTEXTS = st.builds(
    RequestContext,
    api=st.just(Api.KAFKA),
    principal=st.builds(Principal, st.sampled_from(("User", "Group")), st.sampled_from("abc")),
    client_host=st.sampled_from(("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.2", "fe80::1")),
)
CONFIGS = st.builds(
    AclAuthorizerConfig,
    super_users=st.sampled_from((frozenset[str](), frozenset({"User:c"}))),
    allow_everyone_if_no_acl=st.booleans(),
)
IMPLIED = {
    "describe": {"read", "write", "delete", "alter"},
    "describe-configs": {"alter-configs"},
}


def names_resource(acl: CreateAcl, resource: Resource) -> bool:
    if acl.resource_type != TYPE_NAMES[resource.type]:
        return False
    if acl.pattern_type == "prefixed":
        return resource.name.startswith(acl.resource)
    return acl.resource in (resource.name, "*")


def is_allowed(
    acls: list[CreateAcl],
    config: AclAuthorizerConfig,
    context: RequestContext,
    operation: Operation,
    resource: Resource,
) -> bool:
    principal, host = str(context.principal), context.client_host.removeprefix("::ffff:")
    if principal in config.super_users:
        return True
    of_resource = [acl for acl in acls if names_resource(acl, resource)]
    if not of_resource:
        return config.allow_everyone_if_no_acl
    of_client = [acl for acl in of_resource if acl.principal in (principal, "User:*") and acl.host in (host, "*")]
    wanted = OPERATION_NAMES[operation]
    if any(acl.permission == "deny" and acl.operation in (wanted, "all") for acl in of_client):
        return False
    allowing = {wanted, "all"} | IMPLIED.get(wanted, set())
    return any(acl.permission == "allow" and acl.operation in allowing for acl in of_client)


@pytest.mark.requirement("a:K-13", "a:K-14", "a:K-16", "a:X3-55", "b:M-08")
@given(
    versions=st.lists(ACLS, min_size=1, max_size=3),
    config=CONFIGS,
    context=CONTEXTS,
    asked=st.lists(
        st.tuples(st.sampled_from(Operation), st.builds(Resource, st.sampled_from(KINDS), st.sampled_from(ALL_NAMES))),
        min_size=1,
        max_size=6,
    ),
)
def test_decisions_are_those_of_an_evaluator_without_index_and_cache(
    versions: list[list[CreateAcl]],
    config: AclAuthorizerConfig,
    context: RequestContext,
    asked: list[tuple[Operation, Resource]],
) -> None:
    stored: dict[UUID, CreateAcl] = {}
    authorizer = AclAuthorizer(lambda: stored, config)
    for acls in versions:
        stored = {UUID(int=number): acl for number, acl in enumerate(acls)}
        for operation, resource in (*asked, *asked):
            expected = is_allowed(acls, config, context, operation, resource)
            assert authorizer.authorize(context, operation, resource) is expected


@pytest.mark.requirement("a:K-14")
@given(acls=ACLS, config=CONFIGS, context=CONTEXTS, operation=st.sampled_from(Operation), kind=st.sampled_from(KINDS))
def test_the_right_to_any_resource_is_that_to_one_that_may_exist(
    acls: list[CreateAcl],
    config: AclAuthorizerConfig,
    context: RequestContext,
    operation: Operation,
    kind: ResourceType,
) -> None:
    authorizer = AclAuthorizer(lambda: {UUID(int=number): acl for number, acl in enumerate(acls)}, config)
    expected = any(is_allowed(acls, config, context, operation, Resource(kind, name)) for name in (*ALL_NAMES, "*c"))
    assert authorizer.authorize_any(context, operation, kind) is expected
