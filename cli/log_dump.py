"""`tidelog log dump PATH`: what is in the files of a log, for a person or a program; `--verify` checks them.

Keys of the JSON document are listed in docs/cli.md. Problems are data (stdout); the verdict is talk (stderr).
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from tidelog.cli import table
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.files import LogDirectory, ReadOnlyFile, Watched, is_log_directory
from tidelog.cli.group_records import group_document, group_text
from tidelog.cli.json_stream import JsonStream
from tidelog.cli.log_rows import Row, batch_row, bytes_text, entry_rows, record_rows, time_text
from tidelog.cli.main import UsageError
from tidelog.cli.progress import Progress
from tidelog.cli.stored_state import StateReader, state_document, state_lines
from tidelog.log.batch import Record
from tidelog.log.dump import FileKind, Problem, Source, StoredBatch, parse_name, read_batches
from tidelog.log.stored_state import StoredState
from tidelog.log.verify import LogVerifier
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset

T = TypeVar("T")

KIND_NAMES = {
    FileKind.SEGMENT: "segment",
    FileKind.OFFSET_INDEX: "offset index",
    FileKind.TIME_INDEX: "time index",
    FileKind.TRANSACTION_INDEX: "transaction index",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One log to dump: its directory, and perhaps only one file of it."""

    directory: str
    name: str | None = None


class Output(Protocol):
    """A form of the dump. Calls nest: begin, (begin_log, file..., end_log)..., end."""

    def begin(self, path: str) -> None: ...

    def begin_log(self, directory: str, stored: StoredState | None) -> None: ...

    def file(self, name: str, file: Source) -> list[Problem]: ...

    def end_log(self) -> None: ...

    def end(self, problems: list[Problem]) -> None: ...


def run(options: argparse.Namespace) -> int:
    targets = find_targets(options.path)
    output: Output = JsonOutput(options) if options.output == "json" else TableOutput(options)
    problems: list[Problem] = []
    output.begin(options.path)
    with StateReader() as states, Reading(targets, is_shown=options.output != "json" or not sys.stdout.isatty()) as bar:
        for target in targets:
            bar.wipe()
            found = _dump_log(target, output, states, bar, verify=options.verify)
            if len(targets) > 1:
                label = os.path.basename(target.directory)
                found = [Problem(f"{label}/{problem.file}", problem.position, problem.what) for problem in found]
            problems += found
    output.end(problems)
    sys.stdout.flush()
    if problems:
        print(f"tidelog: {len(problems)} problem{'s' if len(problems) > 1 else ''} found", file=sys.stderr)
        return EXIT_FAILURE
    if options.verify:
        print(f"tidelog: {options.path}: nothing wrong", file=sys.stderr)
    return EXIT_OK


def find_targets(path: str) -> list[Target]:
    """The logs that a path means: one file of one, one, or all of a node's log directory."""
    if not os.path.exists(path):
        raise UsageError(f"{path}: no such file or directory")
    if not os.path.isdir(path):
        directory, name = os.path.split(path)
        if parse_name(name) is None:
            raise UsageError(
                f"{path}: not a file of a log; those are named by 20 digits and .log, .index, .timeindex or .txnindex"
            )
        return [Target(directory or ".", name)]
    if is_log_directory(path):
        return [Target(os.path.normpath(path))]
    inside = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    logs = [Target(entry) for entry in inside if os.path.isdir(entry) and is_log_directory(entry)]
    if not logs:
        raise UsageError(f"{path}: neither a log's directory nor a directory of logs")
    return logs


class Reading:
    """How much of all the logs was verified, on a bar. Only segments count: they are nearly everything."""

    def __init__(self, targets: list[Target], *, is_shown: bool) -> None:
        self._progress = Progress("verifying")
        self._progress.is_on &= is_shown
        self._total = sum(map(_segment_bytes, targets)) if self._progress.is_on else 0
        self._done = 0

    def watched(self, files: Mapping[str, ReadOnlyFile]) -> Mapping[str, Source]:
        return {name: Watched(file, self._read) if is_segment(name) else file for name, file in files.items()}

    def _read(self, more: int) -> None:
        self._done += more
        self._progress.show(self._done, self._total, says=f"{self._done >> 20:,} of {self._total >> 20:,} MiB")

    def wipe(self) -> None:
        """Lines of the dump come."""
        self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()


