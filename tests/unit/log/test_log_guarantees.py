"""The guarantees of the source documents for a partition's log, one by one."""

import pytest
from support.logs.single_log import PATH, batch, open_log, read_all, stamped

from tidelog.log.batch import Codec, Record, decode, encode
from tidelog.log.segment import LOG
from tidelog.world.simulated import SimNode

MIB = 1 << 20


@pytest.mark.requirement("b:B-15", "b:A-03")
async def test_appends_never_change_stored_batches(node: SimNode) -> None:
    log = await open_log(node)
    disk = node.disk()
    seen: dict[str, bytes] = {}
    for number in range(12):
        log.append(batch(3, value=b"%d" % number * 40, key=None), leader_epoch=number)
        for name in disk.list(PATH):
            if name.endswith(LOG):
                file = disk.open(f"{PATH}/{name}")
                data = file.read(0, file.size)
                file.close()
                assert data.startswith(seen.get(name, b"")), f"{name} was changed and not only continued"
                seen[name] = data
    assert len(seen) > 1, "more than one segment was written"


@pytest.mark.requirement("b:A-05")
async def test_null_keys_and_null_values_are_kept_as_such(node: SimNode) -> None:
    log = await open_log(node)
    records = [Record(0, 1, None, b"v", ()), Record(1, 1, b"k", None, ()), Record(2, 1, None, None, ())]
    log.append(encode(records), leader_epoch=0)
    [data] = await read_all(log)
    found = decode(data, decompressed_bytes_max=MIB)
    assert [(record.key, record.value) for record in found] == [(None, b"v"), (b"k", None), (None, None)]


@pytest.mark.requirement("a:A-05", "a:A-70", "a:V-04", "b:A-07", "b:B-51")
@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
async def test_a_batch_is_compressed_once_by_its_producer_and_stored_and_read_as_it_came(
    node: SimNode, codec: Codec
) -> None:
    log = await open_log(node)
    sent = batch(50, value=b"a value that compresses well " * 4, codec=codec)
    plain = batch(50, value=b"a value that compresses well " * 4)
    assert len(sent) < len(plain) / 2
    log.append(sent, leader_epoch=4)
    assert log.size == len(sent), "the whole batch stands in one partition's file, as small as it came"
    assert await read_all(log) == [stamped(sent, base_offset=0, leader_epoch=4)]
