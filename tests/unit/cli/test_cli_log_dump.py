"""`tidelog log dump`: tables and JSON of real files, with and without a state store; wrong paths; problems."""

import asyncio
import json
import re
from pathlib import Path
from struct import pack
from uuid import UUID

import pytest
from crc32c import crc32c

from tidelog.cli import main as cli
from tidelog.log.batch import Codec, ControlKind, Record, encode, encode_control
from tidelog.log.dump import StoredBatch, read_batches
from tidelog.log.epochs import EpochHistory
from tidelog.log.producers import ProducerState
from tidelog.log.segment import SegmentInfo
from tidelog.log.stored_state import (
    EPOCHS,
    PRODUCERS,
    START,
    encode_epochs,
    encode_number,
    encode_segment,
    key_prefix,
    segment_key,
)
from tidelog.log.transactions import AbortedTransaction, encode_entry
from tidelog.model.ids import Offset, PartitionId, ProducerId, TopicId
from tidelog.world.real.store import LmdbStore

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
TOPIC = TopicId(UUID(int=42))
NAME = f"orders.{TOPIC.hex}-0"
LOG, INDEX, TIME, TXN = (f"{0:020d}{suffix}" for suffix in (".log", ".index", ".timeindex", ".txnindex"))


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, position: int, length: int) -> bytes:
        return self.data[position : position + length]


def record(offset: int, key: bytes | None, value: bytes | None) -> Record:
    return Record(
        offset=Offset(offset),
        timestamp=1_700_000_000_000 + offset,
        key=key,
        value=value,
        headers=(("h", b"\xff"), ("t", b"x")),
    )


def write_log(directory: Path) -> Path:
    """A segment with a batch of data, a transaction that is aborted, and all indexes."""
    log = directory / NAME
    log.mkdir(parents=True)
    plain = encode(
        [record(0, b"alpha", b"one"), record(1, None, None), record(2, b"\xff\xfe", b"two\nlines")],
        codec=Codec.ZSTD,
        base_offset=0,
        leader_epoch=1,
    )
    open_ = encode(
        [record(3, b"k", b"\xfe" * 100)],
        base_offset=3,
        leader_epoch=1,
        producer_id=9,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
    )
    end = encode_control(
        ControlKind.ABORT,
        coordinator_epoch=0,
        timestamp=1_700_000_000_900,
        producer_id=9,
        producer_epoch=0,
        base_offset=4,
        leader_epoch=1,
    )
    (log / LOG).write_bytes(plain + open_ + end)
    (log / INDEX).write_bytes(pack(">ii", 3, len(plain)))
    (log / TIME).write_bytes(pack(">qi", 1_700_000_000_003, 3))
    (log / TXN).write_bytes(encode_entry(AbortedTransaction(ProducerId(9), Offset(3), Offset(4), Offset(5))))
    return log


def write_state(directory: Path, *, crc: int | None = None, epochs: tuple[tuple[int, int], ...] = ((1, 0),)) -> None:
    data = (directory / NAME / LOG).read_bytes()
    info = SegmentInfo(
        base_offset=Offset(0),
        next_offset=Offset(5),
        size=len(data),
        largest_timestamp=1_700_000_000_900,
        largest_offset=4,
        first_timestamp=1_700_000_000_002,
        modified_ms=0,
        crc=crc32c(data) if crc is None else crc,
        aborted=1,
    )
    producers = ProducerState()
    for item in read_batches(Bytes(data), LOG):
        assert isinstance(item, StoredBatch)
        if not item.header.is_control:
            producers.apply(item.header, now_ms=0)
    prefix = key_prefix(PartitionId(TOPIC, 0))
    writes = {
        prefix + START: encode_number("start", 0),
        prefix + EPOCHS: encode_epochs(EpochHistory(epochs)),
        segment_key(prefix, 0): encode_segment(info),
        prefix + PRODUCERS + (5).to_bytes(8, "big"): producers.to_snapshot(),
    }

    async def store() -> None:
        with LmdbStore(directory / "state") as target:
            await target.commit(writes)

    asyncio.run(store())


