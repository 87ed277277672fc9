"""Rejects clients of other protocols by their first bytes: logs them, answers HTTP and gRPC, and closes."""

from __future__ import annotations

from tidelog.rpc.kafka.shared import Shared
from tidelog.rpc.protocol_sniffing import WireProtocol, http2_response, http_response, of_client, wrong_protocol

_RESPONSES = {WireProtocol.HTTP: http_response, WireProtocol.GRPC: http2_response}


def is_kafka(protocol: WireProtocol) -> bool:
    """An unknown protocol may be Kafka's."""
    return protocol in (WireProtocol.KAFKA, WireProtocol.UNKNOWN)


def reject_protocol(head: bytes, shared: Shared, *, peer: str, port: int) -> bytes | None:
    """Returns None for a Kafka client, else the response to send before closing, perhaps empty."""
    protocol = of_client(head)
    if is_kafka(protocol):
        return None
    name = protocol.name.lower()
    shared.counts.other_protocols[name] = shared.counts.other_protocols.get(name, 0) + 1
    hint = shared.other_ports.get(protocol, "this node has no such port")
    shared.rate_limited_log.warn(
        protocol.name,
        "peer=%s speaks %s on port %d, which is for Kafka clients: %s",
        peer,
        protocol.value,
        port,
        hint,
    )
    response = _RESPONSES.get(protocol)
    return b"" if response is None else response(wrong_protocol("Kafka clients", hint))
