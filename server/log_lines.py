"""Writes a node's log to stderr: one line for each event, `key=value` for a person or JSON for a program.

Three rules hold for every line, so that no call site has to know them:
- Values that a format string names (`"log=%s follower=%d ..."`) are fields of the JSON object, with their types.
- A replica is named `topic-partition`. The log directory and the topic id are fields of the JSON object only.
- Repeated lines are bounded: the same text once in `REPEAT_S`, and at most `BURST` lines of one format string in
  `WINDOW_S`. Suppressed lines are counted, and the count is reported. CRITICAL lines are never suppressed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from tidelog.log.directories import parse_directory_name
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

WINDOW_S = 10.0
BURST = 10
REPEAT_S = 60.0
FORMATS_MAX = 1_000
TEXTS_MAX = 2_000
"""Remembered for the bounds above; the least recently used are dropped."""

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
        if isinstance(value, PartitionId):
            return self.replica(value)
        if isinstance(value, str):
            found = parse_directory_name(value.rpartition("/")[2])
            if found is not None and found[1]:
                return f"{found[1]}-{found[0].partition}"
        return value


@dataclass(frozen=True, slots=True)
class Parts:
    """A log record, taken apart."""

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
    for match, arg, readable in zip(specs, args, shown, strict=True):
        if isinstance(arg, TidelogError):
            fields.setdefault("error", arg.code.name)
        if match["key"] is not None:
            fields[match["key"]] = arg if isinstance(arg, bool | int | float | str | None) else str(arg)
        if readable is not arg:
            fields.setdefault("replica", readable)
    text = template % shown
    if "log=%" in template and "replica" in fields:
        text = text.replace(f"log={fields['replica']}", f"replica={fields['replica']}", 1)
    leading = _LEADING.match(template)
    skipped = 0 if leading is None else leading.end()
    count = sum(match.end() <= skipped for match in specs)
    return Parts(text, template[skipped:] % shown[count:], fields)


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO node=1 raft.driver: epoch=3 role=leader`."""

    def __init__(self, node: int, names: Names | None = None) -> None:
        super().__init__()
        self._node = node
        self._names = names or Names()

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("tidelog.")
        text = f"{_stamp(record)} {record.levelname} node={self._node} {name}: {take_apart(record, self._names).text}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": "info", "node": 1, "logger": ..., "message": ..., "replica": "orders-0", ...}`."""

    def __init__(self, node: int, names: Names | None = None) -> None:
        super().__init__()
        self._node = node
        self._names = names or Names()

    def format(self, record: logging.LogRecord) -> str:
        parts = take_apart(record, self._names)
        fields = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": parts.tail,
        }
        for key, value in parts.fields.items():
            fields.setdefault(key, value)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


@dataclass(slots=True)
class _Window:
    began_s: float
    lines: int = 0
    suppressed: int = 0


@dataclass(slots=True)
class RepeatLimit:
    """Decides which lines are written. Time is an argument, so that tests need none."""

    _windows: OrderedDict[tuple[str, int, object], _Window] = field(default_factory=OrderedDict)
    _texts: OrderedDict[tuple[str, int, str], _Window] = field(default_factory=OrderedDict)

    def admit(self, record: logging.LogRecord, now_s: float) -> str | None:
        """Returns None to suppress the line, else what to add to it: how many like it were suppressed before."""
        if record.levelno >= logging.CRITICAL:
            return ""
        template = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        window = self._window(self._windows, (record.name, record.levelno, template), now_s, WINDOW_S, FORMATS_MAX)
        text = self._window(self._texts, (record.name, record.levelno, record.getMessage()), now_s, REPEAT_S, TEXTS_MAX)
        if window.lines >= BURST or text.lines:
            window.suppressed += 1
            return None
        count, window.suppressed = window.suppressed, 0
        window.lines += 1
        text.lines += 1
        return f" ({count} more lines like this were suppressed)" if count else ""

    @staticmethod
    def _window(
        windows: OrderedDict[Any, _Window], key: tuple[str, int, object], now_s: float, length_s: float, most: int
    ) -> _Window:
        """The window of this key; a new one keeps the count of suppressed lines."""
        window = windows.get(key)
        if window is None or now_s - window.began_s >= length_s:
            window = _Window(now_s, suppressed=0 if window is None else window.suppressed)
            windows[key] = window
            if len(windows) > most:
                windows.popitem(last=False)
        windows.move_to_end(key)
        return window


class BoundedHandler(logging.StreamHandler[IO[str]]):
    """Writes lines within the bounds of `RepeatLimit`."""

    def __init__(self, stream: IO[str], now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._limit = RepeatLimit()
        self._now_s = now_s

    def emit(self, record: logging.LogRecord) -> None:
        suffix = self._limit.admit(record, self._now_s())
        if suffix is None:
            return
        if suffix:
            record = logging.makeLogRecord(record.__dict__)
            record.msg = f"{record.msg}{suffix}"
        super().emit(record)


def set_up(node: int, *, level: str, form: str, stream: IO[str] | None = None) -> Names:
    """For the whole process, once. The result takes the names of topics when they are known."""
    names = Names()
    handler = BoundedHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(node, names) if form == "json" else TextLines(node, names))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # Every call that a client breaks off would be a line.
    logging.getLogger("grpc").setLevel(logging.ERROR)
    return names
