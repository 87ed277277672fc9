"""The newest claim of a partition, kept with its producer."""

from pathlib import Path

import msgpack
import pytest
from support.logs.cleaning import CleanableLog

from tidelog.log.batch import Record, encode, read_header
from tidelog.log.batch_filter import empty_batch
from tidelog.log.batch_header import CLAIM_BIT
from tidelog.log.producers import ProducerState
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import CorruptStateError
from tidelog.model.transaction_errors import StaleFencingTokenError
from tidelog.world.real.disk import RealDisk


def applied(state: ProducerState, producer: int, offset: int, *, is_claim: bool, now_ms: int = 0) -> None:
    data = encode(
        [Record(offset, 1_000, None, b"v")],
        base_offset=offset,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=offset,
        is_claim=is_claim,
    )
    state.apply(read_header(data), now_ms=now_ms)
    state.validate(log_end=offset + 1)


def test_the_newest_claim_counts() -> None:
    state = ProducerState()
    assert state.claim == -1
    for offset, is_claim in enumerate((False, True, False, True, False)):
        applied(state, 7, offset, is_claim=is_claim)
    assert state.claim == 3


def test_a_snapshot_has_the_claim() -> None:
    state = ProducerState()
    without = state.to_snapshot()
    assert ProducerState.from_snapshot(without).claim == -1
    applied(state, 7, 5, is_claim=True)
    again = ProducerState.from_snapshot(state.to_snapshot())
    again.validate(log_end=6)
    assert again.claim == 5
    assert again.to_snapshot() == state.to_snapshot()


@pytest.mark.parametrize("claim", [[5], [5, 8], [-1, 7], ["5", 7], 5])
def test_a_snapshot_with_a_claim_that_cannot_be_is_corrupt(claim: object) -> None:
    state = ProducerState()
    applied(state, 7, 5, is_claim=True)
    kind, version, fields = msgpack.unpackb(state.to_snapshot())
    with pytest.raises(CorruptStateError):
        ProducerState.from_snapshot(msgpack.packb([kind, version, fields | {"claim": claim}]))


def test_the_producer_of_the_claim_neither_expires_nor_is_evicted() -> None:
    state = ProducerState(producers_max=2)
    applied(state, 7, 0, is_claim=True)
    for offset in range(1, 6):
        applied(state, 100 + offset, offset, is_claim=False)
    assert 7 in state.ids()
    state.expire(1 << 40, 1)
    assert state.ids() == [7]
    applied(state, 8, 9, is_claim=True)
    state.expire(1 << 40, 1)
    assert state.ids() == [8], "the former one may go"


def test_a_log_that_was_compacted_and_rebuilt_never_takes_an_older_claim_for_the_newest(tmp_path: Path) -> None:
    """Its owner would write again, with a token that was fenced."""
    log = CleanableLog(RealDisk(tmp_path))
    for producer in (7, 8):
        log.put((b"holder of %d" % producer, b"claims"), producer=producer, is_claim=True)
    newest = log.producers.claim
    log.put((b"holder of 8", b"writes"), producer=8)  # the claim is neither its newest value nor its last batch
    log.roll()
    for now_ms in (100, 200):
        log.put((b"holder of 8", b"writes on"), producer=8)
        log.roll()
        assert log.clean(now_ms, force=True) is not None
        rebuilt = ProducerState()
        for batch in log.batches():
            rebuilt.apply(batch.header, now_ms=0)
        assert rebuilt.claim == log.producers.claim == newest
    log.put((b"holder of 9", b"claims"), producer=9, is_claim=True)
    log.roll()
    assert log.clean(300, force=True) is not None
    assert newest not in [batch.header.base_offset for batch in log.batches()], "the former one may go"


def test_a_log_whose_newest_claim_retention_has_removed_rejects_every_token() -> None:
    rebuilt = ProducerState()
    applied(rebuilt, 7, 5, is_claim=False)  # its claim was before
    for token in (0, 4, 5, 6):
        with pytest.raises(StaleFencingTokenError):
            AppendCondition(fencing_token=token).check(end_offset=6, claim=rebuilt.claim)


def test_compaction_keeps_the_mark_of_a_claim() -> None:
    data = encode(
        [Record(3, 1_000, b"k", b"v")],
        base_offset=3,
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        is_claim=True,
    )
    assert read_header(empty_batch(read_header(data))).attributes & CLAIM_BIT


@pytest.mark.parametrize("value", [b"B", None])
def test_compaction_removes_no_newer_claim_than_it_keeps(tmp_path: Path, value: bytes | None) -> None:
    """Else a replica that is rebuilt from the log would take an old token for the newest one."""
    log = CleanableLog(RealDisk(tmp_path))
    log.put((b"a", b"A"), producer=1, is_claim=True)
    log.put((b"b", value), producer=2, is_claim=True)
    log.roll()
    log.put((b"b", b"later"), producer=2)
    log.put((b"c", b"C"), producer=3)
    log.roll()
    for now_ms in (100, 1 << 40):
        assert log.clean(now_ms, force=True) is not None
        rebuilt = ProducerState()
        for stored in log.batches():
            rebuilt.apply(stored.header, now_ms=0)
        assert rebuilt.claim == log.producers.claim == 1
    assert [key for _, key, _ in log.pairs()] == [b"a", b"b", b"c"]
