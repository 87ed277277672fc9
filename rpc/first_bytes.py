"""Who speaks, by the first bytes of a connection. Pure.

A client that begins with   "PRI * HTTP/2.0"           speaks HTTP/2: gRPC
                            "GET /... HTTP/1.1"        HTTP
                            16 03 0x                   TLS: its hello
                            00 0x xx xx 00 kk 00 vv    Kafka: the size of a request, its api key, its version
A server that answers it    00 xx xx 04 00             speaks HTTP/2: a SETTINGS frame
                            "HTTP/1.1 400 ..."         HTTP
                            15 03 0x or 16 03 0x       TLS: an alert, or a hello
                            nothing, and hangs up      may be anything; Kafka does so
"""

from __future__ import annotations

import re
from enum import Enum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
KNOWN_BYTES = 8
"""So many tell all of them apart."""
_METHOD = re.compile(rb"[A-Z]{3,7}(?: |$)")
_TLS_HELLO, _TLS_ALERT = 0x16, 0x15
_KAFKA = Struct(">ihh")
_KAFKA_BYTES_MAX = 128 << 20
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 20
_SETTINGS = 4


class Speech(Enum):
    """The values are what to call it in a message."""

    GRPC = "gRPC (HTTP/2)"
    HTTP = "HTTP"
    TLS = "TLS"
    KAFKA = "Kafka's protocol"
    UNKNOWN = "something unknown"


def of_client(data: bytes) -> Speech:
    """By the first `KNOWN_BYTES` bytes that a client has sent."""
    if data[:KNOWN_BYTES] == PREFACE[: len(data[:KNOWN_BYTES])] and len(data) >= 4:
        return Speech.GRPC
    if _is_tls(data, _TLS_HELLO):
        return Speech.TLS
    if _METHOD.match(data[:KNOWN_BYTES]) is not None:
        return Speech.HTTP
    if len(data) >= _KAFKA.size:
        size, key, version = _KAFKA.unpack_from(data)
        if 8 <= size <= _KAFKA_BYTES_MAX and 0 <= key <= _KAFKA_KEY_MAX and 0 <= version <= _KAFKA_VERSION_MAX:
            return Speech.KAFKA
    return Speech.UNKNOWN


def of_server(data: bytes) -> Speech:
    """By the first bytes that a server has sent to a client that began like gRPC."""
    if data.startswith(b"HTTP/1."):
        return Speech.HTTP
    if _is_tls(data, _TLS_ALERT) or _is_tls(data, _TLS_HELLO):
        return Speech.TLS
    if len(data) >= 5 and data[0] == 0 and data[3] == _SETTINGS and data[4] == 0:
        return Speech.GRPC
    return Speech.UNKNOWN


def _is_tls(data: bytes, kind: int) -> bool:
    return len(data) >= 3 and data[0] == kind and data[1] == 3 and data[2] <= 4
