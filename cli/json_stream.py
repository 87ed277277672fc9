"""One JSON document, written as it is made: a dump may be larger than memory.

out = JsonStream(sys.stdout)
out.open_object()
out.put("path", "a")
out.open_array("batches")
out.item({"offset": 0})
out.close()
out.close()
"""

import json
from typing import IO


class JsonStream:
    """Nested objects and arrays, closed in reverse order; a document that is left open is an error of the caller."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._closings: list[str] = []
        self._first = True

    def open_object(self, key: str | None = None) -> None:
        """Begin an object: the document itself, an array's item, or the value of `key` in the object around it."""
        self._open(key, "{", "}")

    def open_array(self, key: str | None = None) -> None:
        self._open(key, "[", "]")

    def put(self, key: str, value: object) -> None:
        """A key of the object that is open, with a value of plain types."""
        self._separate(key)
        self._stream.write(json.dumps(value))

    def item(self, value: object) -> None:
        """An item of the array that is open."""
        self._separate(None)
        self._stream.write(json.dumps(value))

    def close(self) -> None:
        """End what was opened last; the end of the document ends the line."""
        self._stream.write(self._closings.pop())
        self._first = False
        if not self._closings:
            self._stream.write("\n")

    def _open(self, key: str | None, opening: str, closing: str) -> None:
        self._separate(key)
        self._stream.write(opening)
        self._closings.append(closing)
        self._first = True

    def _separate(self, key: str | None) -> None:
        if not self._first:
            self._stream.write(",\n")
        self._first = False
        if key is not None:
            assert self._closings[-1] == "}", "a key belongs into an object"
            self._stream.write(f"{json.dumps(key)}: ")
