"""A program that keeps its offsets in a database: `python ledger_process.py BOOTSTRAP GROUP TOPIC FILE COUNT`.

Each record and the offset behind it are one transaction of SQLite; on assignment it goes on where the database says.
It ends when the table has COUNT rows.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import tidelog


def rows_in(file: str | Path) -> list[tuple[int, int]]:
    """(partition, offset) of each row that is there by now."""
    store = sqlite3.connect(file, timeout=30)
    try:
        return list(store.execute("select part, at from rows"))
    except sqlite3.OperationalError:
        return []  # the table is not there yet
    finally:
        store.close()


def main(bootstrap: str, group: str, topic: str, file: str, count: str) -> None:
    store = sqlite3.connect(file, isolation_level=None, timeout=30)
    store.execute("pragma busy_timeout = 30000")
    store.execute("create table if not exists offsets (part integer primary key, next integer)")
    store.execute("create table if not exists rows (value text, part integer, at integer)")

    with tidelog.Consumer(bootstrap, group=group, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:

        def assigned(names: list[tidelog.TopicPartition]) -> None:
            for name in names:
                found = store.execute("select next from offsets where part = ?", (name.partition,)).fetchone()
                consumer.seek(name, 0 if found is None else found[0])

        consumer.subscribe([topic], on_assigned=assigned)
        while store.execute("select count(*) from rows").fetchone()[0] < int(count):
            for record in consumer.poll(0.5, 20):
                store.execute("begin immediate")
                store.execute(
                    "insert into rows values (?, ?, ?)",
                    ((record.value or b"").decode(), record.partition, record.offset),
                )
                store.execute("insert or replace into offsets values (?, ?)", (record.partition, record.offset + 1))
                store.execute("commit")


if __name__ == "__main__":
    main(*sys.argv[1:])
