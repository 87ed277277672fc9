"""All operations, all trials of each, and every place of the product that changes a disk or a store.

A place is reached by an operation that nothing strikes, or only by trials (`WHEN_STRUCK`). `make crashes` fails for a
place that no trial reaches, unless `NOT_REACHED` has the reason.
"""

import ast
from collections.abc import Iterator
from enum import Enum
from functools import cache
from random import Random

from support.crashes import log_stories, raft_stories
from support.crashes.strikes import CRASH_CALLS, ROOT, Crash
from support.crashes.trials import SEED, Operation, Report, Trial, crashes, failures, run_trial
from tidelog.world.simulated import Loss

SEEDS_OF_LOSS = 3
"""A loss of some writes is drawn: so many draws for each point."""
PACKAGES = ("log", "raft", "metadata", "replication", "coordinator", "services")
METHODS = {
    "rename": ("disk",),
    "remove": ("disk",),
    "remove_directory": ("disk",),
    "make_directory": ("disk",),
    "sync": ("disk",),
    "sync_many": ("disk",),
    "truncate": ("file",),
    "commit": ("store", "context"),
}
"""What changes a disk or a store, and how the names of what it is called on end."""

Place = tuple[str, int, int]


class Mode(Enum):
    CRASH = "crash"
    ERROR = "error"
    DOUBLE = "double"
    """A crash at every change, and one at every change of the start that follows."""


@cache
def all_operations() -> tuple[Operation, ...]:
    return (*log_stories.operations(), *raft_stories.operations())


@cache
def report_of(operation: Operation) -> Report:
    """Of the operation that nothing strikes."""
    return run_trial(Trial(operation))


def trials_of(operation: Operation, mode: Mode) -> Iterator[Trial]:
    operations = report_of(operation).operations
    if mode is Mode.ERROR:
        for fail in failures(operations):
            yield Trial(operation, fail)
        return
    for crash in crashes(_changes_of(operations) + 1):  # the last: the power goes when it is done
        if mode is Mode.CRASH:
            for seed in range(SEEDS_OF_LOSS if crash.loss is Loss.SOME else 1):
                yield Trial(operation, crash, seed=SEED + seed)
        elif crash.loss is not Loss.TORN:
            yield from _double(operation, crash)


def _double(operation: Operation, crash: Crash) -> Iterator[Trial]:
    changes = _changes_of(run_trial(Trial(operation, crash)).reopening)
    for second in crashes(changes, (Loss.ALL, Loss.SOME)):
        yield Trial(operation, crash, second)


def draw_trial(draw: Random, mode: Mode) -> Trial:
    """Any operation, any trial of it."""
    operation = draw.choice(all_operations())
    if mode is not Mode.DOUBLE:
        return draw.choice(list(trials_of(operation, mode)))
    crash = draw.choice(list(crashes(_changes_of(report_of(operation).operations) + 1)))
    return draw.choice([*_double(operation, crash), Trial(operation, crash)])


def _changes_of(operations: list[str]) -> int:
    return sum(name in CRASH_CALLS for name in operations)


@cache
def places() -> dict[Place, str]:
    """Every call of the product that changes a disk or a store: file and lines, and its name for people."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = str(path.relative_to(ROOT))
            for scope in ast.walk(ast.parse(path.read_text())):
                if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                    for call in ast.walk(scope):
                        if isinstance(call, ast.Call) and _is_change(call):
                            place = (relative, call.lineno, call.end_lineno or call.lineno)
                            found[place] = f"{relative}:{scope.name}: {ast.unparse(call.func)}"
    return found


def _is_change(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value).rpartition(".")[2].lstrip("_")
    if call.func.attr == "open":
        return owner == "disk" and any(keyword.arg == "create" for keyword in call.keywords)
    return owner in METHODS.get(call.func.attr, ())


def missed_places(lines: set[tuple[str, int]]) -> set[str]:
    """Those that none of these lines is in."""
    return {
        name
        for (path, first, last), name in places().items()
        if not any((path, line) in lines for line in range(first, last + 1))
    }


WHEN_STRUCK = frozenset(
    {
        "log/cleaner.py:discard: self._disk.remove",
        "log/directories.py:empty_directory: disk.remove",
        "log/log_move.py:_decide: self._home.store.commit",
        "log/log_move.py:_finish_name: target.disk.remove_directory",
        "log/log_move.py:_take_over: target.disk.rename",
        "log/recovery.py:_open_damaged: self._store.commit",
        "log/recovery.py:_open_sound: self._disk.make_directory",
        "log/recovery.py:_open_sound: self._disk.remove_directory",
        "log/recovery.py:_sync: self._store.commit",
        "log/recovery_checkpoint.py:_store_epochs: self._context.commit",
        "log/recovery_files.py:_finish: self._disk.rename",
        "log/recovery_files.py:_undo_names: self._disk.open",
        "log/recovery_files.py:_undo_names: self._disk.rename",
        "log/recovery_files.py:copy_file: disk.remove",
        "log/recovery_files.py:finish_changes: self._disk.sync_many",
        "log/recovery_files.py:finish_changes: store.commit",
        "log/recovery_files.py:rewrite_file: disk.rename",
        "log/segment_changes.py:_rename_away: context.disk.remove",
        "metadata/tail.py:_read_tails: self._disk.remove",
        "raft/directory_identity.py:check_identity: disk.make_directory",
        "raft/snapshots.py:open: self._disk.remove",
        "raft/snapshots.py:write: self._disk.remove",
        "raft/storage.py:_restore_tail: self.store.commit",
        "raft/storage.py:_truncate_at_start: self.store.commit",
    }
)
_INDEX = "an index file that does not fit its segment; test_recovery.py and test_mutated_segments.py damage them"
_ABORTED = "a transaction index that is lost; test_recovery.py loses it"
_DELETE = "nothing but tests deletes a log that is not in a directory of logs"
_COPY = "writes or removes a copy of a rotten segment, which replaces it by one rename; not struck yet"
NOT_REACHED = {
    "log/recovery.py:_is_restored: self._disk.sync_many": _COPY,
    "log/index_files.py:write_index_entries: file.truncate": _INDEX,
    "log/index_rebuilder.py:rebuild_locked: context.disk.remove": _INDEX,
    "log/log.py:delete: self.disk.remove_directory": _DELETE,
    "log/log.py:delete: self.disk.sync_many": _DELETE,
    "log/log.py:delete: self.store.commit": _DELETE,
    "log/recovery.py:_open_clean: self._disk.sync_many": _INDEX,
    "log/recovery_files.py:rebuild_aborted: self._disk.open": _ABORTED,
    "log/recovery_files.py:rebuild_aborted: self._disk.remove": _ABORTED,
    "log/recovery_files.py:rebuild_aborted: self._disk.sync_many": _ABORTED,
    "log/segment_restore.py:install: context.commit": _COPY,
    "log/segment_restore.py:install: context.disk.sync_many": _COPY,
    "log/segment_restore.py:replace_file: disk.rename": _COPY,
    "log/segment_restore.py:write_piece: disk.open": _COPY,
    "log/segment_restore.py:write_piece: file.truncate": _COPY,
    "raft/snapshots.py:_drop_part: self._disk.remove": "a received snapshot that rots; test_storage_snapshots.py",
    "raft/snapshots.py:set_aside: self._disk.rename": "a snapshot that rots; test_storage_snapshots.py",
    "raft/snapshots.py:set_aside: self._disk.sync_many": "a snapshot that rots; test_storage_snapshots.py",
}
