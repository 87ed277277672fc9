"""Writes a node's log to stderr: one line for each event, `key=value` for a person or JSON for a program.

Five rules hold for every line, so that no call site has to know them:
- Values that a format string names (`"log=%s follower=%d ..."`) are fields of the JSON object, with their types.
- A replica is named `topic-partition`. The log directory and the topic id are fields of the JSON object only.
- An id has the 22 characters that commands print and take; the address of a peer is `host:port`.
- Repeated lines are bounded: the same text once in `REPEAT_S`, and at most `BURST` lines of one format string in
  `WINDOW_S`. Suppressed lines are counted, and the next line of that format string reports the count. If there is none,
  the last suppressed line is written when its time is up, with the count. CRITICAL lines are never suppressed.
- A line is one line of at most about `LENGTH_MAX` characters, whatever a client has put into a value.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any
from uuid import UUID

from tidelog.log.directories import parse_directory_name
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.uuids import to_text

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

WINDOW_S = 10.0
BURST = 10
REPEAT_S = 60.0
FORMATS_MAX = 1_000
TEXTS_MAX = 2_000
"""Remembered for the bounds above; the least recently used are dropped."""

LENGTH_MAX = 16_384

_CONTROL = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))} | {
    number: f"\\u{number:04x}" for number in (0x2028, 0x2029)
}
"""Characters that would end a line, or that a terminal obeys."""
_SPEC = re.compile(r"(?:\b(?P<key>[a-z_]+)=)?%(?P<form>[+\-0 #]*\d*(?:\.\d+)?[sdrfx]|%)")
_LEADING = re.compile(r"^(?:[a-z_]+=%[sdr]:? )+(?=\S)")

TopicName = Callable[[TopicId], str | None]


@dataclass(slots=True)
class Names:
    """Finds the name of a topic. A broker sets `topic` when it has its metadata."""

    topic: TopicName = lambda _topic_id: None

    def replica(self, partition_id: PartitionId) -> str:
        name = self.topic(partition_id.topic_id)
        return f"{partition_id.topic_id if name is None else name}-{partition_id.partition}"

    def shown(self, value: object) -> object:
        """The value as people read it."""
        value = _plain(value)
        if isinstance(value, PartitionId):
            return self.replica(value)
        if isinstance(value, str):
            found = parse_directory_name(value.rpartition("/")[2])
            if found is not None and found[1]:
                return f"{found[1]}-{found[0].partition}"
        return value


def _plain(value: object) -> object:
    """An id as commands print it, and the address of a socket as `host:port`; other values as they are."""
    match value:
        case UUID():
            return to_text(value)
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return value


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a log record: message and fields."""

    text: str
    """The whole message, with replicas named."""
    tail: str
    """The message without the fields at its beginning."""
    fields: dict[str, Any]


def take_apart(record: logging.LogRecord, names: Names) -> Parts:
    template = record.msg
    args = record.args if isinstance(record.args, tuple) else ()
    specs = [match for match in _SPEC.finditer(template) if match["form"] != "%"] if isinstance(template, str) else []
    if not specs or len(specs) != len(args):
        text = record.getMessage()
        return Parts(text, text, {})
    shown = tuple(names.shown(arg) for arg in args)
    fields: dict[str, Any] = {}
    for match, arg, readable in zip(specs, map(_plain, args), shown, strict=True):
        if isinstance(arg, TidelogError):
            fields.setdefault("error", arg.code.name)
        if match["key"] is not None:
            fields[match["key"]] = arg if isinstance(arg, bool | int | float | str | None) else str(arg)
        if readable != arg:
            fields.setdefault("replica", readable)
    text = template % shown
    if "log=%" in template and "replica" in fields:
        text = text.replace(f"log={fields['replica']}", f"replica={fields['replica']}", 1)
    leading = _LEADING.match(template)
    skipped = 0 if leading is None else leading.end()
    count = sum(match.end() <= skipped for match in specs)
    return Parts(text, template[skipped:] % shown[count:], fields)


class _Lines(logging.Formatter):
    def __init__(self, node: int, names: Names | None = None) -> None:
        super().__init__()
        self._node = node
        self._names = names or Names()


