"""The operations of the logs of a node: what comes before each, what it does, what must be there afterwards.

The state of a log is its start and the records from there on. `Expectation` knows the states before and after the
operation, from its reference run. What a start finds is a prefix of one of the two, not shorter than both are and than
what was acknowledged. Kept copies count where the story says so.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

from support.crashes.trials import Operation, Outcome, Trial, run_trial
from support.logs.node_logs import Host, directory_id, log_id
from support.logs.single_log import SMALL, idempotent
from tidelog.log.batch import Record, check_batch, decode, encode, read_header
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.directories import list_logs
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.model.errors import StorageError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import SimNode

HOUR_MS = 3_600_000
QUIET = LogsConfig(checkpoint_interval_ms=HOUR_MS)
"""Nothing happens by itself while the calls of an operation are counted."""
COMPACT = replace(
    SMALL, cleanup_delete=False, cleanup_compact=True, min_cleanable_dirty_ratio=0.0, delete_retention_ms=HOUR_MS
)
LEFT_OVERS = (".cleaned", ".swap", ".deleted", ".moving", ".new")
ID, OTHER = log_id(1), log_id(2)
Rows = tuple[tuple[int, bytes | None, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class State:
    """What readers see of a log."""

    start: int
    end: int
    rows: Rows

    def continues(self, found: "State", least: int) -> bool:
        """Whether `found` is this, or has only lost its end down to `least`."""
        return (
            found.start == self.start
            and least <= found.end <= self.end
            and found.rows == tuple(row for row in self.rows if row[0] < found.end)
        )


States = dict[PartitionId, State]


@dataclass
class Expectation:
    before: States = field(default_factory=dict)
    after: States = field(default_factory=dict)
    also: list[State] = field(default_factory=list)
    """States between the two."""

    def check(self, story: "LogStory", found: States, *, is_done: bool) -> None:
        for log in {*self.before, *self.after, *found}:
            state, before, after = found.get(log), self.before.get(log), self.after.get(log)
            candidates = [after] if is_done else [before, after, *self.also, *story.also]
            ends = [other.end for other in candidates if other is not None]
            floor = min(ends, default=0) if story.floor is None or is_done else story.floor
            least = max(floor, story.acknowledged.get(log, 0))
            text = f"{log}: {_short(state)} is neither {_short(before)} nor {_short(after)}, with {least} at least"
            if state is None:
                # A new log of which nothing was acknowledged may be gone.
                assert None in candidates or (least == 0 and not is_done), text
            elif story.compacts and not is_done:
                assert before is not None, "it is compacted"
                assert after is not None, "it is compacted"
                assert state.start == before.start, text
                assert state.end >= least, text
                rows = {row for row in state.rows if row[0] < before.end}
                assert set(after.rows) <= rows <= set(before.rows), text
            else:
                assert any(other is not None and other.continues(state, least) for other in candidates), text


def _short(state: State | None) -> str:
    return "none" if state is None else f"{state.start}..{state.end} with {[row[0] for row in state.rows]}"


def _rows_in(data: bytes) -> set[tuple[int, bytes | None, bytes | None]]:
    """Of the batches up to the first that is not whole."""
    rows, position = set[tuple[int, bytes | None, bytes | None]](), 0
    with suppress(TidelogError):
        while position < len(data):
            size = read_header(data, position).size
            check_batch(data[position : position + size], size_max=1 << 20)
            batch = decode(data[position : position + size], decompressed_bytes_max=1 << 20)
            rows |= {(int(record.offset), record.key, record.value) for record in batch}
            position += size
    return rows


async def state_of(log: Log) -> State:
    rows, offset = set[tuple[int, bytes | None, bytes | None]](), int(log.start_offset)
    while offset < log.end_offset:
        found = await log.read(offset, bytes_max=1 << 20)
        if not found.data:
            break
        rows |= _rows_in(bytes(found.data))
        offset = found.next_offset
    start = int(log.start_offset)
    return State(start, int(log.end_offset), tuple(sorted((row for row in rows if row[0] >= start), key=itemgetter(0))))


async def states_of(logs: Logs) -> States:
    return {log.log_id: await state_of(log) for log in logs.all()}


def host_of(node: SimNode, directories: int) -> Host:
    labels = [f"disk-{number}" for number in range(directories)]
    places = [(node.disk(label), node.store(label), directory_id(at)) for at, label in enumerate(labels)]
    return Host([*places], node.work, node.clock)


async def write(log: Log, count: int, *, keys: int = 5, epoch: int | None = None) -> None:
    """One record in a batch of its own each, by a producer."""
    for _ in range(count):
        at = int(log.end_offset)
        data = encode(
            [Record(0, log.clock.now_ms(), b"k%d" % (at * 7 % keys), b"v%d-" % at + b"x" * 60, ())],
            producer_id=9,
            producer_epoch=0,
            base_sequence=at,
        )
        log.append(data, leader_epoch=max(0, log.epochs.latest) if epoch is None else epoch)


def log_of(logs: Logs, number: PartitionId = ID) -> Log:
    log = logs.get(number)
    assert log is not None, f"{number} is open"
    return log


Step = Callable[["LogStory", Logs], Awaitable[None]]


@dataclass
class LogStory:
    """`fill` is the process before, `act` the operation, each on open logs."""

    act: Step
    fill: Step
    name: str
    config: LogConfig = SMALL
    directories: int = 1
    keeps: bool = False
    """Records that the log no longer has are in kept copies."""
    opens: bool = False
    """The operation is the opening itself."""
    loses: bool = False
    """It loses what was not acknowledged, by itself."""
    compacts: bool = False
    """Records between those of the states before and after may be gone."""
    floor: int | None = None
    """Where a log may end between the states before and after, if that is below both."""
    also: list[State] = field(default_factory=list)
    """States between those before and after it."""
    host: Host | None = None
    logs: Logs | None = None
    error: StorageError | None = None
    """Of the operation, where it can be tried again."""
    homes: dict[PartitionId, Any] = field(default_factory=dict)
    acknowledged: dict[PartitionId, int] = field(default_factory=dict)
    left: States = field(default_factory=dict)
    expectation: Expectation | None = None

    @property
    def labels(self) -> list[str]:
        return [f"disk-{number}" for number in range(self.directories)]

    async def _open(self, node: SimNode) -> Logs:
        self.host = host_of(node, self.directories)
        self.logs = None
        self.logs = await self.host.open(self.config, QUIET)
        return self.logs

    async def create(self, logs: Logs, number: PartitionId = ID, directory: int = 0) -> Log:
        return await logs.create(number, label="orders", config=self.config, directory=directory_id(directory))

    async def confirm(self, log: Log) -> None:
        """What is in the log is acknowledged."""
        end = int(log.end_offset)
        await log.wait_durable(end - 1)
        self.acknowledged[log.log_id] = end

    async def prepare(self, node: SimNode) -> None:
        if self.fill.__name__ == "unopened":
            return
        logs = await self._open(node)
        await self.fill(self, logs)

    async def change(self, node: SimNode, arm: Callable[[], None]) -> None:
        if self.opens:
            arm()
        logs = await self._open(node)
        if not self.opens:
            arm()
        try:
            await self.act(self, logs)
        except StorageError as error:
            self.error = None if any(directory.failed for directory in logs.directories) else error
            raise

    async def reopen(self, node: SimNode) -> None:
        await self._open(node)
        self._check_no_bug()

    async def check(self, node: SimNode, outcome: Outcome) -> None:
        logs = await self._open(node)
        await self._choose(logs)
        assert logs.failures == {}
        for log in logs.all():
            await self._repair(logs, log)
            assert log.damaged is None, f"{log.path}: {log.damaged}"
            log.validate()
        found = await states_of(logs)
        expected = self.expectation
        assert expected is not None, "from the reference run"
        is_done = outcome.is_done and not outcome.has_failed and not self.loses
        if self.keeps:
            self._check_kept(found, expected)
        else:
            expected.check(self, found, is_done=is_done)
        await self._work_on(logs)

    async def _repair(self, logs: Logs, log: Log) -> None:
        """Segments have gone to a copy, and the log is not truncated: its owner does what it began again."""
        if self.keeps and log.damaged is not None:
            await logs.keep_tail(log.log_id, log.damaged.good_end, log.damaged.reason)
            await log.repair()

    def _check_kept(self, found: States, expected: Expectation) -> None:
        """Every record is in the log or in a copy."""
        assert self.host is not None, "opened"
        disk = self.host.places[0][0]
        there = {row for state in found.values() for row in state.rows}
        for _, name in list_logs(disk).kept:
            for file_name in disk.list(name):
                if file_name.endswith(".log"):
                    file = disk.open(f"{name}/{file_name}")
                    there |= _rows_in(file.read(0, file.size))
                    file.close()
        for log, state in expected.before.items():
            lost = [row[0] for row in state.rows if row not in there]
            assert not lost, f"{log}: lost {lost}"

    async def _work_on(self, logs: Logs) -> None:
        """Appends to every log, cleans, and stops in order."""
        await self._repair(logs, await self.create(logs))
        for log in logs.all():
            sequence = max(0, int(log.end_offset))
            log.append(idempotent(0, producer=1_000 + sequence), leader_epoch=max(0, log.epochs.latest))
            await log.wait_durable(log.end_offset - 1)
        self.left = await states_of(logs)
        self.homes = {number: home.directory_id for number in self.left if (home := logs.directory_of(number))}
        assert await logs.close()
        self._check_no_bug()
        assert self.host is not None, "opened"
        for disk, _, _ in self.host.places:
            left = [
                name
                for path in ("", *disk.list(""))
                for name in disk.list(path)
                if name.endswith(LEFT_OVERS) and not (path == "" and name.endswith(".kept"))
            ]
            assert not left, f"left over: {left}"

    def _check_no_bug(self) -> None:
        assert self.host is not None, "opened"
        assert self.host.crashes == []

    async def go_on(self) -> None:
        """Logs in directories that work, and are not closed or damaged, can be read and written."""
        logs = self.logs
        if logs is None or logs._is_closed:
            return
        if self.error is not None:
            # Its owner tries again, in the same process.
            await self.act(self, logs)
        for log in logs.all():
            if log.damaged is None and not log.is_closed and log.config.flush_mode is FlushMode.SYNC:
                log.validate()
                await state_of(log)
                await write(log, 1)
                await self.confirm(log)
                self.also.append(await state_of(log))

    async def again(self, node: SimNode) -> None:
        logs = await self._open(node)
        await self._choose(logs)
        assert await states_of(logs) == self.left
        assert await logs.close()

    async def _choose(self, logs: Logs) -> None:
        """As the metadata says, which knows the last home of a log."""
        for number in list(logs.duplicates):
            await logs.keep(number, self.homes.get(number, directory_id(0)))
            await logs.wait_open(number)


@cache
def reference(name: str) -> Expectation:
    """The states before and after the operation where nothing strikes."""
    from support.crashes.log_operations import LOG_STORIES

    expectation = Expectation()
    story = LOG_STORIES[name]()
    act, fill = story.act, story.fill

    async def watched(story: LogStory, logs: Logs) -> None:
        expectation.before = await states_of(logs)
        await act(story, logs)

    def make() -> LogStory:
        made = LOG_STORIES[name]()
        made.act, made.fill = watched, fill
        made.expectation = _Recorder(expectation)
        return made

    run_trial(Trial(Operation(name, make)))
    return expectation


class _Recorder(Expectation):
    """Takes what it is shown as the state after the operation."""

    def __init__(self, into: Expectation) -> None:
        super().__init__()
        self.into = into

    def check(self, story: "LogStory", found: States, *, is_done: bool) -> None:
        self.into.after, self.into.also = found, story.also


def operations() -> list[Operation]:
    from support.crashes.log_operations import LOG_STORIES

    def make(name: str) -> LogStory:
        expectation = reference(name)
        story = LOG_STORIES[name]()
        story.expectation = expectation
        return story

    return [Operation(name, partial(make, name)) for name in LOG_STORIES]
