"""Detects the protocol of a connection by its first bytes. Pure.

client                      "PRI * HTTP/2.0"           HTTP/2: gRPC
                            "GET /... HTTP/1.1"        HTTP
                            16 03 0x                   TLS: a hello
                            00 0x xx xx 00 kk 00 vv    Kafka: size, API key and version of a request
server, to a gRPC client    00 xx xx 04 00             HTTP/2: a SETTINGS frame
                            "... this port is for ..." another listener of a node (`hint_in`)
                            "HTTP/1.1 400 ..."         HTTP
                            15 03 0x or 16 03 0x       TLS: an alert, or a hello
                            nothing, and closes        unknown; Kafka does so
"""

from __future__ import annotations

import re
from enum import Enum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
KNOWN_BYTES = 8
"""Bytes that distinguish all protocols."""
_METHOD = re.compile(rb"[A-Z]{3,7}(?: |$)")
_TLS_HELLO, _TLS_ALERT = 0x16, 0x15
_KAFKA = Struct(">ihh")
_KAFKA_BYTES_MAX = 128 << 20
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 20
_SETTINGS, _GOAWAY = 4, 7
_NO_ERROR = 0
_GOAWAY_BODY = Struct(">II")
_PREFIX = "this port is "
_HINT = re.compile(rf"{_PREFIX}(for [\w .,:/'-]{{1,200}})")


class WireProtocol(Enum):
    """Values are for messages."""

    GRPC = "gRPC (HTTP/2)"
    HTTP = "HTTP"
    TLS = "TLS"
    KAFKA = "Kafka's protocol"
    UNKNOWN = "something unknown"


def wrong_protocol(clients: str, hint: str) -> str:
    """Says to clients of another protocol which port this is; `hint_in` finds it in an error."""
    return f"{_PREFIX}for {clients}: {hint}"


def hint_in(text: str) -> str | None:
    """Returns 'for ...: ...' of `wrong_protocol`."""
    match = _HINT.search(text)
    return None if match is None else match[1].rstrip()


def http_response(text: str) -> bytes:
    """For a client that sends HTTP/1."""
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def http2_response(text: str) -> bytes:
    """For a client that sends HTTP/2: a GOAWAY with the text, which gRPC's libraries show.

    Error 0: others make gRPC write to stderr, or abort its process (13). The sender reads on until the client closes:
    a reset would drop the text.

        00 00 00 | 04 | 00 | 00 00 00 00                                        SETTINGS, which comes first
        size     | 07 | 00 | 00 00 00 00 | last stream 0 | error 0 | the text   GOAWAY
    """
    body = _GOAWAY_BODY.pack(0, _NO_ERROR) + text.encode()
    return EMPTY_SETTINGS + len(body).to_bytes(3, "big") + bytes((_GOAWAY, 0, 0, 0, 0, 0)) + body


def of_client(data: bytes) -> WireProtocol:
    """Detects the protocol of a client by its first `KNOWN_BYTES` bytes."""
    if data[:KNOWN_BYTES] == PREFACE[: len(data[:KNOWN_BYTES])] and len(data) >= 4:
        return WireProtocol.GRPC
    if _is_tls(data, _TLS_HELLO):
        return WireProtocol.TLS
    if _METHOD.match(data[:KNOWN_BYTES]) is not None:
        return WireProtocol.HTTP
    if len(data) >= _KAFKA.size:
        size, key, version = _KAFKA.unpack_from(data)
        if 8 <= size <= _KAFKA_BYTES_MAX and 0 <= key <= _KAFKA_KEY_MAX and 0 <= version <= _KAFKA_VERSION_MAX:
            return WireProtocol.KAFKA
    return WireProtocol.UNKNOWN


def of_server(data: bytes) -> WireProtocol:
    """Detects the protocol of a server by its first bytes to a gRPC client."""
    if data.startswith(b"HTTP/1."):
        return WireProtocol.HTTP
    if _is_tls(data, _TLS_ALERT) or _is_tls(data, _TLS_HELLO):
        return WireProtocol.TLS
    if len(data) >= 5 and data[0] == 0 and data[3] == _SETTINGS and data[4] == 0:
        return WireProtocol.GRPC
    return WireProtocol.UNKNOWN


def _is_tls(data: bytes, kind: int) -> bool:
    return len(data) >= 3 and data[0] == kind and data[1] == 3 and data[2] <= 4
