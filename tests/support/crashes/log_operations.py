"""The table of the operations of logs that change several files or stores. `test_crash_points.py` checks that no place
in the product that changes a disk or a store is missed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from support.crashes.log_stories import COMPACT, HOUR_MS, ID, OTHER, LogStory, Step, log_of, state_of, write
from support.logs.node_logs import directory_id
from tidelog.log.config import FlushMode
from tidelog.log.lineage import Lineage
from tidelog.log.log import Damage
from tidelog.log.logs import Logs
from tidelog.model.errors import StorageError
from tidelog.model.ids import Offset

COUNT = 40


async def filled(story: LogStory, logs: Logs) -> None:
    """Some segments, up to a checkpoint and past it; all is acknowledged."""
    log = await story.create(logs)
    await write(log, COUNT // 2)
    await story.confirm(log)
    log.assign_epoch(1)
    await write(log, COUNT // 2 - 7)
    await logs.checkpoint()
    await write(log, 7)
    await story.confirm(log)
    logs.note_high_watermark(ID, log.end_offset)


async def nothing(_story: LogStory, _logs: Logs) -> None:
    return None


async def unopened(_story: LogStory, _logs: Logs) -> None:
    """There is no process before."""


async def filled_and_stored(story: LogStory, logs: Logs) -> None:
    await filled(story, logs)
    await logs.checkpoint()
    await logs.close()


async def append(story: LogStory, logs: Logs) -> None:
    """Rolls twice."""
    log = log_of(logs)
    for _ in range(4):
        await write(log, 8)
        await story.confirm(log)


async def checkpoint(story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    log.assign_epoch(2)
    await write(log, 12)
    await logs.checkpoint()
    await story.confirm(log)


async def truncate(offset: int, story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    story.acknowledged.clear()
    await log.truncate(offset)
    log.assign_epoch(3)
    await write(log, 2, epoch=3)
    await story.confirm(log)


async def truncate_new(story: LogStory, logs: Logs) -> None:
    """Only records past the recovery point go."""
    log = log_of(logs)
    if log.end_offset == COUNT:
        await write(log, 5)
        await story.confirm(log)
        story.also.append(await state_of(log))
    await truncate(COUNT + 2, story, logs)


async def checkpoint_watermark(_story: LogStory, logs: Logs) -> None:
    logs.note_high_watermark(ID, log_of(logs).end_offset)
    await logs.checkpoint()


async def repair(story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    story.acknowledged.clear()
    await logs.keep_tail(ID, 11, "rot")
    await log.mark_damaged(Damage(Offset(11), "rot"))
    await log.repair()


async def reset(story: LogStory, logs: Logs) -> None:
    story.acknowledged.clear()
    await log_of(logs).reset_to(1_000)


async def compact(_story: LogStory, logs: Logs) -> None:
    logs.note_high_watermark(ID, log_of(logs).end_offset)
    await logs.housekeeping.clean_one(lambda _: log_of(logs).end_offset)


async def expire(_story: LogStory, logs: Logs) -> None:
    logs.note_high_watermark(ID, log_of(logs).end_offset)
    await logs.housekeeping.expire()


async def expire_on_full(_story: LogStory, logs: Logs) -> None:
    logs.note_high_watermark(ID, log_of(logs).end_offset)
    await logs.housekeeping.expire(directory=logs.directories[0])


async def delete_records(_story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    await log.advance_start(25)
    await log.remove_deleted(log.clock.now_ms() + HOUR_MS)


async def move(_story: LogStory, logs: Logs) -> None:
    moving = logs.move(ID, directory_id(1))
    try:
        await moving.copy()
        await moving.finish()
    except BaseException:
        await moving.abandon()
        raise


async def abandon(_story: LogStory, logs: Logs) -> None:
    moving = logs.move(ID, directory_id(1))
    await moving.copy()
    await moving.abandon()


async def create(story: LogStory, logs: Logs) -> None:
    log = await story.create(logs, OTHER)
    await write(log, 3)
    await story.confirm(log)


async def remove(story: LogStory, logs: Logs) -> None:
    story.acknowledged.clear()
    await logs.remove(ID)
    removing = logs._tasks - set(logs._checkpointers)
    if removing:
        await asyncio.wait(removing)


async def remove_and_create(story: LogStory, logs: Logs) -> None:
    await remove(story, logs)
    log = await story.create(logs)
    await write(log, 2, epoch=7)
    await story.confirm(log)


async def give_up(_story: LogStory, logs: Logs) -> None:
    await logs.give_up(ID, "it cannot be opened")


async def keep_tail(story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    await logs.keep_tail(ID, 11, "its leader does not have them")
    await log.truncate(11)


async def cut_and_refill(story: LogStory, logs: Logs) -> None:
    """Its records are in a kept copy, and it has them again."""
    await filled(story, logs)
    log = log_of(logs)
    data = b"".join([bytes((await log.read(at, bytes_max=1)).data) for at in range(11, COUNT)])
    await keep_tail(story, logs)
    log.append_replicated(data)
    await story.confirm(log)


async def drop_covered(_story: LogStory, logs: Logs) -> None:
    await logs.kept.drop_covered(log_of(logs), high_watermark=COUNT)


async def doubled(story: LogStory, logs: Logs) -> None:
    """The log is in the first directory; an older copy is in the second."""
    await filled(story, logs)
    assert story.host is not None, "opened"
    disk = story.host.places[1][0]
    disk.make_directory(log_of(logs).path)
    await disk.sync_many([], [""])


async def choose_copy(_story: LogStory, logs: Logs) -> None:
    if ID in logs.duplicates:
        await logs.keep(ID, directory_id(0))
    if await logs.wait_open(ID) is None:
        raise logs.failures[ID]


async def close(story: LogStory, logs: Logs) -> None:
    await write(log_of(logs), 3)
    story.also.append(await state_of(log_of(logs)))
    if not await logs.close():
        raise StorageError("it was not closed in order")


async def change_flush_mode(story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    await log.configure(replace(story.config, flush_mode=FlushMode.PAGE_CACHE))
    await write(log, 3)
    await log.configure(story.config)
    await log.clear_page_cache()
    await story.confirm(log)


async def change_lineage(story: LogStory, logs: Logs) -> None:
    log = log_of(logs)
    await log.allow_gaps()
    await log.take_over_lineage(Lineage(Offset(5), log.epochs.latest, ()))
    await log.raise_deletes_end(Offset(7))
    await log.forget_leader()
    await write(log, 2)
    await story.confirm(log)


async def fail_sync(story: LogStory, logs: Logs) -> None:
    """The log stores from where on it is suspect."""
    log = log_of(logs)
    await write(log, 3)
    story.also.append(await state_of(log))
    story.host.places[0][0]._device.fail("sync")  # type: ignore[union-attr]
    with suppress(StorageError):
        await story.confirm(log)
    await asyncio.sleep(0.1)
    assert logs.directories[0].failed is not None, "its sync has failed"


async def fail_sync_and_store(story: LogStory, logs: Logs) -> None:
    """The store fails with the disk: a note in the directory says from where on the log is suspect."""
    story.host.places[0][1]._device.fail("commit")  # type: ignore[union-attr]
    await fail_sync(story, logs)


async def rebuild_index(story: LogStory, logs: Logs) -> None:
    """The index of a sealed segment is gone while the log is open."""
    log = log_of(logs)
    base = log.sealed_segments()[1].base_offset
    device = story.host.places[0][0]._device  # type: ignore[union-attr]
    for suffix in (".index", ".timeindex"):
        device.cut(log.segments.file_path(base)[: -len(".log")] + suffix, 0)
    for offset in range(base, log.end_offset):
        await log.read(offset, bytes_max=1)
    assert await log.offset_for_timestamp(0) is not None


async def lose_indexes(story: LogStory, logs: Logs) -> None:
    """Past the recovery point are batches, and no index entries."""
    await filled(story, logs)
    await write(log_of(logs), 9)
    await story.confirm(log_of(logs))
    device = story.host.places[0][0]._device  # type: ignore[union-attr]
    for path, _ in device.files():
        if path.endswith(("index", ".timeindex")):
            device.cut(path, 0)


async def suspect(story: LogStory, logs: Logs) -> None:
    """A sync has failed: the next start rewrites what it trusts."""
    await filled(story, logs)
    await fail_sync(story, logs)


async def suspect_by_note(story: LogStory, logs: Logs) -> None:
    await filled(story, logs)
    await fail_sync_and_store(story, logs)


def _row(name: str, act: Step, fill: Step = filled, **more: object) -> tuple[str, Callable[[], LogStory]]:
    return name, lambda: LogStory(act, fill, name, **more)  # type: ignore[arg-type]


KEPT_FEW = replace(COMPACT, cleanup_compact=False, cleanup_delete=True, retention_bytes=2_000)

LOG_STORIES: dict[str, Callable[[], LogStory]] = dict(
    [
        _row("append and roll", append),
        _row("checkpoint with producers and epochs", checkpoint),
        _row("truncation in the active segment", partial(truncate, COUNT - 2), floor=COUNT - 2),
        _row("truncation to an earlier segment", partial(truncate, 11), floor=11),
        _row("truncation past the recovery point", truncate_new, floor=COUNT),
        _row("checkpoint of a high watermark", checkpoint_watermark),
        _row("first start of a directory", nothing, unopened, opens=True),
        _row("truncation after a clean stop", partial(truncate, 11), filled_and_stored, floor=11),
        _row("repair of a damaged log", repair, keeps=True),
        _row("reset to another offset", reset),
        _row("compaction", compact, config=COMPACT, compacts=True),
        _row("retention", expire, config=KEPT_FEW),
        _row("retention on a full disk", expire_on_full, config=KEPT_FEW),
        _row("delete-records", delete_records),
        _row("move to another directory", move, directories=2),
        _row("move that is abandoned", abandon, directories=2),
        _row("creation of a log", create, floor=0),
        _row("deletion of a log", remove),
        _row("deletion and creation again", remove_and_create, floor=0),
        _row("a log that is given up", give_up, keeps=True),
        _row("a tail that is kept and truncated", keep_tail, keeps=True),
        _row("a kept copy that is dropped", drop_covered, cut_and_refill, keeps=True),
        _row("a choice between two copies", choose_copy, doubled, directories=2),
        _row("clean stop", close),
        _row("change of the flush mode", change_flush_mode),
        _row("change of the lineage", change_lineage),
        _row("failed sync", fail_sync, loses=True),
        _row("failed sync and failed store", fail_sync_and_store, loses=True),
        _row("rebuild of an index", rebuild_index),
        _row("recovery after a crash", nothing, lose_indexes, opens=True),
        _row("recovery after a failed sync", nothing, suspect, opens=True, loses=True),
        _row("recovery after a failed sync and a failed store", nothing, suspect_by_note, opens=True, loses=True),
    ]
)
