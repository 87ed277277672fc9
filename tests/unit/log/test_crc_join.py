"""Joining CRCs: the CRC of a file from those of its batches, compiled and interpreted."""

import random
from typing import Any

import pytest
from crc32c import crc32c
from support.logs.record_codecs import KERNELS
from support.logs.single_log import Lab, batch, open_log, stamped

from tidelog.log import log_appender
from tidelog.log.config import LogConfig
from tidelog.world.simulated import SimNode, SimWorld

SIZES = [0, 1, 2, 3, 255, 256, 257, 4095, 65_535, 65_536, 65_537, (1 << 20) + 7, (1 << 24) - 1]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "compiled" if kernel.COMPILED else "source")
def test_two_crcs_join_to_that_of_both_pieces(kernel: Any) -> None:
    draw = random.Random(3)
    for size in SIZES:
        for head in (b"", b"\0", draw.randbytes(draw.randrange(1, 500))):
            tail = draw.randbytes(size)
            assert kernel.crc_join(crc32c(head), crc32c(tail), size) == crc32c(head + tail), size
    for size in (-1, 1 << 24):
        with pytest.raises(OverflowError):
            kernel.crc_join(1, 2, size)


@pytest.mark.parametrize("join_from", [0, 16 << 10, 1 << 30])
def test_the_crc_of_a_sealed_segment_is_that_of_its_file(join_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and large ones, from clients and from a leader, one and several in a call."""
    monkeypatch.setattr(log_appender, "JOIN_BYTES_MIN", join_from)

    async def main(node: SimNode) -> None:
        log = await open_log(node, LogConfig(index_interval_bytes=4096))
        for size in (10, 30_000, 70_000):
            data = batch(3, value=b"x" * (size // 3))
            log.append(data, leader_epoch=1)
            log.append(data + batch(1, value=b"y" * size), leader_epoch=1)
            first = stamped(data, base_offset=log.end_offset, leader_epoch=1)
            log.append_replicated(first + stamped(data, base_offset=log.end_offset + 3, leader_epoch=1))
            log.roll()
        for info in log.sealed_segments():
            assert info.crc == crc32c(node.machine.disk().raw(log.segments.file_path(info.base_offset)))
            assert (await log.scrub(info.base_offset)).fault is None
        assert len(log.sealed_segments()) == 3

    with SimWorld(1) as world:
        Lab(world).run(main)
