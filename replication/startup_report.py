"""What a broker reports about its logs when it starts and when it stops.

    logs found --> registration: working directories --> grace time over --> lost replicas, and whether logs recover
    leaderships moved --> all logs closed cleanly --> the clean stop is stored

A directory that cannot be read is not registered: the controller removes its recorded replicas from every in-sync set.
A replica is lost if its log does not open or is damaged, or if it has no log here although it had one: it is recorded
in a failed directory, or in a working one whose store knows records of it; or a directory of the last registration is
missing, where it may have been. A replica that was never written to loses nothing.

A replica whose records may have been acknowledged without a sync (`flush.mode=page-cache`), and whose log was not
closed cleanly, is lost too, whatever the mode is now. The controller judges by the current configs, in which a topic
may have changed to `sync` before its brokers synced anything; the log's own store (`log.recovery_checkpoint`) is right
until then.

A registration does not wait for slow recoveries: logs that open quickly (all of them, after a clean stop) are open
after the grace time; about the others it only reports that some recover. The controller then elects no replica of this
broker before its log is reported open (`metadata.recovering_replicas`, `recovery_reports`).

The report rests on this broker's copy of the metadata, which may be old: `repair` reports what is detected later.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from uuid import UUID

from tidelog.log.duplicate_logs import choose
from tidelog.log.logs import Logs
from tidelog.log.stored_state import CLEAN, LOG_KEYS, MARK, PAGE_CACHE, decode_mark, field_of, key_prefix, partition_of
from tidelog.metadata.broker_lifecycle import BrokerLifecycle, store_clean_stop
from tidelog.metadata.image import NIL, ClusterImage
from tidelog.model.errors import CorruptStateError, DiskFullError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.slicing import sliced
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

GRACE_MS = 500
"""A broker registered without recovering replicas is elected a round trip earlier; most logs are open by then."""


def working_directories(logs: Logs) -> tuple[DirectoryId, ...]:
    """Return the directories to register."""
    return tuple(
        directory.directory_id
        for directory in logs.directories
        if directory.failed is None and directory.directory_id is not None
    )


async def add_losses(agent: BrokerLifecycle, logs: Logs, *, grace_ms: int = GRACE_MS) -> None:
    """Wait until the logs are open or the grace time is over, then put the known losses into the registration. Called
    before `agent.run`."""
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
    """Return sorted (topic id, partition) of the lost replicas: see the module. Logs that are not open yet are judged
    by their stores only. `unsynced` is the result of `unsynced_replicas`."""
    lost = {*logs.failures, *(log.log_id for log in logs.all() if log.damaged is not None)}
    known, former = set(logs.known()), image.brokers.get(me)
    lost.update(unsynced)
    is_directory_gone = former is not None and not set(former.directories) <= set(working_directories(logs))
    for topic_id, number, partition in image.partitions_on(me):
        partition_id, recorded = PartitionId(TopicId(topic_id), number), DirectoryId(partition.directory_of(me))
        copies = logs.duplicates.get(partition_id)
        if copies is not None:
            is_lost = choose(copies, recorded) is None
        else:
            is_lost = partition_id not in known and (is_directory_gone or had_log(logs, partition_id, recorded))
        if is_lost:
            lost.add(partition_id)
    return tuple(sorted((UUID(int=lost_id.topic_id.int), lost_id.partition) for lost_id in lost))


async def unsynced_replicas(logs: Logs) -> set[PartitionId]:
    """Return replicas whose last incarnation may have acknowledged records that were not synced when it ended.

    Reads the stores: the log's directory may be gone with its records, and this broker's metadata with its page cache.
    Yields to the event loop between slices of the stores.
    """
    unsynced: set[PartitionId] = set()
    for directory in logs.directories:
        async for first_byte in sliced(range(256), 1):
            if directory.failed is None:
                keys = set(directory.store.keys(LOG_KEYS + bytes([first_byte])))
                unsynced.update(_unsynced(logs, keys))
    return unsynced


def _unsynced(logs: Logs, keys: Collection[bytes]) -> Iterator[PartitionId]:
    """Yield the unsynced replicas among those of `keys`, which has all keys of each."""
    for partition_id in [partition_of(key) for key in keys if field_of(key) == PAGE_CACHE]:
        log = logs.get(partition_id)
        if log is None:
            is_clean = key_prefix(partition_id) + CLEAN in keys
        else:
            is_clean = log.report.clean or not log.report.was_page_cache
        if not is_clean:
            yield partition_id


def had_log(logs: Logs, partition_id: PartitionId, recorded: DirectoryId) -> bool:
    """Return whether a replica without a log here had one with records, as far as the stores show."""
    if recorded == NIL:
        return False
    for directory in logs.directories:
        if directory.failed is None and directory.directory_id == recorded:
            return _held_something(directory.store, partition_id)
    return True


def _held_something(store: StateStore, partition_id: PartitionId) -> bool:
    """Return whether the recovery point is past 0. Without one, nothing was synced except in the last second."""
    try:
        mark = store.get(key_prefix(partition_id) + MARK)
        return mark is not None and decode_mark(mark).offset > 0
    except CorruptStateError:
        return True


async def close_logs(logs: Logs, store: StateStore, broker_epoch: int | None) -> None:
    """Close the logs at the end of a stop; store the clean stop of `broker_epoch` (None: not registered, or not stopped
    in order).

    The next incarnation may report a clean stop only if every log was closed cleanly: with `flush.mode=page-cache` only
    this shows that it has what it acknowledged.
    """
    if await logs.close():
        if broker_epoch is not None:
            try:
                await store_clean_stop(store, broker_epoch)
            except DiskFullError as error:
                LOGGER.error("the clean stop is not stored; the next start treats it as unclean: %s", error)
    else:
        LOGGER.error("unclean stop: some logs failed to close, see above")
