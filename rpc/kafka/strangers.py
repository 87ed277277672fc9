"""Who does not speak Kafka's protocol is known by its first bytes: a log line, an answer to HTTP and gRPC, the end."""

from __future__ import annotations

from tidelog.rpc.first_bytes import Speech, http2_answer, http_answer, of_client, wrong_door
from tidelog.rpc.kafka.shared import Shared

_ANSWERS = {Speech.HTTP: http_answer, Speech.GRPC: http2_answer}


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
    answer = _ANSWERS.get(speech)
    return b"" if answer is None else answer(wrong_door("Kafka clients", where))
