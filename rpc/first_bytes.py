"""Who speaks, by the first bytes of a connection. Pure.

A client that begins with   "PRI * HTTP/2.0"           speaks HTTP/2: gRPC
                            "GET /... HTTP/1.1"        HTTP
                            16 03 0x                   TLS: its hello
                            00 0x xx xx 00 kk 00 vv    Kafka: the size of a request, its api key, its version
A server that answers it    00 xx xx 04 00             speaks HTTP/2: a SETTINGS frame
                            "... this port is for ..." is another door of a node, and says so (`told_in`)
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
_SETTINGS, _GOAWAY = 4, 7
_NO_ERROR = 0
_GOAWAY_BODY = Struct(">II")
_SAYS = "this port is "
_TOLD = re.compile(rf"{_SAYS}(for [\w .,:/'-]{{1,200}})")


class Speech(Enum):
    """The values are what to call it in a message."""

    GRPC = "gRPC (HTTP/2)"
    HTTP = "HTTP"
    TLS = "TLS"
    KAFKA = "Kafka's protocol"
    UNKNOWN = "something unknown"


def wrong_door(door: str, where: str) -> str:
    """What a door says to who belongs to another one; `told_in` finds it in what a client got."""
    return f"{_SAYS}for {door}: {where}"


def told_in(text: str) -> str | None:
    """'for ...: ...', as a door of a node has said it."""
    found = _TOLD.search(text)
    return None if found is None else found[1].rstrip()


def http_answer(text: str) -> bytes:
    """For who takes this port for one of HTTP/1."""
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def http2_answer(text: str) -> bytes:
    """For who takes this port for one of gRPC: no stream was begun, and why. gRPC's libraries show the text.

    Error 0, as others make gRPC write to stderr, or abort its process (13). Whoever sends it reads on until the other
    side hangs up: a reset would take the text with it.

        00 00 00 | 04 | 00 | 00 00 00 00                                        SETTINGS, which comes first
        size     | 07 | 00 | 00 00 00 00 | last stream 0 | error 0 | the text   GOAWAY
    """
    body = _GOAWAY_BODY.pack(0, _NO_ERROR) + text.encode()
    return EMPTY_SETTINGS + len(body).to_bytes(3, "big") + bytes((_GOAWAY, 0, 0, 0, 0, 0)) + body


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
