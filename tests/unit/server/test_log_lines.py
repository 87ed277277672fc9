"""Log lines: fields for programs, replicas named as people name them, and a bound on repeated lines."""

import io
import json
import logging
from uuid import UUID

from tidelog.model.errors import DiskFullError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.server.log_lines import BURST, REPEAT_S, WINDOW_S, BoundedHandler, JsonLines, Names, TextLines

ORDERS = TopicId(UUID(int=7))
PATH = f"orders.{ORDERS.hex}-3"


class Log:
    """A logger with a handler of its own, and a clock that the test moves."""

    def __init__(self, form: str = "text") -> None:
        self.stream = io.StringIO()
        self.now_s = 0.0
        names = Names(lambda topic_id: "orders" if topic_id == ORDERS else None)
        handler = BoundedHandler(self.stream, lambda: self.now_s)
        handler.setFormatter(JsonLines(1, names) if form == "json" else TextLines(1, names))
        self.logger = logging.Logger("tidelog.replication.following")
        self.logger.addHandler(handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def message(self) -> str:
        return self.lines[-1].partition("replication.following: ")[2]


def test_a_json_line_has_the_values_of_its_message_as_typed_fields() -> None:
    log = Log("json")
    log.logger.warning("log=%s follower=%d cannot be served: %s", PATH, 2, DiskFullError("no room", path=PATH))
    row = json.loads(log.lines[0])
    assert row["message"] == "cannot be served: no room"
    assert (row["replica"], row["log"], row["follower"], row["error"]) == ("orders-3", PATH, 2, "STORAGE_ERROR")
    assert (row["level"], row["node"], row["logger"]) == ("warning", 1, "tidelog.replication.following")


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
