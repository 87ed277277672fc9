"""The audit of a log notices whatever it compares: each test changes one thing behind the log's back."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.logs.single_log import PREFIX, Lab, batch, fill, idempotent, open_log, segment

from simulation.invariants import LOOKS_MAX, Invariants
from simulation.log_audit import LogAudit
from simulation.log_walk import LogWalk
from tidelog.log import stored_state as stored
from tidelog.log.log import Log
from tidelog.log.segment import INDEX, TIME_INDEX
from tidelog.world.simulated import SimNode, SimWorld

Change = Callable[[Log, SimNode], object]


async def _write(node: SimNode) -> Log:
    """Some sealed segments, a checkpoint, and more after it."""
    log = await open_log(node)
    for sequence in range(3):
        log.append(idempotent(sequence), leader_epoch=1)
    fill(log, 25, epoch=2)
    await log.checkpoint()
    fill(log, 2, epoch=3)
    await log.flush()
    return log


def _values(node: SimNode) -> dict[bytes, bytes]:
    return node.machine.store().stored


def _store(field: bytes, data: bytes) -> Change:
    async def commit(log: Log) -> None:
        await log.store.commit({PREFIX + field: data})

    return lambda log, _node: commit(log)


def _seal(log: Log, **fields: Any) -> None:
    log.segments.sealed[0] = replace(log.segments.sealed[0], **fields)


def _set_mark(log: Log, **fields: Any) -> None:
    log._checkpoint.mark = replace(log.mark, **fields)


def _cut(name: str) -> Change:
    return lambda _log, node: node.machine.disk().cut(name, node.disk().size(name) - 12)


CHANGES: dict[str, Change] = {
    "has the CRC": lambda log, _node: _seal(log, crc=1),
    "has the times": lambda log, _node: _seal(log, first_timestamp=5),
    "abort markers": lambda log, _node: _seal(log, aborted=1),
    "and batches of": lambda log, node: node.disk().open(log.segments.active_path()).append(b"more"),
    "the active segment": lambda log, _node: setattr(log.segments.active, "crc", 1),
    "the time index of": _cut(segment(0, TIME_INDEX)),
    "belongs to no segment": lambda _log, node: node.disk().open(segment(9_999, INDEX), create=True),
    "where no batch begins": lambda log, _node: log.segments.remember(5, 0, 17, log.segments.version),
    "past the end": lambda log, _node: log.segments.remember(99, 0, 0, log.segments.version),
    "count as stored": lambda log, _node: log._epochs.saved(),
    "is stored, it is": lambda log, _node: log._offsets.set_start(3),
    "counts as stored": lambda log, _node: _set_mark(log, offset=log.mark.offset - 1),
    "'clean' is stored": _store(stored.CLEAN, stored.encode_number("clean", 5)),
    "'suspect' is stored": _store(stored.SUSPECT, stored.encode_number("suspect", 5)),
    "intent: stored True": _store(stored.INTENT, stored.encode_intent(stored.Intent(stored.RESET))),
    "and that is not stored": lambda log, _node: log._lineage.gaps_stored(),
    "before a sync is not stored": lambda log, _node: setattr(log._checkpoint, "is_page_cache", True),
    "snapshots of the producers": lambda log, _node: log._checkpoint.snapshots.clear(),
    "are not stored": lambda log, node: node.machine.store().stored.pop(stored.segment_key(log.prefix, 0)),
    "the stored high watermark": _store(stored.HIGH_WATERMARK, stored.encode_high_watermark(99)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_log_that_differs_from_its_files_or_its_store_is_named(what: str) -> None:
    async def main(node: SimNode) -> None:
        log = await _write(node)
        LogAudit(log).run()
        changed = CHANGES[what](log, node)
        if asyncio.iscoroutine(changed):
            await changed
        with pytest.raises(AssertionError, match=what):
            LogAudit(log).run()

    with SimWorld(seed=1) as world:
        Lab(world).run(main)


def test_a_stored_value_that_is_damaged_is_left_to_recovery() -> None:
    async def main(node: SimNode) -> None:
        log = await _write(node)
        node.machine.store().flip_bit(PREFIX + stored.EPOCHS, 5)
        assert LogAudit(log).run() == 30

    with SimWorld(seed=1) as world:
        Lab(world).run(main)


def test_a_log_that_no_checkpoint_would_take_is_named_after_many_looks() -> None:
    findings: list[str] = []

    async def main(node: SimNode) -> None:
        log = await _write(node)
        invariants = Invariants(lambda _who, what: findings.append(what))
        invariants._audit_log("b1", log)
        invariants._audit_log("b1", log)
        assert findings == []
        log.group_commit.take_touched()
        for _ in range(LOOKS_MAX - 1):
            invariants._audit_log("b1", log)
        assert findings == []
        invariants._audit_log("b1", log)

    with SimWorld(seed=1) as world:
        Lab(world).run(main)
    assert len(findings) == 1
    assert "no checkpoint is due" in findings[0]


def test_bytes_without_a_durable_name_do_not_count_as_durable() -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(), leader_epoch=1)
        await node.disk().sync_many([node.disk().open(segment(0))], [])
        assert [found.header.base_offset for found in LogWalk(log, durable=True).batches(1)] == []
        await log.flush()
        assert [found.header.base_offset for found in LogWalk(log, durable=True).batches(1)] == [0]

    with SimWorld(seed=1) as world:
        Lab(world).run(main)


def test_a_start_forgets_the_info_of_a_segment_below_the_log_start() -> None:
    """It was the active one when the start advanced past it: its files go at the next start of the process."""

    async def write(node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 3)
        await log.flush()
        await log.advance_start(3)
        log.roll()
        fill(log, 3)
        await log.checkpoint()

    async def audit(node: SimNode) -> None:
        log = await open_log(node)
        assert [int(info.base_offset) for info in log.segments.sealed] == []
        LogAudit(log).run()

    with SimWorld(seed=1) as world:
        lab = Lab(world)
        lab.run(write)
        lab.crash()
        lab.run(audit)
