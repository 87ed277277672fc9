"""What a node writes to stderr: one line for each event, `key=value` for a person or JSON for a program."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO node=1 raft.driver: epoch=3 role=leader`."""

    def __init__(self, node: int) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("tidelog.")
        text = f"{_stamp(record)} {record.levelname} node={self._node} {name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonLines(logging.Formatter):
    def __init__(self, node: int) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def set_up(node: int, *, level: str, form: str, stream: IO[str] | None = None) -> None:
    """For the whole process, once."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(node) if form == "json" else TextLines(node))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # Every call that a client breaks off would be a line.
    logging.getLogger("grpc").setLevel(logging.ERROR)
