"""`--verify` has nothing to say against any log that Log itself has made: random programs on real files, with crashes.

That a wrong bit is noticed is shown elsewhere (`test_dump`); here the other half: no false alarm, whatever happened to
the log: rolls, cuts, deletes, compaction, transactions, a crash, a recovery.
"""

import asyncio
import os
import random
from pathlib import Path
from uuid import UUID

import pytest
from support.logs.cleaning import clean

from tidelog.cli.files import LogDirectory
from tidelog.cli.stored_state import StateReader
from tidelog.log.batch import Codec, ControlKind, encode_columns, encode_control
from tidelog.log.cleaner import CleanerLimits, CleaningTask
from tidelog.log.compaction import plan_cleaning
from tidelog.log.config import LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.verify import LogVerifier
from tidelog.model.errors import StorageError
from tidelog.model.ids import Offset, PartitionId, TopicId
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

TOPIC = TopicId(UUID(int=7))
PATH = f"t.{TOPIC.hex}-3"


class CountingClock:
    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def now_ms(self) -> int:
        self.now += 7
        return self.now


def _fail(error: StorageError) -> None:
    raise AssertionError(f"the disk failed: {error}")


class Program:
    """One random life of a log. Every choice comes from the seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.clock = CountingClock()
        self.is_compacted = seed % 2 == 1
        self.config = LogConfig(
            segment_bytes=3000,
            index_interval_bytes=200,
            cleanup_compact=self.is_compacted,
            min_cleanable_dirty_ratio=0.0,
            delete_retention_ms=50,
            timestamp_after_max_ms=1 << 60,
        )
        self.epoch = 0
        self.sequences: dict[int, int] = {}
        self.open: set[int] = set()
        self.log: Log
        self.store: LmdbStore
        self.group_commit: GroupCommit

    async def start(self) -> None:
        disk = RealDisk(self.directory)
        self.store = LmdbStore(self.directory / "state")
        self.group_commit = GroupCommit(disk, on_failure=_fail)
        self.log = await Log.open(
            disk=disk,
            store=self.store,
            work=InlineWork(),
            group_commit=self.group_commit,
            clock=self.clock,
            files=FilePool(disk),
            path=PATH,
            log_id=PartitionId(TOPIC, 3),
            config=self.config,
        )
        assert self.log.damaged is None

    async def stop(self, *, clean: bool) -> None:
        if clean:
            await self.log.close()
        await self.group_commit.close()
        self.store.close()

    def append(self) -> None:
        count = self.random.randint(1, 6)
        producer = self.random.choice([-1, -1, 1, 2, 3])
        transactional = producer == 3
        fields = {}
        if producer >= 0:
            sequence = self.sequences.get(producer, 0)
            self.sequences[producer] = sequence + count
            fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence}
        if transactional:
            self.open.add(producer)
        batch = encode_columns(
            timestamps=[self.clock.now + self.random.randint(-50, 50) for _ in range(count)],
            keys=[b"k%d" % self.random.randint(0, 5) for _ in range(count)],
            values=[
                self.random.choice([None, self.random.randbytes(self.random.randint(0, 150))]) for _ in range(count)
            ],
            codec=self.random.choice(list(Codec)),
            is_transactional=transactional,
            **fields,  # type: ignore[arg-type]
        )
        self.log.append(batch, leader_epoch=self.epoch)

    def end_transaction(self) -> None:
        for producer in sorted(self.open):
            marker = encode_control(
                self.random.choice([ControlKind.ABORT, ControlKind.COMMIT]),
                coordinator_epoch=0,
                timestamp=self.clock.now,
                producer_id=producer,
                producer_epoch=0,
            )
            self.log.append(marker, leader_epoch=self.epoch, is_coordinator=True)
        self.open.clear()

    async def compact(self) -> None:
        log = self.log
        if not self.is_compacted:
            return
        unstable = log.producers.first_unstable_offset(log.end_offset)
        plan = plan_cleaning(
            log.sealed_segments(),
            checkpoint=None,
            config=self.config,
            now_ms=self.clock.now_ms(),
            log_start=log.start_offset,
            bound=log.end_offset if unstable is None else unstable,
        )
        if plan is None:
            return
        aborted = await log.aborted_transactions(log.start_offset, log.end_offset)
        task = CleaningTask(PATH, plan, tuple(aborted), log.producers.last_batches(), CleanerLimits())
        await log.flush()
        cleaned = clean(log.disk, task)
        if cleaned.segments:
            await log.replace_segments(list(cleaned.segments))

    async def cut(self) -> None:
        low = max(self.log.start_offset, self.log.end_offset - 15)
        await self.log.truncate(Offset(self.random.randint(low, self.log.end_offset)))
        self.sequences = {row.producer_id: row.last_sequence + 1 for row in self.log.producers.rows()}
        self.open = {int(row.producer_id) for row in self.log.producers.rows() if row.open_offset is not None}
        self.epoch += 1

    async def step(self) -> None:
        kind = self.random.random()
        if kind < 0.6:
            self.append()
        elif kind < 0.7:
            self.end_transaction()
        elif kind < 0.75:
            self.log.roll()
        elif kind < 0.82:
            await self.log.checkpoint()
        elif kind < 0.86:
            await self.cut()
        elif kind < 0.9:
            self.epoch += self.random.randint(1, 2)
            self.log.assign_epoch(self.epoch)
        elif kind < 0.93:
            oldest = self.log.sealed_segments()[:1]
            if oldest and self.log.producers.first_open_offset is None:
                await self.log.advance_start(oldest[0].next_offset)
        elif kind < 0.95:
            low, high = self.log.start_offset, self.log.end_offset
            await self.log.advance_start(self.random.randint(low, min(high, low + 10)))
        else:
            await self.compact()
        self.log.validate()

    def problems(self) -> list[str]:
        with StateReader() as states, LogDirectory(os.path.join(self.directory, PATH)) as files:
            state = states.read(os.path.join(self.directory, PATH))
            assert state is not None
            verifier = LogVerifier(files.files, state)
            verifier.run()
            return [str(problem) for problem in verifier.problems]


async def live(program: Program) -> None:
    for _ in range(4):
        await program.start()
        for _ in range(program.random.randint(10, 60)):
            await program.step()
        clean = program.random.random() < 0.5
        await program.stop(clean=clean)
        assert program.problems() == [], f"after {'a clean stop' if clean else 'a crash'}"
        if not clean:
            await program.start()
            await program.stop(clean=True)
            assert program.problems() == [], "after recovery"


@pytest.mark.requirement("a:N-12", "a:A-74", "b:B-22")
@pytest.mark.parametrize("seed", range(int(os.environ.get("VERIFY_SEEDS", "16"))))
def test_a_log_written_by_log_passes_verification(seed: int, tmp_path: Path) -> None:
    asyncio.run(live(Program(tmp_path, seed)))
