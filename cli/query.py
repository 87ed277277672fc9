"""`tidelog query SQL`: runs one SELECT over topics, by DuckDB in this process. Keys of the JSON document are in
docs/cli.md.

The tables of a query are topics; a name with dots or dashes needs double quotes. `read_topic` reads each into memory
before the query runs, from `--since` to its current end: a topic with more records than `--records-max` is rejected
before a byte of it is read. The query may read files (`read_parquet('...')`), and changes nothing.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import bootstrap_of, client_errors, timeout_ms
from tidelog.cli.consume import timestamp_of
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.log_rows import bytes_text
from tidelog.cli.main import CommandError, UsageError
from tidelog.cli.messages import report
from tidelog.cli.progress import Progress
from tidelog.cli.record_printer import text_of
from tidelog.client.admin.threaded import Admin
from tidelog.client.arrow import MissingExtraError, arrow
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.options import Isolation
from tidelog.client.read_arrow import TIMEOUT_S, read_topic

BATCH_ROWS = 1_000
TOPICS_MAX = 100
"""Topics per query."""
_SETTINGS = {
    "python_enable_replacements": "false",  # a table is a topic, never a variable of this module
    "autoinstall_known_extensions": "false",  # nothing is downloaded
    "temp_directory": "",  # what does not fit memory is refused, not written into the current directory
}
_BARE_OFFSET = re.compile(r'(?<!")\boffset\b(?!")', re.IGNORECASE)


def run(options: argparse.Namespace) -> int:
    for option, value in (("--limit", options.limit), ("--records-max", options.records_max)):
        if value < 1:
            raise UsageError(f"{option} {value}: 1 at least")
    since_ms = None if options.since is None else timestamp_of(options.since, "--since")
    try:
        duckdb = _duckdb()
        arrow()
    except MissingExtraError as error:
        raise CommandError(str(error)) from None
    with duckdb.connect(":memory:", config=_SETTINGS) as database:
        database.execute("set TimeZone = 'UTC'")
        names = _tables(database, options.query)
        with client_errors():
            _load(options, database, names, since_ms)
        try:
            found = database.sql(options.query)
            if found is None:
                raise UsageError("the query returns no result set")
            reader = found.to_arrow_reader(BATCH_ROWS)
            return _show(options, reader)
        except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException) as error:
            raise UsageError(_one_line(error)) from error
        except duckdb.Error as error:
            raise CommandError(_one_line(error)) from error


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise MissingExtraError("this needs duckdb: pip install 'tidelog[query]'") from None
    return duckdb


def _one_line(error: Exception) -> str:
    """Return the error without its position marker, which takes three lines."""
    return " ".join(str(error).partition("\n\n")[0].split())


# Topics and their content.


def _tables(database: Any, query: str) -> dict[str, bool]:
    """Return the table names of a query -> whether it defines the table itself (WITH)."""
    ((tree,),) = database.execute("select json_serialize_sql($query)", {"query": query}).fetchall()
    document = json.loads(tree)
    if document["error"]:
        says = document["error_message"]
        if says.startswith("Only SELECT"):
            raise UsageError("one SELECT and nothing else: a topic cannot be changed by a query")
        hint = '; offset is a word of SQL: as a column write "offset"' if _BARE_OFFSET.search(query) else ""
        raise UsageError(f"{' '.join(says.split())}{hint}")
    if len(document["statements"]) != 1:
        raise UsageError("one SELECT and nothing else")
    named: dict[str, None] = {}
    defined: set[str] = set()
    for node in _nodes(document):
        if "cte_map" in node:
            defined.update(row["key"].lower() for row in node["cte_map"].get("map", ()))
        if node.get("type") != "BASE_TABLE":
            continue
        path = [node[part] for part in ("catalog_name", "schema_name", "table_name") if node[part]]
        if len(path) > 1:
            whole = ".".join(path)
            raise UsageError(f'{whole}: a topic with a dot in its name stands in double quotes: "{whole}"')
        named[path[0]] = None
    if len(named) > TOPICS_MAX:
        raise UsageError(f"{len(named)} tables: {TOPICS_MAX} at most")
    return {name: name.lower() in defined for name in named}


def _nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Yield every object of a document, without recursion: a query may be deep."""
    left = [tree]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _load(options: argparse.Namespace, database: Any, names: dict[str, bool], since_ms: int | None) -> None:
    if not names:
        return
    bootstrap, limit_ms = bootstrap_of(options), timeout_ms(options)
    with Admin(list(bootstrap), default_api_timeout_ms=limit_ms, bootstrap_wait_ms=0) as admin:
        topics = {row.name for row in admin.list_topics(internal=True)}
    taken: dict[str, str] = {}
    for name, is_defined in names.items():
        if name not in topics:
            if is_defined:
                continue
            near = sorted(topic for topic in topics if topic.lower() == name.lower())
            raise CommandError(f"there is no topic '{name}'" + (f", but '{near[0]}'" if near else ""))
        other = taken.setdefault(name.lower(), name)
        if other != name:
            raise UsageError(f"'{other}' and '{name}' are one name in SQL: query one of them at a time")
        _check_size(name, bootstrap, since_ms, options.records_max, limit_ms)
        database.register(name, _read(name, bootstrap, since_ms, options.isolation))


