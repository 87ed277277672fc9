"""SASL and ACL requests on a plaintext listener of a cluster without an authorizer.

The responses are Kafka's: ILLEGAL_SASL_STATE for SASL on a plaintext connection, SECURITY_DISABLED for ACLs. A client
reports such a response; after a closed connection it would connect again and again.
"""

from __future__ import annotations

from tidelog.model.admin_errors import IllegalSaslStateError, SecurityDisabledError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code_of, message_of
from tidelog.rpc.kafka.messages import security as messages
from tidelog.rpc.kafka.services import Context

_PLAINTEXT = IllegalSaslStateError("this listener does not authenticate: use security.protocol=PLAINTEXT")
_NO_AUTHORIZER = SecurityDisabledError(
    "no authorizer is configured: there are no ACLs, and every client may do everything"
)


async def sasl_handshake(_request: messages.SaslHandshakeRequest, _context: Context) -> messages.SaslHandshakeResponse:
    return messages.SaslHandshakeResponse(error_code=code_of(_PLAINTEXT))


async def sasl_authenticate(
    _request: messages.SaslAuthenticateRequest, _context: Context
) -> messages.SaslAuthenticateResponse:
    return messages.SaslAuthenticateResponse(error_code=code_of(_PLAINTEXT), error_message=message_of(_PLAINTEXT))


async def describe_acls(_request: messages.DescribeAclsRequest, _context: Context) -> messages.DescribeAclsResponse:
    return messages.DescribeAclsResponse(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))


async def create_acls(request: messages.CreateAclsRequest, _context: Context) -> messages.CreateAclsResponse:
    row = messages.AclCreationResult(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))
    return messages.CreateAclsResponse(results=[row] * len(request.creations))


async def delete_acls(request: messages.DeleteAclsRequest, _context: Context) -> messages.DeleteAclsResponse:
    row = messages.DeleteAclsFilterResult(error_code=code_of(_NO_AUTHORIZER), error_message=message_of(_NO_AUTHORIZER))
    return messages.DeleteAclsResponse(filter_results=[row] * len(request.filters))


HANDLERS: dict[int, Entry] = {
    apis.SASL_HANDSHAKE.key: Entry(sasl_handshake),
    apis.SASL_AUTHENTICATE.key: Entry(sasl_authenticate),
    apis.DESCRIBE_ACLS.key: Entry(describe_acls),
    apis.CREATE_ACLS.key: Entry(create_acls),
    apis.DELETE_ACLS.key: Entry(delete_acls),
}
