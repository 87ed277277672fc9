"""Every topic config of Kafka is known here; `kafka_topic_configs.tsv` is what Kafka 4.3 itself says of them.

`make interop-jvm` compares that file with Kafka's jars (`tests/jvm/test_topic_configs.py`).
"""

from pathlib import Path

import pytest

from tidelog.log.batch_header import Codec
from tidelog.metadata import configs
from tidelog.metadata.config_table import LONG_MAX, TABLES, Kind, Scope
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import InvalidConfigError
from tidelog.model.maps import Map

ROWS = {
    row[0]: row[1:]
    for row in (
        line.split("\t")
        for line in (Path(__file__).parent / "kafka_topic_configs.tsv").read_text(encoding="utf-8").splitlines()
    )
}
PUBLIC = sorted(name for name, row in ROWS.items() if row[-1] == "public")
TYPES = {
    "BOOLEAN": {Kind.BOOL},
    "DOUBLE": {Kind.FLOAT},
    "INT": {Kind.INT},
    "LONG": {Kind.INT},
    "LIST": {Kind.LIST, Kind.REPLICAS},
    "STRING": {Kind.CHOICE},
}
OTHER_DEFAULTS = {
    "flush.messages": "left to the system, as Kafka's largest number",
    "flush.ms": "left to the system, as Kafka's largest number",
    "min.insync.replicas": "a majority of the replication factor",
}
OURS = {"flush.mode"}
INERT = {
    "local.retention.bytes": "1000",
    "local.retention.ms": "1000",
    "preallocate": "true",
    "remote.log.copy.disable": "true",
    "remote.log.delete.on.disable": "true",
    "remote.storage.enable": "true",
}


def test_every_topic_config_of_kafka_is_in_the_table() -> None:
    assert [name for name, row in ROWS.items() if row[-1] == "internal"] == ["internal.segment.bytes"]
    assert set(TABLES[Scope.TOPIC]) == {*PUBLIC, *OURS}


@pytest.mark.parametrize("name", PUBLIC)
def test_config_has_the_type_default_and_cluster_wide_key_of_kafka(name: str) -> None:
    kind, default, _, server, _ = ROWS[name]
    row = TABLES[Scope.TOPIC][name]
    assert row.kind in TYPES[kind]
    assert [key for key, _ in row.server][:1] == ([] if server == "-" else [server])
    if name in OTHER_DEFAULTS:
        assert row.default is None
    else:
        assert configs.as_text(row.default) == default.strip("[]")


@pytest.mark.parametrize("name", PUBLIC)
def test_config_accepts_the_least_value_that_kafka_accepts(name: str) -> None:
    _, default, validator, _, _ = ROWS[name]
    if name not in INERT:
        if validator.startswith("[") and ",..." in validator and not validator.startswith("[partitionId"):
            least = validator[1:].partition(",")[0]
            assert configs.check(Scope.TOPIC, name, least) is not None
            most = validator.partition("...,")[2].partition("]")[0]
            if most:
                assert configs.check(Scope.TOPIC, name, most) is not None
        elif validator.startswith("[") and not validator.startswith("[partitionId"):
            for value in validator.strip("[]").split(", "):
                assert configs.check(Scope.TOPIC, name, value) is not None
    if default.strip("[]") and default != str(LONG_MAX):
        assert configs.check(Scope.TOPIC, name, default.strip("[]")) is not None


@pytest.mark.parametrize(("name", "other"), INERT.items())
def test_config_without_a_meaning_is_accepted_at_its_default_and_refused_otherwise(name: str, other: str) -> None:
    row = TABLES[Scope.TOPIC][name]
    default = configs.as_text(row.default)
    assert configs.check(Scope.TOPIC, name, default) == row.default
    with pytest.raises(InvalidConfigError, match=rf"{name}='{other}': only {default}; .*(tiered|advance)"):
        configs.check(Scope.TOPIC, name, other)
    with pytest.raises(InvalidConfigError, match="soon"):
        configs.check(Scope.TOPIC, name, "soon")
    for server, _ in row.server:
        assert configs.check(Scope.CLUSTER, server, default) == row.default
        with pytest.raises(InvalidConfigError, match="only"):
            configs.check(Scope.CLUSTER, server, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compression.gzip.level", "0"),
        ("compression.gzip.level", "10"),
        ("compression.gzip.level", "-2"),
        ("compression.lz4.level", "0"),
        ("compression.lz4.level", "18"),
        ("compression.zstd.level", "23"),
        ("compression.zstd.level", "-131073"),
    ],
)
def test_level_outside_of_the_range_of_its_codec_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name}='{value}': an integer from"):
        configs.check(Scope.TOPIC, name, value)


@pytest.mark.parametrize(
    ("settings", "codec", "level"),
    [
        ({}, None, None),
        ({"compression.gzip.level": "9"}, None, None),
        ({"compression.type": "gzip"}, Codec.GZIP, None),
        ({"compression.type": "gzip", "compression.gzip.level": "9", "compression.zstd.level": "5"}, Codec.GZIP, 9),
        ({"compression.type": "lz4"}, Codec.LZ4, None),
        ({"compression.type": "lz4", "compression.lz4.level": "17"}, Codec.LZ4, 17),
        ({"compression.type": "zstd"}, Codec.ZSTD, 3),
        ({"compression.type": "zstd", "compression.zstd.level": "-5"}, Codec.ZSTD, -5),
        ({"compression.type": "snappy", "compression.zstd.level": "5"}, Codec.SNAPPY, None),
    ],
)
def test_log_compresses_at_the_level_of_its_codec(
    settings: dict[str, str], codec: Codec | None, level: int | None
) -> None:
    image = ClusterImage(configs=Map({("topic", "t"): Map(settings)}))
    config = configs.log_config(image, "t")
    assert (config.compression, config.compression_level) == (codec, level)