def is_segment(name: str) -> bool:
    parsed = parse_name(name)
    return parsed is not None and parsed[0] is FileKind.SEGMENT


def _segment_bytes(target: Target) -> int:
    names = os.listdir(target.directory) if target.name is None else [target.name]
    return sum(os.path.getsize(os.path.join(target.directory, name)) for name in filter(is_segment, names))


def _dump_log(target: Target, output: Output, states: StateReader, bar: Reading, *, verify: bool) -> list[Problem]:
    """Dump one log and verify it if asked to; returns what is wrong."""
    with LogDirectory(target.directory) as log:
        stored = states.read(target.directory) if target.name is None else None
        output.begin_log(target.directory, stored)
        problems: list[Problem] = []
        for name, file in log.files.items():
            if target.name in (None, name):
                problems += output.file(name, file)
        output.end_log()
        return _verify_log(target, bar.watched(log.files), stored) if verify else problems


def _verify_log(target: Target, files: Mapping[str, Source], stored: StoredState | None) -> list[Problem]:
    if target.name is None:
        verifier = LogVerifier(files, stored)
        verifier.run()
        return verifier.problems
    # One file: it is compared with its own segment, and only its own problems are reported.
    digits = target.name.partition(".")[0]
    verifier = LogVerifier({name: file for name, file in files.items() if name.startswith(digits)})
    verifier.run()
    return [problem for problem in verifier.problems if problem.file == target.name]


def _parsed(name: str) -> tuple[FileKind, Offset]:
    parsed = parse_name(name)
    assert parsed is not None, "only files of a log are opened"
    return parsed


