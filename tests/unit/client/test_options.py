"""The typed options of the clients name exactly the options of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal, get_args, get_type_hints

import pytest

from tidelog.client import option_table, options
from tidelog.client.producer.fast_path import RecordMetadata
from tidelog.client.serializers import json, string
from tidelog.log.batch_header import Codec

ONE_VALUE = {"enable_idempotence", "exclude_internal_topics"}
"""Read for programs of other clients, and not in the types."""
KINDS = {
    "addresses": options.Addresses,
    "int": int,
    "float": float,
    "bool": bool,
    "text": str,
    "reset": str,
    "objects": Sequence[object],
    "partitioner": options.Partitioner,
    "assignor": str | Sequence[str],
    "serializer": options.Serializer | None,
    "deserializer": options.Deserializer | None,
    "function": Callable[[Exception | None, RecordMetadata], object] | None,
    "codec": options.Compression,
    "choice": options.Isolation,
    "acks": Literal["all", -1, 0, 1],
}


@pytest.mark.parametrize(
    ("typed", "table"),
    [
        (options.CommonOptions, option_table.CommonConfig),
        (options.ProducerOptions, option_table.ProducerConfig),
        (options.ConsumerOptions, option_table.ConsumerConfig),
        (options.AdminOptions, option_table.AdminConfig),
    ],
)
def test_typed_options_are_those_of_the_table(typed: type, table: type[option_table.CommonConfig]) -> None:
    expected = {}
    for option in fields(table):
        if option.name in ONE_VALUE:
            continue
        kind = KINDS[option.metadata["kind"]]
        if option.default is None and type(None) not in get_args(kind):
            kind = kind | None
        expected[option.name] = expected[option.metadata["spellings"][0].replace(".", "_")] = kind
    assert get_type_hints(typed, localns={"RecordMetadata": RecordMetadata}) == expected


def test_literal_options_name_every_choice() -> None:
    assert set(get_args(options.Compression)) == {codec.name.lower() for codec in Codec}
    choices = {option.name: option.metadata["choices"] for option in fields(option_table.ConsumerConfig)}
    assert get_args(options.Isolation) == choices["isolation"]
    for name in get_args(options.SerializerName):
        read = option_table.read_options(
            option_table.ProducerConfig, "localhost", options.ProducerOptions(value_serializer=name)
        )
        assert read.value_serializer is not None


def test_options_of_the_types_are_read() -> None:
    typed: options.ConsumerOptions = {"bootstrap": ["a", "b:1"], "group_id": "g", "value_deserializer": json}
    read = option_table.read_options(option_table.ConsumerConfig, None, typed)
    assert (read.bootstrap, read.group) == (("a:9292", "b:1"), "g")
    deserializer: object = read.value_deserializer
    assert deserializer is json
    produced: options.ProducerOptions = {"bootstrap": "a", "acks": 1, "compression": "zstd", "key_serializer": string}
    assert option_table.read_options(option_table.ProducerConfig, None, produced).compression is Codec.ZSTD