def dump(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["log", "dump", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    _, out, _ = dump(capsys, *arguments, "--output", "json")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


@pytest.mark.requirement("a:N-12")
def test_a_table_of_batches_and_index_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    code, out, err = dump(capsys, log)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(log)
    assert any(re.match(r"0{20}\.log: segment, [\d,]+ bytes", line) for line in lines)
    batches = [line.split() for line in lines if re.match(r"\s+\d+\s+\d+\s+\d+-\d+ ", line)]
    assert [row[2] for row in batches] == ["0-2", "3-3", "4-4"]
    assert [row[-1] for row in batches] == ["data", "transactional", "ABORT"]
    assert "zstd" in batches[0]
    assert "9/0" in batches[1]
    assert "2023-11-14 22:13:20.002" in out


@pytest.mark.requirement("a:N-12")
def test_records_are_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    code, out, _ = dump(capsys, log / LOG, "--records")
    assert code == 0
    assert re.search(r"0  2023-11-14 22:13:20\.000  alpha +one +h=0xff", out)
    assert re.search(r"1 .* null +null", out)
    assert re.search(r"2 .* 0xfffe +two\\nlines", out)
    assert "(100 bytes)" in out


def test_json_has_the_documented_keys_and_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path)
    write_state(tmp_path)
    found = document(capsys, tmp_path, "--records", "--offsets-decoder")
    documented = set(re.findall(r"^\| `([^`%]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    shown: set[str] = set()

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inside in value.items():
                shown.add(f"{path}.{key}".lstrip("."))
                walk(inside, f"{path}.{key}")
        elif isinstance(value, list):
            for inside in value:
                walk(inside, f"{path}[]")

    walk(found, "")
    assert shown - documented == set()
    # These appear only when something is wrong, or the key is text.
    rare = {name for name in documented - shown if name.startswith(("problems[]", "logs[].state.damage."))}
    assert documented - shown - rare == set()


def test_json_tells_text_from_bytes_and_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    found = document(capsys, log / LOG, "--records")
    (only,) = found["logs"]  # type: ignore[misc]
    (file,) = only["files"]  # type: ignore[has-type]
    rows = file["batches"][0]["records"]
    assert [row["key"] for row in rows] == [{"text": "alpha"}, None, {"base64": "//4="}]
    assert [row["value"] for row in rows] == [{"text": "one"}, None, {"text": "two\nlines"}]
    assert found["problems"] == []


def test_each_kind_of_file_can_be_dumped_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    kinds = {}
    for name in (LOG, INDEX, TIME, TXN):
        only = document(capsys, log / name)["logs"][0]  # type: ignore[index]
        assert only["state"] is None
        (file,) = only["files"]
        kinds[file["kind"]] = len(file.get("entries", file.get("batches")))
    assert kinds == {"segment": 3, "offset index": 1, "time index": 1, "transaction index": 1}


def test_the_state_store_is_found_beside_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    write_state(tmp_path)
    state = document(capsys, log)["logs"][0]["state"]  # type: ignore[index]
    assert state["start_offset"] == 0
    assert state["epochs"] == [{"epoch": 1, "start_offset": 0}]
    assert state["producers"][0]["producer_id"] == 9
    assert state["producers"][0]["open_transaction_offset"] == 3
    _, out, _ = dump(capsys, log)
    assert "epochs: 1 from 0" in out
    assert "producer 9, epoch 0: last sequence 0, offset 3, transaction open from 3" in out


def test_verify_is_content_with_a_sound_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path)
    write_state(tmp_path)
    code, out, err = dump(capsys, tmp_path, "--verify")
    assert code == 0, out
    assert err == f"tidelog: {tmp_path}: nothing wrong\n"
    assert "0-2" not in out, "only the verdict was asked for"


def test_verify_names_file_position_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    (log / INDEX).write_bytes(pack(">ii", 3, 7))
    code, out, err = dump(capsys, log, "--verify")
    assert code == 1
    assert f"problem: {INDEX} at 0: offset 3: no batch starts at position 7" in out.splitlines()
    assert err == "tidelog: 1 problem found\n"
    assert document(capsys, log, "--verify")["problems"] == [
        {"file": INDEX, "position": 0, "what": "offset 3: no batch starts at position 7"}
    ]


def test_verify_of_one_file_tells_only_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path)
    (log / INDEX).write_bytes(pack(">ii", 3, 7))
    assert dump(capsys, log / LOG, "--verify")[0] == 0
    assert dump(capsys, log / INDEX, "--verify")[0] == 1


def test_verify_holds_files_against_the_state_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    write_state(tmp_path, crc=1, epochs=((4, 0),))
    code, out, _ = dump(capsys, log, "--verify")
    assert code == 1
    assert "it was sealed with 00000001" in out
    assert "leader epoch 1 at 0, the epoch history says 4" in out


def test_problems_of_several_logs_name_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path)
    other = tmp_path / f"other.{TOPIC.hex}-1"
    other.mkdir()
    (other / LOG).write_bytes(b"torn")
    code, out, _ = dump(capsys, tmp_path)
    assert code == 1
    assert f"problem: {other.name}/{LOG} at 0: torn: 4 bytes are left, less than a batch's first 12" in out.splitlines()


def test_records_that_do_not_decode_are_a_problem_not_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path)
    data = bytearray((log / LOG).read_bytes())
    data[61] ^= 0xFF  # the first byte of the compressed records
    (log / LOG).write_bytes(data)
    for form in ("table", "json"):
        code, out, _ = dump(capsys, log / LOG, "--records", "--output", form)
        assert code == 1
        assert "records do not decode" in out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or directory"),
        (lambda path: path.write_bytes(b""), "not a file of a log; those are named by 20 digits and .log"),
        (lambda path: path.mkdir(), "neither a log's directory nor a directory of logs"),
    ],
)
def test_a_wrong_path_is_a_wrong_call(
    make: "object", message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.txt"
    assert callable(make)
    make(path)
    code, out, err = dump(capsys, path)
    assert (code, out) == (2, "")
    assert err.startswith(f"tidelog: {path}: {message}")
    assert err.count("\n") == 1


def test_a_dump_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in log.iterdir()}
    dump(capsys, log, "--verify", "--records")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in log.iterdir()} == before
