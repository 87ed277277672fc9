"""Kafka's own `kafka-dump-log` reads our segments and indexes, of running nodes and of a stopped one."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from kafka_tools import Tools, needs_tools

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(300), needs_tools]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = 2_000
"""Of each codec."""
NO_COMPLAINT = re.compile(r"Non-consecutive offsets in \S+/0*(\d+)\.log\n +-1 is followed by \1\n")
"""What it says to stderr of any segment but the first: it begins to count at 0 in each."""


@pytest.fixture(scope="module")
def tools(tidelog_cluster: LocalCluster) -> Tools:
    """With a topic of several segments: the records of each codec, one with key and headers, and one null."""
    tools = Tools(tidelog_cluster.kafka_bootstrap)
    tools.create("dumped", segment_bytes="1048576")
    for codec in CODECS:
        tools.run(
            *("kafka-producer-perf-test", "--topic", "dumped", "--throughput", "-1"),
            *("--num-records", str(RECORDS), "--record-size", "500"),
            *("--command-property", "acks=all", f"compression.type={codec}"),
        )
    properties = ("parse.key=true", "key.separator=:", "parse.headers=true", "headers.delimiter=|", "null.marker=NULL")
    tools.run(
        *("kafka-console-producer", "--topic", "dumped"),
        *(word for one in properties for word in ("--reader-property", one)),
        stdin="first:1,second:2|the key:the value\nfirst:1|gone:NULL\n",
    )
    return tools


def directory(cluster: LocalCluster, number: int) -> Path:
    (found,) = (cluster.path(number) / "data").glob("dumped.*-0")
    return found


def dump(tools: Tools, where: Path, pattern: str, *options: str) -> str:
    files = sorted(where.glob(pattern))
    assert len(files) > 1, "several segments"
    ran = tools.run("kafka-dump-log", "--files", ",".join(map(str, files)), *options)
    assert ran.out.count("Dumping ") == len(files)
    assert NO_COMPLAINT.sub("", ran.err) == ""
    assert "isvalid: false" not in ran.out
    return ran.out


@pytest.mark.requirement("a:N-12", "b:B-25")
def test_every_batch_and_record_of_every_codec_is_printed(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    out = dump(tools, directory(tidelog_cluster, 1), "*.log", "--print-data-log")
    batches = re.findall(r"^baseOffset: (\d+) lastOffset: (\d+) count: (\d+) .* compresscodec: (\w+) ", out, re.M)
    counted: Counter[str] = Counter()
    end = 0
    for first, last, count, codec in batches:
        assert (int(first), int(last)) == (end, end + int(count) - 1), "offsets without gap"
        end += int(count)
        counted[codec] += int(count)
    assert counted == dict.fromkeys(CODECS, RECORDS) | {"none": RECORDS + 2}
    assert out.count("isvalid: true") == len(batches)
    records = re.findall(
        r"^\| offset: (\d+) .* valueSize: 500 sequence: \d+ headerKeys: \[\] payload: \w{500}$", out, re.M
    )
    assert list(map(int, records)) == list(range(end - 2))
    assert re.search(r"headerKeys: \[first,second\] key: the key payload: the value$", out, re.M)
    assert re.search(r"valueSize: -1 .*headerKeys: \[first\] key: gone$", out, re.M)


@pytest.mark.requirement("a:N-12")
def test_the_indexes_agree_with_the_segments_on_every_replica(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    assert tidelog_cluster.stop(3) == 0
    try:
        for number in (1, 2, 3):
            where = directory(tidelog_cluster, number)
            # Entries of each index are compared with the segment beside it.
            out = dump(tools, where, "*.*index")
            assert len(re.findall(r"^offset: \d+ position: \d+$", out, re.M)) > 20
            assert len(re.findall(r"^timestamp: \d+ offset: \d+$", out, re.M)) > 20
            checked = dump(tools, where, "*.*index", "--index-sanity-check")
            assert checked.count("passed sanity check.") == len(list(where.glob("*.*index")))
    finally:
        tidelog_cluster.start(3)


@pytest.mark.requirement("a:N-12")
def test_the_tool_notices_an_index_that_lies_and_a_batch_with_a_flipped_bit(
    tools: Tools, tidelog_cluster: LocalCluster, tmp_path: Path
) -> None:
    copy = tmp_path / "dumped-0"
    shutil.copytree(directory(tidelog_cluster, 1), copy)
    index, log = copy / f"{0:020}.index", copy / f"{0:020}.log"
    entries = bytearray(index.read_bytes())
    entries[3] ^= 1  # The offset of the first entry.
    index.write_bytes(entries)
    assert "Mismatches in" in tools.run("kafka-dump-log", "--files", str(index)).err
    data = bytearray(log.read_bytes())
    data[200] ^= 1  # Inside the first batch's records.
    log.write_bytes(data)
    assert "isvalid: false" in tools.run("kafka-dump-log", "--files", str(log)).out
