"""Topic keys that Kafka has beside those that build our log: compression levels, and keys without a meaning here.

A key without a meaning is accepted at the values that change nothing and shown with its default; any other value is
refused with the reason. So tools that copy a topic's settings from Kafka (MirrorMaker 2) create the topic, and nobody
believes in a setting that does nothing.
"""

from __future__ import annotations

from tidelog.metadata.config_kinds import LONG_MAX, Definition, Kind, topic_key

LZ4_FAST = 9
"""The default of `compression.lz4.level`. As in Kafka, it chooses the fast compressor, not the ninth level."""
GZIP_DEFAULT = -1

COMPRESSION_LEVEL_KEYS: tuple[Definition, ...] = (
    topic_key(
        "compression.gzip.level",
        Kind.INT,
        GZIP_DEFAULT,
        "The level at which a broker compresses with gzip, where compression.type is gzip and a producer chose another "
        "codec; -1 is the codec's own default.",
        "compression.gzip.level",
        least=1,
        most=9,
        also=(GZIP_DEFAULT,),
    ),
    topic_key(
        "compression.lz4.level",
        Kind.INT,
        LZ4_FAST,
        "The level at which a broker compresses with lz4, where compression.type is lz4 and a producer chose another "
        "codec. 9 is the fast compressor, all others choose the high compression of lz4; from 12 on they are alike.",
        "compression.lz4.level",
        least=1,
        most=17,
    ),
    topic_key(
        "compression.zstd.level",
        Kind.INT,
        3,
        "The level at which a broker compresses with zstd, where compression.type is zstd and a producer chose another "
        "codec.",
        "compression.zstd.level",
        least=-131_072,
        most=22,
    ),
)

_NOT_TIERED = "there is no tiered storage here: all records are on the disks of the brokers"
_RETENTION = "-2 stands for the value of {}"

INERT_TOPIC_KEYS: tuple[Definition, ...] = (
    *(
        topic_key(
            f"local.retention.{unit}",
            Kind.INT,
            -2,
            f"Known for Kafka's tools; without tiered storage retention.{unit} alone decides.",
            f"log.local.retention.{unit}",
            least=-2,
            most=LONG_MAX,
            unit=unit,
            accepted=(-2,),
            refusal=f"{_NOT_TIERED}, and {_RETENTION.format(f'retention.{unit}')}",
        )
        for unit in ("bytes", "ms")
    ),
    topic_key(
        "preallocate",
        Kind.BOOL,
        False,
        "Known for Kafka's tools; a segment grows as records are appended.",
        "log.preallocate",
        accepted=(False,),
        refusal="files of segments are not allocated in advance here, they grow as records are appended",
    ),
    *(
        topic_key(
            name,
            Kind.BOOL,
            False,
            "Known for Kafka's tools; there is no tiered storage.",
            accepted=(False,),
            refusal=_NOT_TIERED,
        )
        for name in ("remote.log.copy.disable", "remote.log.delete.on.disable", "remote.storage.enable")
    ),
)