def _read(topic: str, bootstrap: Sequence[str], since_ms: int | None, isolation: Isolation) -> Any:
    with Progress(f"reading {topic}", unit="records") as progress:
        return read_topic(
            topic,
            since_ms,
            None,
            partitions=None,
            columns=None,
            timeout=TIMEOUT_S,
            on_read=progress.show,
            bootstrap=list(bootstrap),
            isolation=isolation,
        )


def _check_size(topic: str, bootstrap: Sequence[str], since_ms: int | None, records_max: int, limit_ms: int) -> None:
    """Offsets give the maximum number of records."""
    with Consumer(list(bootstrap), default_api_timeout_ms=limit_ms) as consumer:
        partitions = consumer.partitions_for(topic)
        ends = consumer.end_offsets(*partitions)
        starts = consumer.beginning_offsets(*partitions)
        if since_ms is not None:
            first = consumer.offsets_for_times(dict.fromkeys(partitions, since_ms))
            starts |= {name: ends[name] if found is None else found.offset for name, found in first.items()}
    count = sum(max(0, ends[name] - starts[name]) for name in partitions)
    if count > records_max:
        raise CommandError(
            f"'{topic}' has {count:,} records, and all of them would be held in memory: begin later (--since 1h), or "
            f"allow more than {records_max:,} (--records-max)"
        )


# Rows.


def _show(options: argparse.Namespace, reader: Any) -> int:
    columns = [field.name for field in reader.schema]
    rows = islice(_rows(reader), options.limit + 1)
    if options.output == "json":
        code = _show_json(options.limit, reader.schema, columns, list(rows))
    elif options.output == "csv":
        code = _show_csv(options.limit, columns, rows)
    else:
        code = _show_table(options.limit, reader.schema, columns, rows)
    return code


def _rows(reader: Any) -> Iterator[tuple[Any, ...]]:
    for batch in reader:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _tell_more(limit: int) -> None:
    report(f"the first {table.count(limit, 'row')} only; --limit shows more")


def _until(limit: int, rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for number, row in enumerate(rows):
        if number == limit:
            _tell_more(limit)
            return
        yield row


def _show_json(limit: int, schema: Any, columns: list[str], rows: list[tuple[Any, ...]]) -> int:
    if twice := [name for number, name in enumerate(columns) if name in columns[:number]]:
        raise UsageError(f"two columns are called '{twice[0]}': rename one (AS)")
    document = {
        "columns": [{"name": field.name, "type": str(field.type)} for field in schema],
        "rows": [dict(zip(columns, map(_plain, row), strict=True)) for row in rows[:limit]],
        "count": min(len(rows), limit),
        "is_cut": len(rows) > limit,
    }
    print(json.dumps(document, indent=2))
    return EXIT_OK


def _show_csv(limit: int, columns: list[str], rows: Iterator[tuple[Any, ...]]) -> int:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in _until(limit, rows):
        writer.writerow([_csv_cell(value) for value in row])
    return EXIT_OK


def _show_table(limit: int, schema: Any, columns: list[str], rows: Iterator[tuple[Any, ...]]) -> int:
    from pyarrow import types

    figures = [
        field.name
        for field in schema
        if types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
    ]
    table.write(
        sys.stdout, columns, ([_table_cell(value) for value in row] for row in _until(limit, rows)), right=figures
    )
    return EXIT_OK


def _plain(value: Any) -> Any:
    """Convert a value for JSON: bytes as text or {"base64": ...}, times as ISO 8601, decimals as numbers."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return text_of(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | time):
        return _time(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value)


def _time(value: datetime | date | time) -> str:
    text = value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value.isoformat()
    return text.replace("+00:00", "Z")


def _table_cell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, Decimal)):
        return value
    if isinstance(value, (bytes, str)):
        return bytes_text(value.encode() if isinstance(value, str) else value)
    return _csv_cell(value)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"0x{value.hex()}"
    if isinstance(value, Decimal):
        return str(value)
    plain = _plain(value)
    return json.dumps(plain) if isinstance(plain, (dict, list)) else plain
