"""Who does not speak Kafka's protocol is known by its first bytes: one log line, an answer to HTTP, and the end."""

from __future__ import annotations

from tidelog.rpc.first_bytes import Speech, of_client
from tidelog.rpc.kafka.shared import Shared


def is_kafka(speech: Speech) -> bool:
    """As far as can be told."""
    return speech in (Speech.KAFKA, Speech.UNKNOWN)


def turn_away(head: bytes, shared: Shared, *, peer: str, port: int) -> bytes | None:
    """By the first bytes of a client: None to let it in, else what is said to it before the end, perhaps nothing."""
    speech = of_client(head)
    if is_kafka(speech):
        return None
    name = speech.name.lower()
    shared.counts.strangers[name] = shared.counts.strangers.get(name, 0) + 1
    where = shared.doors.get(speech, "there is no such door here")
    shared.seldom.warn(
        speech.name,
        "peer=%s speaks %s on port %d, which is for Kafka clients: %s",
        peer,
        speech.value,
        port,
        where,
    )
    return http_answer(f"this port is for Kafka clients: {where}\n") if speech is Speech.HTTP else b""


def http_answer(text: str) -> bytes:
    """For who takes this port for one of HTTP."""
    body = text.encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
