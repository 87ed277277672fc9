"""The options of the sink. Names arrive in lower case.

topic                 target topic; without it the rows need a column `topic`
includeheaders        false: ignore the column `headers`
delivery              at-least-once; exactly-once needs transactions
any of the producer's `bootstrap.servers`, `compression.type`, ...; also as `kafka.*` and `client.*`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.client.errors import OptionError
from tidelog.client.option_table import ProducerConfig, read_options

SPARKS = ("checkpointlocation", "queryname", "outputmode")
"""Options that Spark passes through."""
BATCH_SIZE = 512 << 10
"""Batch size in bytes: Spark delivers ten thousands of rows at once, so batches are larger than the producer's
default."""
UNSUPPORTED = {
    "key.serializer": "cast the column instead",
    "value.serializer": "cast the column instead",
    "interceptor.classes": "interceptors are not supported by the sink",
    "interceptors": "interceptors are not supported by the sink",
    "on_delivery": "a task waits for all of its rows",
    "transactional.id": "the sink does not write in transactions yet: leave it out",
    "transactional_id": "the sink does not write in transactions yet: leave it out",
    "path": "save() takes no path: set the option topic",
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    topic: str | None
    has_headers: bool
    producer: tuple[tuple[str, str], ...]
    """Checked, as text: tasks receive it, and it keys the producers that a worker caches."""

    @property
    def bootstrap(self) -> str:
        return ",".join(read_options(ProducerConfig, dict(self.producer), {}).bootstrap)


def read_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Parse the options. Raises OptionError with all errors in one line."""
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
        if name in UNSUPPORTED:
            errors.append(f"{spelling}: {UNSUPPORTED[name]}")
        elif name in ("acks", "request.required.acks") and str(value).lower() not in ("all", "-1"):
            errors.append(f"{spelling}={value}: the sink stores every row at least once, and that takes acks=all")
        elif producer.get(name, value) != value:
            errors.append(f"{spelling}: given twice, with two values")
        else:
            producer[name] = value
    topic = own.get("topic")
    if topic is not None and not topic.strip():
        errors.append("topic is empty: set the name of a topic")
    has_headers = own.get("includeheaders", "true").lower()
    if has_headers not in ("true", "false"):
        errors.append(f"includeHeaders={own['includeheaders']}: true or false")
    delivery = own.get("delivery", "at-least-once").lower().replace("_", "-")
    if delivery == "exactly-once":
        errors.append("delivery=exactly-once: the sink does not write in transactions yet: use at-least-once")
    elif delivery != "at-least-once":
        errors.append(f"delivery={own['delivery']}: at-least-once")
    try:
        read_options(ProducerConfig, producer, {})
    except OptionError as error:
        errors.append(str(error).replace("bootstrap='host:", "bootstrap.servers='host:"))
    if errors:
        raise OptionError("; ".join(errors))
    return SinkOptions(topic, has_headers == "true", tuple(sorted(producer.items())))


def producer_options(options: SinkOptions) -> dict[str, str]:
    """Return the options for `Producer`."""
    given = dict(options.producer)
    return given if {"batch.size", "batch_size"} & set(given) else {**given, "batch.size": str(BATCH_SIZE)}
