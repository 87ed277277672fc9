"""SASL requests on a plaintext listener: ILLEGAL_SASL_STATE, as Kafka responds.

A client reports such a response; after a closed connection it would connect again and again.
"""

from __future__ import annotations

from tidelog.model.admin_errors import IllegalSaslStateError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code_of, message_of
from tidelog.rpc.kafka.messages import security as messages
from tidelog.rpc.kafka.services import Context

_PLAINTEXT = IllegalSaslStateError("this listener does not authenticate: use security.protocol=PLAINTEXT")


async def sasl_handshake(_request: messages.SaslHandshakeRequest, _context: Context) -> messages.SaslHandshakeResponse:
    return messages.SaslHandshakeResponse(error_code=code_of(_PLAINTEXT))


async def sasl_authenticate(
    _request: messages.SaslAuthenticateRequest, _context: Context
) -> messages.SaslAuthenticateResponse:
    return messages.SaslAuthenticateResponse(error_code=code_of(_PLAINTEXT), error_message=message_of(_PLAINTEXT))


HANDLERS: dict[int, Entry] = {
    apis.SASL_HANDSHAKE.key: Entry(sasl_handshake),
    apis.SASL_AUTHENTICATE.key: Entry(sasl_authenticate),
}
