"""`tidelog log dump --offsets-decoder`: records of groups in readable form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import UUID

import pytest

from tidelog.cli import main as cli
from tidelog.coordinator.records import (
    ClassicMember,
    ClassicValue,
    CurrentValue,
    GroupRecord,
    GroupValue,
    Key,
    Kind,
    MemberValue,
    OffsetValue,
    TargetValue,
    classic_key,
    decision,
    encode_batch,
    group_key,
    member_key,
    offset_key,
)
from tidelog.log.batch import Record, encode
from tidelog.model.ids import PartitionId, TopicId

TOPIC = TopicId(UUID(int=42))
PLACE = PartitionId(TOPIC, 3)
SEGMENT = f"{0:020d}.log"
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
RECORDS = [
    GroupRecord(offset_key("billing", PLACE), OffsetValue(offset=7, leader_epoch=2, metadata="half", commit_ms=1_000)),
    GroupRecord(offset_key("gone", PLACE), None),
    GroupRecord(group_key("billing"), GroupValue(epoch=5)),
    GroupRecord(member_key(Kind.MEMBER, "billing", "m"), MemberValue(client_id="app", topics=("orders",))),
    GroupRecord(member_key(Kind.TARGET, "billing", "m"), TargetValue(partitions=frozenset({PLACE}))),
    GroupRecord(member_key(Kind.CURRENT, "billing", "m"), CurrentValue(epoch=5, assigned=frozenset({PLACE}))),
    GroupRecord(
        classic_key("old"),
        ClassicValue(generation=4, protocol="range", members=(ClassicMember("m", metadata=b"\xff"),)),
    ),
    GroupRecord(Key(Kind.NOTHING), None),
]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / SEGMENT
    strange = encode([Record(0, 1_000, b"no key of a group", b"x", ())])
    path.write_bytes(encode_batch([decision(RECORDS, now_ms=1_000)]) + strange)
    return path


def test_json_has_the_fields_of_keys_and_values(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["log", "dump", str(segment), "--offsets-decoder", "--output", "json"])
    document = json.loads(capsys.readouterr().out)
    first, second = document["logs"][0]["files"][0]["batches"]
    rows = [row["group"] for row in first["records"]]
    topic = str(TOPIC)
    assert rows[0] == {
        "kind": "offset",
        "group": "billing",
        "topic_id": topic,
        "partition": 3,
        "value": {"offset": 7, "leader_epoch": 2, "metadata": "half", "commit_ms": 1_000, "order": 0},
    }
    assert (rows[1]["group"], rows[1]["value"]) == ("gone", None), "a tombstone"
    assert (rows[2]["kind"], rows[2]["value"]["epoch"]) == ("group", 5)
    assert (rows[3]["member_id"], rows[3]["value"]["topics"]) == ("m", ["orders"])
    assert rows[4]["value"] == {"partitions": {topic: [3]}}
    assert rows[5]["value"]["assigned"] == {topic: [3]}
    assert rows[6]["value"]["members"][0]["metadata"] == "/w=="
    assert rows[7] is None, "an entry that means nothing"
    assert [row["group"] for row in second["records"]] == [None]
    documented = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    assert "logs[].files[].batches[].records[].group" in documented


def test_table_has_pairs_of_names_and_values(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["log", "dump", str(segment), "--offsets-decoder"])
    shown = capsys.readouterr().out
    assert f"offset group=billing topic_id={TOPIC} partition=3" in shown
    assert "offset=7 leader_epoch=2 metadata=half commit_ms=1000" in shown
    assert "no key of a group" in shown
    cli.main(["log", "dump", str(segment), "--records"])
    assert "group=billing" not in capsys.readouterr().out
