"""Changes of in-sync sets in the log: a smaller set is a warning, and a burst is summed up."""

import logging
from collections.abc import Callable

import pytest

from tidelog.replication.isr_log import LINES_MAX, IsrLog

ALL, FEWER = frozenset({1, 2, 3}), frozenset({1, 3})


def test_a_smaller_in_sync_set_is_a_warning_and_a_larger_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    log = IsrLog(lambda _delay_s, _end: None)
    with caplog.at_level(logging.INFO):
        log.changed("orders-0", 4, ALL, FEWER)
        log.changed("orders-0", 4, FEWER, FEWER)
        log.changed("orders-0", 4, FEWER, ALL)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "log=orders-0 epoch=4 isr=1,3: the in-sync set lost broker 2"),
        ("INFO", "log=orders-0 epoch=4 isr=1,2,3: the in-sync set gained broker 2"),
    ]


def test_a_burst_has_a_few_lines_and_their_number(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[Callable[[], None]] = []
    log = IsrLog(lambda _delay_s, end: ends.append(end))
    with caplog.at_level(logging.INFO):
        for number in range(5_000):
            log.changed(f"orders-{number}", 4, ALL, FEWER)
        assert len(caplog.records) == LINES_MAX
        (end,) = ends
        end()
    assert caplog.records[-1].getMessage() == "the in-sync sets of 4990 more partitions became smaller in 10 s"
    log.changed("orders-0", 5, ALL, FEWER)
    assert len(ends) == 2, "a new window has begun"