class TextLines(_Lines):
    """`2026-01-31T12:00:00.123Z INFO node=1 raft.driver: epoch=3 role=leader`."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("tidelog.")
        message = _bounded(take_apart(record, self._names).text).translate(_CONTROL)
        message = message.encode("utf-8", "backslashreplace").decode()
        text = f"{_stamp(record)} {record.levelname} node={self._node} {name}: {message}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonLines(_Lines):
    """`{"time": ..., "level": "info", "node": 1, "logger": ..., "message": ..., "replica": "orders-0", ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = take_apart(record, self._names)
        fields = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": _bounded(parts.tail),
        }
        for key, value in parts.fields.items():
            fields.setdefault(key, _json_value(value))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _bounded(text: str) -> str:
    return text if len(text) <= LENGTH_MAX else f"{text[:LENGTH_MAX]}... ({len(text)} characters)"


def _json_value(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _bounded(value) if isinstance(value, str) else value


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


@dataclass(slots=True)
class _Window:
    began_s: float
    lines: int = 0
    suppressed: int = 0
    last: logging.LogRecord | None = None
    """The last suppressed line, one that says something new if there is one."""
    due_s: float = math.inf
    """When it is written, if no line like it comes before."""


@dataclass(slots=True)
class RepeatLimit:
    """Decides which lines are written. Time is an argument, so that tests need none."""

    _windows: OrderedDict[tuple[str, int, object], _Window] = field(default_factory=OrderedDict)
    _texts: OrderedDict[tuple[str, int, int], _Window] = field(default_factory=OrderedDict)
    """By the hash of the text: texts may be long."""
    _late: dict[tuple[str, int, object], _Window] = field(default_factory=dict)
    """Windows with suppressed lines that are not reported yet."""

    def admit(self, record: logging.LogRecord, now_s: float) -> str | None:
        """Returns None to suppress the line, else what to add to it: how many like it were suppressed before."""
        if record.levelno >= logging.CRITICAL:
            return ""
        template = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        key = record.name, record.levelno, template
        window = self._window(self._windows, key, now_s, WINDOW_S, FORMATS_MAX)
        seen = record.name, record.levelno, hash(record.getMessage())
        text = self._window(self._texts, seen, now_s, REPEAT_S, TEXTS_MAX)
        if window.lines >= BURST or text.lines:
            window.suppressed += 1
            if not text.lines or window.last is None:
                window.last = _without_traceback(record)
            due_s = now_s + REPEAT_S if text.lines else window.began_s + WINDOW_S
            window.due_s = min(window.due_s, due_s)
            self._late[key] = window
            return None
        count = self._reported(key, window)
        window.lines += 1
        text.lines += 1
        return _suffix(count)

    def _reported(self, key: tuple[str, int, object], window: _Window) -> int:
        """How many lines were suppressed, which are reported now."""
        count, window.suppressed, window.last, window.due_s = window.suppressed, 0, None, math.inf
        self._late.pop(key, None)
        return count

    def overdue(self, now_s: float) -> list[tuple[logging.LogRecord, str]]:
        """Suppressed lines that no other line has reported in time, each with what to add to it."""
        found: list[tuple[logging.LogRecord, str]] = []
        for key, window in list(self._late.items()):
            record = window.last
            if record is not None and window.due_s <= now_s:
                found.append((record, _suffix(self._reported(key, window) - 1)))
        return found

    def next_due_s(self) -> float | None:
        return min((window.due_s for window in self._late.values()), default=None)

    @staticmethod
    def _window(
        windows: OrderedDict[Any, _Window], key: tuple[str, int, object], now_s: float, length_s: float, most: int
    ) -> _Window:
        """The window of this key; a new one keeps the count of suppressed lines."""
        window = windows.get(key)
        if window is None or now_s - window.began_s >= length_s:
            if window is None:
                windows[key] = window = _Window(now_s)
            window.began_s, window.lines = now_s, 0
            if len(windows) > most:
                windows.popitem(last=False)
        windows.move_to_end(key)
        return window


def _suffix(count: int) -> str:
    return f" ({count} more lines like this were suppressed)" if count else ""


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """Returns a copy of the record without its traceback, which would keep local variables alive."""
    kept = logging.makeLogRecord(record.__dict__)
    kept.exc_info = kept.exc_text = kept.stack_info = None
    return kept


class BoundedHandler(logging.StreamHandler[IO[str]]):
    """Writes lines within the bounds of `RepeatLimit`. A timer writes the last suppressed lines if no others follow."""

    def __init__(self, stream: IO[str], now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._limit = RepeatLimit()
        self._now_s = now_s
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            suffix = self._limit.admit(record, self._now_s())
        except Exception:  # arguments that do not fit their format: as `logging` treats them everywhere
            self.handleError(record)
            return
        if suffix is not None:
            self._write(record, suffix)
        self.write_overdue()

    def _write(self, record: logging.LogRecord, suffix: str) -> None:
        if suffix:
            record = logging.makeLogRecord(record.__dict__)
            record.msg = f"{record.msg}{suffix}"
        super().emit(record)

    def _write_late(self, record: logging.LogRecord, suffix: str) -> None:
        """With the time of now: the times of a log only increase."""
        record.created = time.time()
        record.msecs = record.created % 1 * 1000
        self._write(record, suffix)

    def write_overdue(self) -> None:
        """Called with the handler's lock held."""
        for record, suffix in self._limit.overdue(self._now_s()):
            self._write_late(record, suffix)
        due_s = self._limit.next_due_s()
        if due_s is not None and self._timer is None:
            self._timer = threading.Timer(max(0.0, due_s - self._now_s()), self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        self.acquire()
        try:
            self._timer = None
            self.write_overdue()
        finally:
            self.release()

    def close(self) -> None:
        """Writes what is suppressed and not reported: the process may end with it."""
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for record, suffix in self._limit.overdue(math.inf):
                self._write_late(record, suffix)
        finally:
            self.release()
        super().close()


def set_up(node: int, *, level: str, form: str, stream: IO[str] | None = None) -> Names:
    """For the whole process, once. The result takes the names of topics when they are known."""
    names = Names()
    handler = BoundedHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(node, names) if form == "json" else TextLines(node, names))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # Every call that a client breaks off would be a line.
    logging.getLogger("grpc").setLevel(logging.ERROR)
    return names
