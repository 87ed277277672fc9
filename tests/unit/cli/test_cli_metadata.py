"""`tidelog metadata show|dump` on files: of a controller, of a broker, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster, directory

from tidelog.cli import main as cli
from tidelog.metadata.records import SetUser, encode_records
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.tail import encode_entry
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.model.uuids import to_text
from tidelog.raft.entries import encode_entries
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.snapshots import encode_file, file_name
from tidelog.raft.storage import METADATA_LOG_PATH

VOTERS = Membership((Member(NodeId(1), directory(1).bytes, (("CONTROLLER", "c:9192"),)),))
EPOCH = Epoch(3)
SEGMENT = "00000000000000000000.log"
Capture = pytest.CaptureFixture[str]


class Files:
    """The files of a node, as a controller and a broker write them, from the same history."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cluster = Cluster(3)
        self.cluster.made("orders", (0, 1, 2), (1, 2, 0), retention_ms="5000")
        self.half = len(self.cluster.log) + 2
        self.half_image = self.cluster.image
        self.cluster.made("payments", (2, 0, 1))
        self.cluster.log.append(
            encode_records([SetUser(user="u", mechanism="SCRAM-SHA-256", salt=b"s", stored_key=b"k", iterations=4096)])
        )
        first = [Entry(EPOCH, EntryKind.NO_OP, b""), Entry(EPOCH, EntryKind.MEMBERSHIP, VOTERS.encode())]
        self.entries = first + [Entry(EPOCH, EntryKind.DATA, data) for data in self.cluster.log]

    @property
    def segment(self) -> Path:
        return self.path / METADATA_LOG_PATH / SEGMENT

    @property
    def snapshot(self) -> Path:
        return self.path / "raft" / file_name(SnapshotId(Offset(self.half), EPOCH))

    def write_controller(self, *, with_snapshot: bool = True) -> None:
        self.segment.parent.mkdir(parents=True)
        batches = [encode_entries(Offset(n), [entry], now_ms=0)[0] for n, entry in enumerate(self.entries)]
        self.segment.write_bytes(b"".join(batches))
        if with_snapshot:
            self.write_snapshot(self.snapshot)

    def write_snapshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = snapshot_bytes(self.half_image)
        path.write_bytes(b"".join(encode_file(SnapshotId(Offset(self.half), EPOCH), VOTERS, data)))

    def write_broker(self) -> None:
        folder = self.path / "metadata"
        self.write_snapshot(folder / self.snapshot.name)
        frames = [encode_entry(Offset(n), entry) for n, entry in enumerate(self.entries)][self.half :]
        (folder / f"{self.half:020d}.tail").write_bytes(b"".join(frames))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["metadata", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def shown(capsys: Capture, files: Files, path: str = "/", *more: str) -> Any:
    code, out, err = run(capsys, "show", "--data", str(files.path), path, "--output", "json", *more)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert list(document) == ["path", "value", "problems", "stale", "age_ms"]
    return document["value"]


class TestShow:
    @pytest.mark.parametrize("kind", ["controller", "broker"])
    def test_both_copies_show_the_same_state(self, capsys: Capture, files: Files, kind: str) -> None:
        files.write_controller()
        files.write_broker()
        found = shown(capsys, files, "/", "--copy", kind)
        assert list(found) == [
            *("offset", "epoch", "voters", "learners", "features", "brokers", "topics", "configs", "quotas", "users"),
            *("acls", "next_producer_id", "unknown_records"),
        ]
        assert (found["offset"], found["epoch"]) == (len(files.entries), EPOCH)
        assert sorted(found["brokers"]) == ["0", "1", "2"]
        assert sorted(found["topics"]) == ["orders", "payments"]
        assert found["topics"]["orders"]["partitions"]["1"]["replicas"] == [1, 2, 0]
        assert found["topics"]["orders"]["topic_id"] == to_text(files.cluster.image.topic_ids["orders"])
        assert found["configs"]["topic"] == {"orders": {"retention.ms": "5000"}}
        assert found["users"] == [{"user": "u", "mechanism": "SCRAM-SHA-256", "iterations": 4096}]
        assert [voter["node"] for voter in found["voters"]] == [1]

    def test_a_path_leads_to_a_part(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        assert shown(capsys, files, "/topics/orders/0")["leader"] == 0
        assert shown(capsys, files, "/topics/orders/partitions/0")["leader"] == 0
        assert shown(capsys, files, "/brokers/2")["broker"] == 2
        assert shown(capsys, files, "/configs/topic/orders") == {"retention.ms": "5000"}
        assert shown(capsys, files, "/voters/0/endpoints") == {"CONTROLLER": "c:9192"}

    def test_a_path_that_leads_nowhere_is_answered_with_the_nearest(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        code, out, err = run(capsys, "show", "--data", str(files.path), "/topics/ordres")
        assert (code, out) == (1, "")
        assert "/topics has no 'ordres'; did you mean 'orders'?" in err

    def test_tables_for_a_person(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        for path, expected in [
            ("/", ["topics      2", "partitions  3"]),
            ("/topics", ["orders", "payments"]),
            ("/topics/orders", ["  retention.ms: 5000", "1,2,0"]),
            ("/topics/orders/0", ["leader: 0"]),
            ("/brokers", ["host-1:9092"]),
            ("/brokers/1", ["rack: "]),
            ("/features", ["metadata.version: 1"]),
            ("/users", ["SCRAM-SHA-256"]),
            ("/configs/topic", ["orders", "  retention.ms: 5000"]),
            ("/acls", ["-"]),
            ("/offset", [str(len(files.entries))]),
        ]:
            code, out, _ = run(capsys, "show", "--data", str(files.path), path)
            assert code == 0
            assert all(text in out for text in expected), (path, out)

    def test_one_snapshot_file_alone(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        code, out, _ = run(capsys, "show", "--data", str(files.snapshot), "/topics", "--output", "json")
        assert code == 0
        assert list(json.loads(out)["value"]) == ["orders"]


class TestDump:
    def lines(self, capsys: Capture, path: Path, *more: str) -> list[dict[str, Any]]:
        code, out, err = run(capsys, "dump", "--data", str(path), *more)
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]

    def test_every_record_has_its_offset_and_epoch(self, capsys: Capture, files: Files) -> None:
        files.write_controller(with_snapshot=False)
        lines = self.lines(capsys, files.path)
        assert all(list(line) == ["offset", "epoch", "type", "fields", "source"] for line in lines)
        assert [line["offset"] for line in lines] == sorted(line["offset"] for line in lines)
        assert {line["offset"] for line in lines} == set(range(len(files.entries)))
        assert {line["epoch"] for line in lines} == {EPOCH}
        assert [line["type"] for line in lines][:3] == ["BeginEpoch", "Membership", "FeatureLevel"]
        made = [line["fields"] for line in lines if line["type"] == "CreateTopic"]
        assert [row["name"] for row in made] == ["orders", "payments"]
        assert made[0]["topic_id"] == to_text(files.cluster.image.topic_ids["orders"])

    def test_a_brokers_copy_begins_with_its_snapshot(self, capsys: Capture, files: Files) -> None:
        files.write_broker()
        lines = self.lines(capsys, files.path)
        assert lines[0]["source"].endswith(".snapshot")
        assert [line["fields"]["name"] for line in lines if line["type"] == "CreateTopic"] == ["orders", "payments"]

    def test_credentials_are_not_shown(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        (user,) = [line for line in self.lines(capsys, files.segment) if line["type"] == "SetUser"]
        assert user["fields"]["stored_key"] == user["fields"]["salt"] == "(hidden)"


class TestDamage:
    @pytest.mark.case("R19")
    def test_a_damaged_snapshot_is_named_and_left_alone_and_the_log_tells_the_rest(
        self, capsys: Capture, files: Files
    ) -> None:
        files.write_controller()
        data = bytearray(files.snapshot.read_bytes())
        data[len(data) // 2] ^= 1
        files.snapshot.write_bytes(data)
        code, out, err = run(capsys, "show", "--data", str(files.path), "/topics", "--output", "json")
        assert code == 1
        assert sorted(json.loads(out)["value"]) == ["orders", "payments"]
        assert str(files.snapshot) in err
        assert "fails its CRC" in err
        assert files.snapshot.read_bytes() == bytes(data)

    def test_damage_is_named_also_if_the_path_is_not_there(self, capsys: Capture, files: Files) -> None:
        files.write_controller(with_snapshot=False)
        data = bytearray(files.segment.read_bytes())
        data[-1] ^= 1
        files.segment.write_bytes(data)
        code, out, err = run(capsys, "show", "--data", str(files.path), "/users/7")
        assert (code, out) == (1, "")
        assert SEGMENT in err
        assert "/users has no '7'" in err

    @pytest.mark.case("R19")
    def test_a_flipped_bit_in_the_log_is_named_with_its_place(self, capsys: Capture, files: Files) -> None:
        files.write_controller(with_snapshot=False)
        data = bytearray(files.segment.read_bytes())
        data[-3] ^= 1
        files.segment.write_bytes(data)
        code, out, err = run(capsys, "dump", "--data", str(files.path))
        assert code == 1
        assert len({json.loads(line)["offset"] for line in out.splitlines()}) == len(files.entries) - 1
        assert err.startswith(f"tidelog: {SEGMENT}: byte ")

    def test_entries_after_a_hole_are_left_out(self, capsys: Capture, files: Files) -> None:
        files.write_controller(with_snapshot=False)
        batches = [encode_entries(Offset(n), [entry], now_ms=0)[0] for n, entry in enumerate(files.entries)]
        del batches[-3]
        files.segment.write_bytes(b"".join(batches))
        code, _, err = run(capsys, "show", "--data", str(files.path))
        missing = len(files.entries) - 3
        assert code == 1
        assert f"entries {missing} to {missing} are missing; what follows is left out" in err

    def test_a_torn_end_is_what_a_crash_leaves_and_no_problem(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        files.write_broker()
        files.segment.write_bytes(files.segment.read_bytes()[:-5])
        (tail,) = (files.path / "metadata").glob("*.tail")
        tail.write_bytes(tail.read_bytes()[:-5])
        for kind in ("controller", "broker"):
            code, out, err = run(capsys, "show", "--data", str(files.path), "--copy", kind, "/offset")
            assert (code, out.strip()) == (0, str(len(files.entries) - 1))
            assert "torn" in err or "never finished" in err

    def test_a_flipped_bit_in_a_brokers_copy_is_a_problem(self, capsys: Capture, files: Files) -> None:
        files.write_broker()
        (tail,) = (files.path / "metadata").glob("*.tail")
        data = bytearray(tail.read_bytes())
        data[20] ^= 1
        tail.write_bytes(data)
        code, _, err = run(capsys, "show", "--data", str(files.path))
        assert code == 1
        assert f"{tail.name}: byte 0: a frame fails its CRC" in err

    def test_what_was_set_aside_by_the_node_is_named(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        (files.path / "raft" / "x.snapshot.corrupt").write_bytes(b"")
        code, _, err = run(capsys, "show", "--data", str(files.path))
        assert code == 1
        assert "was set aside as damaged" in err


class TestWrongCalls:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["show", "--data", "{path}"], "no metadata here"),
            (["show", "--data", "{path}", "--bootstrap", "h:1"], "use one of them"),
            (["dump", "--data", "{path}/letter.txt"], "not a file of metadata"),
        ],
    )
    def test_they_exit_with_2(self, capsys: Capture, tmp_path: Path, arguments: list[str], said: str) -> None:
        (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
        code, out, err = run(capsys, *(text.format(path=tmp_path) for text in arguments))
        assert (code, out) == (2, "")
        assert said in err

    def test_a_copy_that_is_not_there(self, capsys: Capture, files: Files) -> None:
        files.write_controller()
        code, _, err = run(capsys, "show", "--data", str(files.path), "--copy", "broker")
        assert code == 2
        assert "has that of a controller only" in err


def test_unknown_records_are_dumped_by_number(capsys: Capture, files: Files) -> None:
    import msgpack

    files.entries.append(Entry(EPOCH, EntryKind.DATA, msgpack.packb([[900, 0, {0: UUID(int=7).hex}]])))
    files.write_controller(with_snapshot=False)
    code, out, _ = run(capsys, "dump", "--data", str(files.path))
    assert code == 0
    assert json.loads(out.splitlines()[-1])["type"] == "Unknown900"
