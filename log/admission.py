"""What a leader lets into its log: batches from outside are checked, deduplicated and made ready to be written. Pure.

Each batch passes once, in this order; the first that fails refuses the whole call, and nothing was written:

    form        length, magic, CRC, counts, size (`check_batch`)
    records     a compacted topic takes no null keys; another codec than the topic's is changed
    time        log-append time is stamped; create time must lie in the topic's bounds
    producer    a repeat of a stored batch is answered with its offsets; a gap or an old epoch is refused

The base offset, the length and the leader epoch are the first 16 bytes of a batch and outside of its CRC: they are
written as a new prefix, so a batch that needs no other change is not copied.
"""

from dataclasses import dataclass
from struct import Struct

from tidelog.log.batch import (
    BatchHeader,
    ControlMarker,
    TimestampType,
    check_batch,
    parse_control,
    read_header,
    recompress,
    stamp_append_time,
    validate_records,
)
from tidelog.log.batch_header import CONTROL_BIT, LOG_APPEND_TIME_BIT
from tidelog.log.config import LogConfig
from tidelog.log.producers import Duplicate, ProducerState
from tidelog.model.errors import InvalidRecordError, InvalidTimestampError, RecordTooLargeError
from tidelog.world.disk import Buffer

PREFIX = Struct(">qii")
"""Base offset, batch length and leader epoch: what stands in place of the first 16 bytes."""
PREFIX_BYTES = PREFIX.size


@dataclass(slots=True)
class Admitted:
    """A batch that may be written: its header as it came, its bytes, or the original that it repeats."""

    header: BatchHeader
    data: Buffer
    duplicate: Duplicate | None
    control: ControlMarker | None


def admit(
    data: Buffer, *, config: LogConfig, producers: ProducerState, now_ms: int, is_coordinator: bool
) -> list[Admitted]:
    """The batches in `data`, ready to be written.

    `is_coordinator`: the caller is a part of the cluster, which may write control batches (transaction markers).
    A call with several batches holds at most one of each producer id, since each is checked against the state before
    the call.
    """
    size = len(data)
    if size == 0:
        raise InvalidRecordError("an append without a batch")
    admitted: list[Admitted] = []
    seen: set[int] | None = None
    position = 0
    while position < size:
        header = check_batch(data, position, size_max=config.message_bytes_max, from_client=not is_coordinator)
        end = position + header.size
        batch = data if position == 0 and end == size else memoryview(data)[position:end]
        position = end
        if header.producer_id >= 0 and batch is not data:
            seen = seen if seen is not None else set()
            if header.producer_id in seen:
                raise InvalidRecordError(f"two batches of producer {header.producer_id} in one append")
            seen.add(header.producer_id)
        admitted.append(_admit_one(batch, header, config, producers, now_ms))
    return admitted


def _admit_one(
    batch: Buffer, header: BatchHeader, config: LogConfig, producers: ProducerState, now_ms: int
) -> Admitted:
    # Properties of the header cost as much as all the rest here: the bits themselves are asked on this path.
    if header.attributes & CONTROL_BIT:
        control = parse_control(batch)
        if control is not None and header.has_producer and control.ends_transaction:
            producers.check_marker(header, control)
            return Admitted(header, batch, None, control)
        return Admitted(header, batch, None, None)
    duplicate = producers.check(header)
    if duplicate is not None:
        return Admitted(header, batch, duplicate, None)
    return _fit(batch, header, config, now_ms)


def _fit(batch: Buffer, header: BatchHeader, config: LogConfig, now_ms: int) -> Admitted:
    """Make the batch what the topic wants."""
    if config.cleanup_compact:
        validate_records(batch, decompressed_bytes_max=config.decompressed_bytes_max, needs_keys=True)
    changed: Buffer = batch
    if config.compression is not None and header.codec != config.compression:
        changed = recompress(batch, config.compression, decompressed_bytes_max=config.decompressed_bytes_max)
        if len(changed) > config.message_bytes_max:
            raise RecordTooLargeError(
                f"a batch of {len(changed)} bytes under {config.compression.name.lower()}"
                f" is over the limit of {config.message_bytes_max}"
            )
    if config.timestamp_type is TimestampType.LOG_APPEND:
        stamped = bytearray(changed)
        stamp_append_time(stamped, now_ms)
        changed = stamped
    elif header.attributes & LOG_APPEND_TIME_BIT:
        raise InvalidTimestampError("the topic has create time, the batch says log-append time")
    else:
        _check_time(header, config, now_ms)
    if changed is batch:
        return Admitted(header, batch, None, None)
    return Admitted(read_header(changed), changed, None, None)


def _check_time(header: BatchHeader, config: LogConfig, now_ms: int) -> None:
    """Of the first and the latest record: the ones between cannot be seen without decoding them."""
    latest = header.max_timestamp
    if latest - now_ms > config.timestamp_after_max_ms:
        raise InvalidTimestampError(
            f"timestamp {latest} is more than {config.timestamp_after_max_ms} ms after the server's {now_ms}"
        )
    first = header.base_timestamp
    if first >= 0 and now_ms - first > config.timestamp_before_max_ms:
        raise InvalidTimestampError(
            f"timestamp {first} is more than {config.timestamp_before_max_ms} ms before the server's {now_ms}"
        )
