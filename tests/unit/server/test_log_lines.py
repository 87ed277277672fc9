"""Log lines: fields for programs, replicas named as people name them, and a bound on repeated lines."""

import io
import json
import logging
import time
from uuid import UUID

import pytest

from tidelog.model.errors import DiskFullError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.server import log_lines
from tidelog.server.log_lines import BURST, REPEAT_S, WINDOW_S, BoundedHandler, JsonLines, Names, TextLines

ORDERS = TopicId(UUID(int=7))
PATH = f"orders.{ORDERS.hex}-3"


class Log:
    """A logger with a handler of its own, and a clock that the test moves."""

    def __init__(self, form: str = "text") -> None:
        self.stream = io.StringIO()
        self.now_s = 0.0
        names = Names(lambda topic_id: "orders" if topic_id == ORDERS else None)
        self.handler = handler = BoundedHandler(self.stream, lambda: self.now_s)
        handler.setFormatter(JsonLines(1, names) if form == "json" else TextLines(1, names))
        self.logger = logging.Logger("tidelog.replication.follower_replica")
        self.logger.addHandler(handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def message(self) -> str:
        return self.lines[-1].partition("replication.follower_replica: ")[2]


def test_a_json_line_has_the_values_of_its_message_as_typed_fields() -> None:
    log = Log("json")
    log.logger.warning("log=%s follower=%d cannot be served: %s", PATH, 2, DiskFullError("no room", path=PATH))
    row = json.loads(log.lines[0])
    assert row["message"] == "cannot be served: no room"
    assert (row["replica"], row["log"], row["follower"], row["error"]) == ("orders-3", PATH, 2, "STORAGE_ERROR")
    assert (row["level"], row["node"], row["logger"]) == ("warning", 1, "tidelog.replication.follower_replica")


def test_a_field_never_replaces_what_every_line_has() -> None:
    log = Log("json")
    log.logger.warning("node=%d level=%s is odd", 9, "high")
    row = json.loads(log.lines[0])
    assert (row["node"], row["level"]) == (1, "warning")


def test_a_text_line_names_replicas_by_topic_and_partition() -> None:
    log = Log()
    log.logger.warning("log=%s is cut to %d", PATH, 5)
    assert log.message() == "replica=orders-3 is cut to 5"
    log.logger.warning("broker=%d removes the log of %s", 1, PartitionId(ORDERS, 3))
    assert log.message() == "broker=1 removes the log of orders-3"
    log.logger.warning("the log of %s", PartitionId(TopicId(UUID(int=9)), 0))
    assert log.message() == f"the log of {UUID(int=9)}-0", "a topic that is not known keeps its id"


def test_a_message_that_is_no_format_string_is_written_as_it_is() -> None:
    log = Log("json")
    log.logger.warning("100% of epoch=%d")
    log.logger.warning("percent %% and epoch=%d", 4)
    first, second = map(json.loads, log.lines)
    assert first["message"] == "100% of epoch=%d"
    assert (second["message"], second["epoch"]) == ("percent % and epoch=4", 4)


def test_the_same_line_is_written_once_a_minute_with_the_number_of_the_others() -> None:
    log = Log()
    for _ in range(80):
        log.logger.error("log=%s is not written to", PATH)
    assert len(log.lines) == 1
    log.now_s = REPEAT_S
    log.logger.error("log=%s is not written to", PATH)
    assert log.message() == "replica=orders-3 is not written to (79 more lines like this were suppressed)"
    assert len(log.lines) == 2


def test_lines_of_one_format_are_bounded_however_many_replicas_they_name() -> None:
    log = Log()
    for number in range(500):
        log.logger.error("log=%s is not written to", f"orders.{ORDERS.hex}-{number}")
    assert len(log.lines) == BURST
    log.logger.error("another line")
    assert len(log.lines) == BURST + 1, "other lines are not affected"
    log.now_s = WINDOW_S
    log.logger.error("log=%s is not written to", f"orders.{ORDERS.hex}-999")
    assert log.message().endswith("(490 more lines like this were suppressed)")


def test_a_critical_line_is_never_suppressed() -> None:
    log = Log()
    for _ in range(50):
        log.logger.critical("the logs have crashed")
    assert len(log.lines) == 50


def test_an_error_that_was_suppressed_is_written_when_no_other_line_follows() -> None:
    log = Log()
    for number in range(BURST + 3):
        log.logger.error("replica %d is damaged", number)
    assert len(log.lines) == BURST
    log.now_s = WINDOW_S
    log.logger.info("a line about something else")
    assert log.message() == f"replica {BURST + 2} is damaged (2 more lines like this were suppressed)"
    log.now_s = 10 * REPEAT_S
    log.logger.info("a later line")
    assert len(log.lines) == BURST + 3, "it is reported once"


def test_times_of_the_lines_only_increase(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for number in range(BURST + 1):
        log.logger.error("replica %d is damaged", number)
    log.now_s, later_s = WINDOW_S, time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later_s)
    log.logger.info("a line about something else")
    stamps = [line.partition(" ")[0] for line in log.lines]
    assert len(stamps) == BURST + 2, "the suppressed line is written late"
    assert stamps == sorted(stamps)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (UUID(int=2), "AAAAAAAAAAAAAAAAAAAAAg"),
        (("127.0.0.1", 57028), "127.0.0.1:57028"),
        (("::1", 57028, 0, 0), "[::1]:57028"),
    ],
)
def test_ids_and_addresses_are_written_as_commands_write_them(value: object, text: str) -> None:
    log = Log()
    log.logger.warning("peer=%s is odd: %s", value, value)
    assert log.message() == f"peer={text} is odd: {text}"
    programs = Log("json")
    programs.logger.warning("peer=%s is odd", value)
    assert json.loads(programs.lines[0])["peer"] == text


