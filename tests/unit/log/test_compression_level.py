"""A log compresses at the level that its topic is set to."""

from dataclasses import replace
from random import Random

import pytest
from support.logs.single_log import SMALL, batch

from tidelog.log.admission import inspect_records, record_rules
from tidelog.log.batch import Codec, check_batch, decode


@pytest.mark.parametrize(("codec", "fast", "thorough"), [(Codec.GZIP, 1, 9), (Codec.LZ4, 1, 12), (Codec.ZSTD, -9, 19)])
def test_log_compresses_at_the_level_of_its_topic(codec: Codec, fast: int, thorough: int) -> None:
    value = bytes(Random(1).choices(b"abcdefgh        ", k=20_000))
    sizes = []
    for level in (fast, thorough):
        config = replace(SMALL, compression=codec, compression_level=level, message_bytes_max=1 << 20)
        stored = inspect_records(batch(5, value=value), record_rules(config))
        assert stored is not None
        assert check_batch(stored, size_max=1 << 20).codec is codec
        assert [one.value for one in decode(stored, decompressed_bytes_max=1 << 20)] == [value] * 5
        sizes.append(len(stored))
    assert sizes[0] > 1.05 * sizes[1]
