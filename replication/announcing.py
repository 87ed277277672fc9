"""What a broker says of its logs when it starts and when it stops (design: rules of safety, 5).

    logs found --> registration: the directories that work --> the grace is over --> and the replicas that are lost,
                                                                                     and whether logs are recovering
    leaderships elsewhere --> logs closed, all of them cleanly --> the clean stop is stored

A directory that cannot be read is not registered: the controller takes what is recorded there out of every in-sync set.
A replica is lost if its log does not open or is damaged, or if it has none here although it had one: it is recorded in
a directory that does not work, or that works and whose store knows of records; or a directory of the last registration
is missing, where it may have been. One that nobody ever wrote to loses nothing.

One whose records may have been acknowledged without a sync (`flush.mode=page-cache`), and whose log was not closed
cleanly, is lost too, whatever the mode is now. The controller judges by the settings of the moment, in which a topic
may have changed to `sync` before its brokers have synced anything; what a log's own store says (`log.marking`) is true
until then.

A registration does not wait for logs that take long to recover: what was cheap to open (all of them, after a clean
stop) is open after the grace, and of the rest it says only that there is one. The controller then elects no replica of
this broker before it is told that its log is open (`metadata.recoveries`, `recovering`).

What is said rests on this broker's copy of the metadata, which may be old: whatever is found out later is reported then
(`repair`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from uuid import UUID

from tidelog.log.checkpoint import CLEAN, LOG_KEYS, MARK, PAGE_CACHE, decode_mark, field_of, key_prefix, partition_of
from tidelog.log.doubles import choose
from tidelog.log.logs import Logs
from tidelog.metadata.broker_side import BrokerAgent, store_clean_stop
from tidelog.metadata.image import NIL, ClusterImage
from tidelog.model.errors import CorruptStateError, DiskFullError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

GRACE_MS = 500
"""Who is registered without recovering replicas is elected a round trip earlier, and most are open by then."""


def working_directories(logs: Logs) -> tuple[DirectoryId, ...]:
    """Those to register."""
    return tuple(
        directory.directory_id
        for directory in logs.directories
        if directory.failed is None and directory.directory_id is not None
    )


async def announce(agent: BrokerAgent, logs: Logs, *, grace_ms: int = GRACE_MS) -> None:
    """Once the logs are open, or the grace is over: what is lost, as far as is known, goes into the registration. To be
    called before `agent.run`."""
    await logs.wait_all_open(grace_ms)
    unsynced = await unsynced_replicas(logs)
    lost = lost_replicas(logs, agent.tail.image, agent.broker, unsynced)
    if lost:
        LOGGER.warning("%d replicas are damaged or missing, the first of topic %s partition %d", len(lost), *lost[0])
    if logs.recovering:
        LOGGER.info("%d logs are being recovered: this broker serves the others meanwhile", logs.recovering)
    agent.registration = replace(agent.registration, lost=lost, is_recovering=logs.recovering > 0)


def lost_replicas(
    logs: Logs, image: ClusterImage, me: int, unsynced: Iterable[PartitionId] = ()
) -> tuple[tuple[UUID, int], ...]:
    """(topic id, partition) each, in order: see the module. Of logs that are not open yet it says only what their
    stores say. `unsynced`: as `unsynced_replicas` has found them."""
    lost = {*logs.failures, *(log.log_id for log in logs.all() if log.damaged is not None)}
    known, former = set(logs.known()), image.brokers.get(me)
    lost.update(unsynced)
    is_directory_gone = former is not None and not set(former.directories) <= set(working_directories(logs))
    for topic_id, number, partition in image.partitions_on(me):
        partition_id, recorded = PartitionId(TopicId(topic_id), number), DirectoryId(partition.directory_of(me))
        copies = logs.doubles.get(partition_id)
        if copies is not None:
            is_lost = choose(copies, recorded) is None
        else:
            is_lost = partition_id not in known and (is_directory_gone or had_log(logs, partition_id, recorded))
        if is_lost:
            lost.add(partition_id)
    return tuple(sorted((UUID(int=found.topic_id.int), found.partition) for found in lost))


async def unsynced_replicas(logs: Logs) -> set[PartitionId]:
    """Replicas whose last life may have acknowledged records that were on no device when it ended.

    By the stores: the log's directory may be gone with its records, and this broker's metadata with its page cache.
    The stores of thousands of replicas are read in slices.
    """
    found: set[PartitionId] = set()
    for directory in logs.directories:
        for first_byte in range(256):
            if directory.failed is None:
                keys = set(directory.store.keys(LOG_KEYS + bytes([first_byte])))
                found.update(_unsynced(logs, keys))
                await asyncio.sleep(0)
    return found


def _unsynced(logs: Logs, keys: Collection[bytes]) -> Iterator[PartitionId]:
    """Of the replicas whose keys these are, all of them."""
    for partition_id in [partition_of(key) for key in keys if field_of(key) == PAGE_CACHE]:
        log = logs.get(partition_id)
        if log is None:
            is_clean = key_prefix(partition_id) + CLEAN in keys
        else:
            is_clean = log.report.clean or not log.report.was_page_cache
        if not is_clean:
            yield partition_id


def had_log(logs: Logs, partition_id: PartitionId, recorded: DirectoryId) -> bool:
    """Of a replica without a log here: whether there was one that held something, as far as can be known."""
    if recorded == NIL:
        return False
    for directory in logs.directories:
        if directory.failed is None and directory.directory_id == recorded:
            return _held_something(directory.store, partition_id)
    return True


def _held_something(store: StateStore, partition_id: PartitionId) -> bool:
    """A recovery point past the beginning. Where there is none, nothing was ever synced but in the last second."""
    try:
        mark = store.get(key_prefix(partition_id) + MARK)
        return mark is not None and decode_mark(mark).offset > 0
    except CorruptStateError:
        return True


async def close_logs(logs: Logs, store: StateStore, broker_epoch: int | None) -> None:
    """The end of a stop, of a broker that was registered in this epoch (None: it was not, or did not stop in order).

    Only if every log was closed cleanly the next life may say so: with `flush.mode=page-cache` that is all that tells
    whether it has what it acknowledged.
    """
    if await logs.close():
        if broker_epoch is not None:
            try:
                await store_clean_stop(store, broker_epoch)
            except DiskFullError as error:
                LOGGER.error("this was a clean stop, and the next start does not know: %s", error)
    else:
        LOGGER.error("this was not a clean stop: logs could not be closed, see above")
