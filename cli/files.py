"""Files that are only read: a log that is dumped may be damaged or in use, and must not change."""

import os
from collections.abc import Callable
from types import TracebackType

from tidelog.log.dump import FileKind, parse_name


class ReadOnlyFile:
    """A file opened to read. Its size is taken when it is opened: what a live writer adds later is not seen."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    @property
    def size(self) -> int:
        return self._size

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file."""
        wanted = min(length, self._size - position)
        parts: list[bytes] = []
        while wanted > 0:
            part = os.pread(self._descriptor, wanted, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Watched:
    """A file that says how far it was read, each byte once, however often it is read."""

    def __init__(self, file: ReadOnlyFile, on_read: Callable[[int], None]) -> None:
        self._file = file
        self._on_read = on_read
        self._end = 0

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, position: int, length: int) -> bytes:
        data = self._file.read(position, length)
        more = position + len(data) - self._end
        if more > 0:
            self._end += more
            self._on_read(more)
        return data


class LogDirectory:
    """The live files of one log, opened to read; closes them when it ends."""

    def __init__(self, path: str) -> None:
        self.files: dict[str, ReadOnlyFile] = {}
        try:
            for name in sorted(filter(parse_name, os.listdir(path)), key=_place):
                self.files[name] = ReadOnlyFile(os.path.join(path, name))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def __enter__(self) -> "LogDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place(name: str) -> tuple[int, int]:
    """Segment by segment, and in each the log before its indexes."""
    parsed = parse_name(name)
    assert parsed is not None, "only files of a log have a place"
    kind, base = parsed
    return base, list(FileKind).index(kind)


def is_log_directory(path: str) -> bool:
    """Whether a directory holds the files of a log."""
    return any(parse_name(name) is not None for name in os.listdir(path))