class JsonOutput:
    """One document; rows are written as they are read."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._decodes_groups: bool = options.offsets_decoder
        self._with_records: bool = options.records or options.offsets_decoder
        self._json = JsonStream(sys.stdout)

    def begin(self, path: str) -> None:
        self._json.open_object()
        self._json.put("path", path)
        self._json.open_array("logs")

    def begin_log(self, directory: str, stored: StoredState | None) -> None:
        self._json.open_object()
        self._json.put("directory", directory)
        self._json.put("state", None if stored is None else state_document(stored))
        self._json.open_array("files")

    def file(self, name: str, file: Source) -> list[Problem]:
        kind, base = _parsed(name)
        self._json.open_object()
        self._json.put("name", name)
        self._json.put("kind", KIND_NAMES[kind])
        self._json.put("base_offset", base)
        self._json.put("size", file.size)
        self._json.open_array("batches" if kind is FileKind.SEGMENT else "entries")
        problems: list[Problem] = []
        for row in self._batches(file, name) if kind is FileKind.SEGMENT else entry_rows(kind, base, file, name):
            if isinstance(row, Problem):
                problems.append(row)
            else:
                self._json.item(row)
        self._json.close()
        self._json.close()
        return problems

    def _batches(self, file: Source, name: str) -> Iterator[Row | Problem]:
        for batch in read_batches(file, name):
            if isinstance(batch, Problem):
                yield batch
                continue
            row = batch_row(batch)
            if self._with_records:
                try:
                    row["records"] = record_rows(batch, decodes_groups=self._decodes_groups)
                except TidelogError as error:
                    row["records"] = None
                    yield Problem(name, batch.position, f"records do not decode: {error}")
            yield row

    def end_log(self) -> None:
        self._json.close()
        self._json.close()

    def end(self, problems: list[Problem]) -> None:
        self._json.close()
        self._json.put(
            "problems",
            [{"file": problem.file, "position": problem.position, "what": problem.what} for problem in problems],
        )
        self._json.close()


BATCH_HEADINGS = (
    "position",
    "size",
    "offsets",
    "count",
    "epoch",
    "codec",
    "largest time",
    "producer",
    "sequence",
    "kind",
)
BATCH_RIGHT = ("position", "size", "offsets", "count", "epoch", "sequence")


class TableOutput:
    """Tables for a person. With `--verify` but without `--records` a line for each file: the verdict is asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._decodes_groups: bool = options.offsets_decoder
        self._with_records: bool = options.records or options.offsets_decoder
        self._is_brief: bool = options.verify and not self._with_records
        self._out = sys.stdout

    def begin(self, path: str) -> None:
        pass

    def begin_log(self, directory: str, stored: StoredState | None) -> None:
        self._out.write(table.bold(directory, self._out) + "\n")
        if stored is not None:
            for line in state_lines(stored):
                self._out.write(f"  {line}\n")

    def file(self, name: str, file: Source) -> list[Problem]:
        kind, base = _parsed(name)
        self._out.write(f"{name}: {KIND_NAMES[kind]}, {file.size:,} bytes\n")
        if self._is_brief:
            return []
        problems: list[Problem] = []
        if kind is not FileKind.SEGMENT:
            self._entries(entry_rows(kind, base, file, name), problems)
        elif self._with_records:
            self._records(file, name, problems)
        else:
            rows = _sound(read_batches(file, name), problems)
            table.write(self._out, BATCH_HEADINGS, map(_batch_cells, rows), right=BATCH_RIGHT, indent="  ")
        return problems

    def _entries(self, rows: Iterator[Row | Problem], problems: list[Problem]) -> None:
        first = next(rows, None)
        while isinstance(first, Problem):
            problems.append(first)
            first = next(rows, None)
        if first is None:
            return
        headings = [name.replace("_", " ") for name in first]
        cells = (list(row.values()) for row in _chain(first, _sound(rows, problems)))
        table.write(self._out, headings, cells, right=headings, indent="  ")

    def _records(self, file: Source, name: str, problems: list[Problem]) -> None:
        for batch in _sound(read_batches(file, name), problems):
            pairs = zip(BATCH_HEADINGS, _batch_cells(batch), strict=True)
            self._out.write("  batch " + ", ".join(f"{heading} {cell}" for heading, cell in pairs if cell) + "\n")
            try:
                records = batch.records()
            except TidelogError as error:
                problems.append(Problem(name, batch.position, f"records do not decode: {error}"))
                continue
            rows = (
                (
                    record.offset,
                    time_text(record.timestamp),
                    *self._shown(record),
                    " ".join(f"{key}={bytes_text(value)}" for key, value in record.headers),
                )
                for record in records
            )
            headings = ("offset", "time", "key", "value", "headers")
            table.write(self._out, headings, rows, right=("offset",), indent="    ")

    def _shown(self, record: Record) -> tuple[str, str]:
        """Key and value."""
        group = group_document(record.key, record.value) if self._decodes_groups else None
        return (bytes_text(record.key), bytes_text(record.value)) if group is None else group_text(group)

    def end_log(self) -> None:
        pass

    def end(self, problems: list[Problem]) -> None:
        for problem in problems:
            self._out.write(f"{table.red('problem', self._out)}: {problem}\n")


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


def _sound(found: Iterator[T | Problem], problems: list[Problem]) -> Iterator[T]:
    """What is no problem; problems are put aside."""
    for item in found:
        if isinstance(item, Problem):
            problems.append(item)
        else:
            yield item


def _batch_cells(batch: StoredBatch) -> tuple[object, ...]:
    header = batch.header
    row = batch_row(batch)
    kind = batch.marker or ("transactional" if header.is_transactional else "data")
    return (
        batch.position,
        header.size,
        f"{header.base_offset}-{header.last_offset}",
        header.count,
        header.leader_epoch,
        row["codec"],
        time_text(header.max_timestamp),
        f"{header.producer_id}/{header.producer_epoch}" if header.has_producer else None,
        header.base_sequence if header.has_producer and not header.is_control else None,
        kind,
    )
