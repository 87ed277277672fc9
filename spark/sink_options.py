"""The options of the sink. Names come in lower case, whatever the user wrote.

topic                 where rows go; without it there has to be a column of this name
includeheaders        false: leave out the column `headers`
delivery              at-least-once; what else there is will come with transactions
any of the producer's `bootstrap.servers`, `compression.type`, ...; also as `kafka.*` and `client.*`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.client.errors import OptionError
from tidelog.client.names import ProducerOptions, read_options

SPARKS = ("checkpointlocation", "queryname", "outputmode")
"""What Spark hands on of its own."""
BATCH_SIZE = 512 << 10
"""Rows come by ten thousands: larger batches than those of a program that sends one by one."""
NOT_HERE = {
    "key.serializer": "cast the column instead",
    "value.serializer": "cast the column instead",
    "interceptor.classes": "a task has none",
    "interceptors": "a task has none",
    "on_delivery": "a task waits for all of its rows",
    "path": "a topic is no path: give the option topic",
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    topic: str | None
    has_headers: bool
    producer: tuple[tuple[str, str], ...]
    """Checked, and as text: it goes to the tasks, and it names the producer that a worker keeps."""

    @property
    def bootstrap(self) -> str:
        return ",".join(read_options(ProducerOptions, dict(self.producer), {}).bootstrap)


def read_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Raises OptionError with everything that is wrong, in one line."""
    errors: list[str] = []
    own: dict[str, str] = {}
    producer: dict[str, str] = {}
    for spelling, value in given.items():
        name = spelling.lower()
        if name in SPARKS:
            continue
        if name in ("topic", "includeheaders", "delivery"):
            own[name] = value
            continue
        name = name.removeprefix("kafka.")
        if name != "client.id":
            name = name.removeprefix("client.")
        if name in NOT_HERE:
            errors.append(f"{spelling}: {NOT_HERE[name]}")
        elif name in ("acks", "request.required.acks") and str(value).lower() not in ("all", "-1"):
            errors.append(f"{spelling}={value}: the sink stores every row at least once, and that takes acks=all")
        elif producer.get(name, value) != value:
            errors.append(f"{spelling}: given twice, with two values")
        else:
            producer[name] = value
    topic = own.get("topic")
    if topic is not None and not topic.strip():
        errors.append("topic: the name of a topic, not nothing")
    has_headers = own.get("includeheaders", "true").lower()
    if has_headers not in ("true", "false"):
        errors.append(f"includeHeaders={own['includeheaders']}: true or false")
    delivery = own.get("delivery", "at-least-once").lower().replace("_", "-")
    if delivery == "exactly-once":
        errors.append("delivery=exactly-once: there are no transactions yet, give at-least-once")
    elif delivery != "at-least-once":
        errors.append(f"delivery={own['delivery']}: at-least-once")
    try:
        read_options(ProducerOptions, producer, {})
    except OptionError as error:
        errors.append(str(error).replace("bootstrap='host:", "the option bootstrap.servers='host:"))
    if errors:
        raise OptionError("; ".join(errors))
    return SinkOptions(topic, has_headers == "true", tuple(sorted(producer.items())))


def producer_options(options: SinkOptions) -> dict[str, str]:
    """What `Producer` is made with."""
    given = dict(options.producer)
    return given if {"batch.size", "batch_size"} & set(given) else {**given, "batch.size": str(BATCH_SIZE)}
