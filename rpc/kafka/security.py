"""Requests about users and access rules, on a listener that authenticates nobody and a cluster without an authorizer.

They are answered as Kafka answers them there: SASL is no state that a plaintext connection can be in
(ILLEGAL_SASL_STATE), and access rules are disabled (SECURITY_DISABLED). A client that gets an answer reports it; one
whose connection is closed connects again, and again.
"""

from __future__ import annotations

from tidelog.model.errors import IllegalSaslStateError, SecurityDisabledError
from tidelog.rpc.kafka import messages
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code_of, message_of
from tidelog.rpc.kafka.messages.security import (
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsFilterResult,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.rpc.kafka.services import Context

_PLAINTEXT = IllegalSaslStateError("this listener does not authenticate: use security.protocol=PLAINTEXT")
_NO_AUTHORIZER = SecurityDisabledError("no authorizer is configured: there are no access rules, everybody may do all")


async def sasl_handshake(_request: SaslHandshakeRequest, _context: Context) -> SaslHandshakeResponse:
    return SaslHandshakeResponse(error_code=code_of(_PLAINTEXT))


async def sasl_authenticate(_request: SaslAuthenticateRequest, _context: Context) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(error_code=code_of(_PLAINTEXT), error_message=message_of(_PLAINTEXT))


async def describe_acls(_request: DescribeAclsRequest, _context: Context) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))


async def create_acls(request: CreateAclsRequest, _context: Context) -> CreateAclsResponse:
    row = AclCreationResult(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))
    return CreateAclsResponse(results=[row] * len(request.creations))


async def delete_acls(request: DeleteAclsRequest, _context: Context) -> DeleteAclsResponse:
    row = DeleteAclsFilterResult(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))
    return DeleteAclsResponse(filter_results=[row] * len(request.filters))


HANDLERS: dict[int, Entry] = {
    messages.SASL_HANDSHAKE.key: Entry(sasl_handshake),
    messages.SASL_AUTHENTICATE.key: Entry(sasl_authenticate),
    messages.DESCRIBE_ACLS.key: Entry(describe_acls),
    messages.CREATE_ACLS.key: Entry(create_acls),
    messages.DELETE_ACLS.key: Entry(delete_acls),
}
