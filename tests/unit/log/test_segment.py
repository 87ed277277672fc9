"""Names of a segment's files, and when a new segment begins."""

import pytest

from tidelog.log.config import LogConfig
from tidelog.log.segment import (
    CLEANED,
    DELETED,
    INDEX,
    LOG,
    SWAP,
    TIME_INDEX,
    TRANSACTION_INDEX,
    ActiveSegment,
    file_name,
    parse_name,
)


@pytest.mark.requirement("b:B-25")
def test_a_segment_is_named_after_its_first_offset_in_twenty_digits() -> None:
    assert file_name(42, LOG) == "00000000000000000042.log"
    assert file_name(0, INDEX) == "00000000000000000000.index"
    assert file_name(2**40, TIME_INDEX) == "00000001099511627776.timeindex"
    assert file_name(7, TRANSACTION_INDEX, SWAP) == "00000000000000000007.txnindex.swap"


@pytest.mark.parametrize("suffix", [LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX])
@pytest.mark.parametrize("state", ["", CLEANED, SWAP, DELETED])
def test_parse_name_inverts_file_name(suffix: str, state: str) -> None:
    assert parse_name(file_name(1234, suffix, state)) == (1234, suffix, state)


@pytest.mark.parametrize(
    "name",
    ["", "42.log", "00000000000000000042", "00000000000000000042.log.old", "a0000000000000000042.log", "keys.cleaned"],
)
def test_other_files_are_not_taken_for_segments(name: str) -> None:
    assert parse_name(name) is None


def segment(*, created_ms: int = 0, timestamp: int = 1000, size: int = 100) -> ActiveSegment:
    active = ActiveSegment(50, created_ms=created_ms, index_interval_bytes=4096)
    if size:
        active.add(last_offset=50, size=size, max_timestamp=timestamp, crc=0, modified_ms=created_ms)
    return active


def must_roll(
    active: ActiveSegment,
    config: LogConfig,
    *,
    size: int = 10,
    last_offset: int = 51,
    max_timestamp: int = 1000,
    now_ms: int = 0,
    log_number: int = 1,
) -> bool:
    return active.must_roll(
        config,
        size=size,
        last_offset=last_offset,
        max_timestamp=max_timestamp,
        now_ms=now_ms,
        log_number=log_number,
    )


@pytest.mark.requirement("a:A-48", "b:B-23")
def test_a_segment_rolls_when_the_next_batch_would_pass_its_size() -> None:
    config = LogConfig(segment_bytes=1000)
    assert not must_roll(segment(size=900), config, size=100)
    assert must_roll(segment(size=900), config, size=101)


def test_an_empty_segment_never_rolls() -> None:
    config = LogConfig(segment_bytes=10, segment_ms=1)
    assert not must_roll(segment(size=0), config, size=10_000, max_timestamp=10**12, now_ms=10**12)


@pytest.mark.requirement("a:A-50", "b:B-24")
def test_a_segment_rolls_when_its_first_record_is_older_than_the_next_by_segment_ms() -> None:
    config = LogConfig(segment_ms=5000)
    assert not must_roll(segment(timestamp=1000), config, max_timestamp=6000, now_ms=10**12)
    assert must_roll(segment(timestamp=1000), config, max_timestamp=6001, now_ms=0)


def test_without_timestamps_the_age_of_the_file_decides() -> None:
    config = LogConfig(segment_ms=5000)
    active = segment(created_ms=200, timestamp=-1)
    assert not must_roll(active, config, max_timestamp=-1, now_ms=5200)
    assert must_roll(active, config, max_timestamp=-1, now_ms=5201)


def test_jitter_spreads_the_rolls_of_logs_and_is_the_same_every_time() -> None:
    config = LogConfig(segment_ms=100_000, segment_jitter_ms=50_000)

    def age_at_roll(number: int) -> int:
        return next(
            age
            for age in range(0, 100_002, 100)
            if must_roll(segment(timestamp=0), config, max_timestamp=age, log_number=number)
        )

    ages = [age_at_roll(number) for number in range(20)]
    assert ages == [age_at_roll(number) for number in range(20)]
    assert len(set(ages)) > 10
    assert all(50_000 <= age <= 100_100 for age in ages)


def test_a_segment_rolls_when_an_offset_no_longer_fits_31_bits() -> None:
    config = LogConfig()
    assert not must_roll(segment(), config, last_offset=50 + 2**31 - 1)
    assert must_roll(segment(), config, last_offset=50 + 2**31)


def test_a_segment_rolls_when_an_index_is_full() -> None:
    config = LogConfig(index_bytes_max=64)
    active = ActiveSegment(0, created_ms=0, index_interval_bytes=0)
    rolled_at = None
    for at in range(20):
        if must_roll(active, config, last_offset=at, max_timestamp=-1):
            rolled_at = at
            break
        active.add(last_offset=at, size=100, max_timestamp=-1, crc=0, modified_ms=0)
    assert rolled_at == 9  # the first batch has no entry, the next eight fill 64 bytes


def test_a_mark_restores_the_active_segment() -> None:
    active = ActiveSegment(50, created_ms=7, index_interval_bytes=0)
    active.add(last_offset=52, size=300, max_timestamp=900, crc=77, modified_ms=7)
    mark = active.mark(53, has_producers=False)
    again = ActiveSegment.resume(mark, index_interval_bytes=0)
    assert again.info(53) == active.info(53)
    assert again.mark(53, has_producers=False) == mark


@pytest.mark.parametrize(
    "config",
    [
        LogConfig(segment_bytes=0),
        LogConfig(segment_bytes=2**31),
        LogConfig(segment_ms=10, segment_jitter_ms=11),
        LogConfig(cleanup_delete=False),
        LogConfig(min_cleanable_dirty_ratio=1.5),
        LogConfig(flush_messages=0),
        LogConfig(min_compaction_lag_ms=5, max_compaction_lag_ms=4),
    ],
)
def test_invalid_settings_are_reported(config: LogConfig) -> None:
    assert len(config.problems()) == 1


def test_all_problems_are_reported_at_once() -> None:
    assert len(LogConfig(segment_bytes=0, retention_ms=-2, index_bytes_max=1).problems()) == 3
    assert LogConfig().problems() == []
