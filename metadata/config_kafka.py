"""Kafka's topic keys beside those of the log: compression levels, and keys without effect here. Pure.

A key without effect accepts the values that change nothing and shows its default; any other value is rejected with the
reason. So tools that copy topic configs from Kafka (MirrorMaker 2) can create topics, and no config is silently
ignored.
"""

from tidelog.metadata.config_kinds import Definition, Kind, topic_int, topic_key

LZ4_FAST = 9
"""The default of `compression.lz4.level`. As in Kafka, it selects the fast compressor, not level 9."""
GZIP_DEFAULT = -1

COMPRESSION_LEVEL_KEYS: tuple[Definition, ...] = (
    topic_int(
        "compression.gzip.level",
        GZIP_DEFAULT,
        "The level at which a broker compresses with gzip, where compression.type is gzip and a producer chose another "
        "codec; -1 is the codec's own default.",
        "compression.gzip.level",
        least=1,
        most=9,
        also=(GZIP_DEFAULT,),
    ),
    topic_int(
        "compression.lz4.level",
        LZ4_FAST,
        "The level at which a broker compresses with lz4, where compression.type is lz4 and a producer chose another "
        "codec. 9 is the fast compressor, all others choose the high compression of lz4; from 12 on they are alike.",
        "compression.lz4.level",
        least=1,
        most=17,
    ),
    topic_int(
        "compression.zstd.level",
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
        topic_int(
            f"local.retention.{unit}",
            -2,
            f"Known for Kafka's tools; without tiered storage retention.{unit} alone decides.",
            f"log.local.retention.{unit}",
            least=-2,
            accepted=(-2,),
            rejection=f"{_NOT_TIERED}, and {_RETENTION.format(f'retention.{unit}')}",
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
        rejection="files of segments are not allocated in advance here, they grow as records are appended",
    ),
    *(
        topic_key(
            name,
            Kind.BOOL,
            False,
            "Known for Kafka's tools; there is no tiered storage.",
            accepted=(False,),
            rejection=_NOT_TIERED,
        )
        for name in ("remote.log.copy.disable", "remote.log.delete.on.disable", "remote.storage.enable")
    ),
)
