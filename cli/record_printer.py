"""Prints records as the options of `tidelog consume` say. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import base64
import json
import sys
from typing import Any

from tidelog.cli.json_stream import JsonStream
from tidelog.cli.record_format import RecordFormat, bytes_or_null, headers_text
from tidelog.client.record import ConsumerRecord
from tidelog.log.columns import Record


def text_of(data: bytes | None) -> Any:
    """For JSON: text where it is UTF-8, else an object with base64."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def record_document(topic: str, partition: int, record: Record | ConsumerRecord) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text_of(record.key),
        "value": text_of(record.value),
        "headers": [{"key": name, "value": text_of(value)} for name, value in record.headers],
    }


class Printer:
    """Prints records to stdout as the options say. `close` ends a JSON document, however reading ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._separator: bytes = options.key_separator.encode()
        self._format = None if options.format is None else RecordFormat(options.format)
        self._out = sys.stdout.buffer
        self._json: JsonStream | None = None
        if options.output == "json":
            self._json = JsonStream(sys.stdout)
            self._json.open_object()
            self._json.put("topic", options.topic[0] if len(options.topic) == 1 else None)
            self._json.open_array("records")

    def put(self, topic: str, partition: int, record: Record | ConsumerRecord) -> None:
        if self._json is not None:
            self._json.item(record_document(topic, partition, record))
        elif self._options.output == "jsonl":
            sys.stdout.write(json.dumps(record_document(topic, partition, record)) + "\n")
        elif self._format is not None:
            self._out.write(self._format.apply(topic, partition, record))
        else:
            self._out.write(self._line(partition, record))

    def _line(self, partition: int, record: Record | ConsumerRecord) -> bytes:
        parts = []
        if self._options.offsets:
            parts += [str(partition).encode(), str(record.offset).encode(), str(record.timestamp).encode()]
        if self._options.headers:
            parts.append(headers_text(record.headers).encode())
        if self._options.keys:
            parts.append(bytes_or_null(record.key))
        parts.append(bytes_or_null(record.value))
        return self._separator.join(parts) + b"\n"

    def flush(self) -> None:
        sys.stdout.flush()
        self._out.flush()

    def close(self, count: int) -> None:
        if self._json is not None:
            self._json.close()
            self._json.put("count", count)
            self._json.close()
        self.flush()