def test_a_timer_writes_suppressed_errors_of_a_log_that_is_silent_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "WINDOW_S", 0.05)
    stream = io.StringIO()
    handler = BoundedHandler(stream)
    logger = logging.Logger("tidelog.any")
    logger.addHandler(handler)
    for number in range(BURST + 1):
        logger.error("replica %d is damaged", number)
    deadline_s = time.monotonic() + 10
    while f"replica {BURST} is damaged" not in stream.getvalue():
        assert time.monotonic() < deadline_s, "the last error is never written"
        time.sleep(0.01)
    handler.close()


def test_a_handler_that_is_closed_writes_the_suppressed_errors_first() -> None:
    log = Log()
    for number in range(BURST + 1):
        log.logger.error("replica %d is damaged", number)
    log.logger.handlers[0].close()
    assert log.message() == f"replica {BURST} is damaged"


def test_suppressed_lines_do_not_keep_the_frames_of_their_traceback() -> None:
    log = Log()
    for number in range(BURST + 1):
        try:
            raise ValueError("large")
        except ValueError:
            log.logger.exception("replica %d failed", number)
    (window,) = log.handler._limit._late.values()
    assert window.last is not None
    assert window.last.exc_info is None


def test_bytes_of_a_client_cannot_begin_a_line_of_their_own() -> None:
    hostile = "x\n2026-01-31T12:00:00.123Z CRITICAL node=1 forged\r\x1b[2J\u2028\x85end\ud800"
    log = Log()
    log.logger.warning("client=%s is refused", hostile)
    assert len(log.lines) == 1
    assert not {"\n", "\r", "\x1b", "\x85"} & set(log.lines[0])
    log.lines[0].encode()
    programs = Log("json")
    programs.logger.warning("client=%s is refused", hostile)
    assert json.loads(programs.lines[0])["client"] == hostile


def test_a_value_of_any_length_makes_a_line_of_bounded_length() -> None:
    for form in ("text", "json"):
        log = Log(form)
        log.logger.warning("client=%s is refused", "x" * 10_000_000)
        assert len(log.lines[0]) < 3 * log_lines.LENGTH_MAX


def test_json_lines_have_no_numbers_that_json_has_not() -> None:
    log = Log("json")
    log.logger.warning("rate=%f lag=%s", float("nan"), float("inf"))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(log.lines[0], parse_constant=refuse)["rate"] == "nan"


def test_arguments_that_do_not_fit_their_format_do_not_stop_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    log.logger.warning("epoch=%d", "three")
    assert "Logging error" in capsys.readouterr().err
