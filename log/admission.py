"""What a leader lets into its log: batches from outside are checked, deduplicated and made ready to be written. Pure.

Each batch passes once, in this order; the first that fails refuses the whole call, and nothing was written:

    form        length, magic, CRC, counts, size (`check_batch`)
    records     a compacted topic takes no null keys; another codec than the topic's is changed
    time        log-append time is stamped; create time must lie in the topic's bounds
    producer    a repeat of a stored batch is answered with its offsets; a gap or an old epoch is refused

Decoding and compressing records may take long. Who must not be held up gives `inline_bytes_max`; what is more raises
`NeedsLookError`, with nothing done. Then `look_inside` does that part anywhere, as a function of values, and `admit`
takes its result with the `Look` that it was made for. If the settings have changed meanwhile, that is asked for again.

The base offset, the length and the leader epoch are the first 16 bytes of a batch and outside of its CRC: they are
written as a new prefix, so a batch that needs no other change is not copied.
"""

from dataclasses import dataclass, replace
from struct import Struct

from tidelog.log.batch import (
    BatchHeader,
    Codec,
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
from tidelog.model.errors import (
    DuplicateSequenceError,
    InvalidRecordError,
    InvalidTimestampError,
    RecordTooLargeError,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a topic's settings ask of the records inside of a batch."""

    needs_keys: bool
    codec: Codec | None
    level: int | None
    message_bytes_max: int
    decompressed_bytes_max: int


class NeedsLookError(Exception):
    """The records are too many to be decoded on the spot: `look_inside` first. No error of the world."""

    def __init__(self, look: Look) -> None:
        super().__init__("the records have to be looked into first")
        self.look = look


def look_of(config: LogConfig) -> Look:
    return Look(
        needs_keys=config.cleanup_compact,
        codec=config.compression,
        level=config.compression_level,
        message_bytes_max=config.message_bytes_max,
        decompressed_bytes_max=config.looked_bytes_max,
    )


def look_inside(data: bytes, look: Look) -> bytes | None:
    """These batches as the topic wants their records, None if they are so already. Raises as `admit`."""
    parts: list[Buffer] = []
    is_changed = False
    position = 0
    while position < len(data):
        header = check_batch(data, position, size_max=look.message_bytes_max)
        batch: Buffer = memoryview(data)[position : position + header.size]
        looked = batch if header.attributes & CONTROL_BIT else _look(batch, header, look)
        is_changed |= looked is not batch
        parts.append(looked)
        position += header.size
    return b"".join(parts) if is_changed else None


def _look(batch: Buffer, header: BatchHeader, look: Look) -> Buffer:
    if look.codec is None or header.codec == look.codec:
        if look.needs_keys:
            validate_records(batch, decompressed_bytes_max=look.decompressed_bytes_max, needs_keys=True)
        return batch
    changed = recompress(
        batch,
        look.codec,
        decompressed_bytes_max=look.decompressed_bytes_max,
        level=look.level,
        needs_keys=look.needs_keys,
    )
    if len(changed) > look.message_bytes_max:
        raise RecordTooLargeError(
            f"a batch of {len(changed)} bytes under {look.codec.name.lower()}"
            f" is over the limit of {look.message_bytes_max}"
        )
    return changed


def _look_now(batch: Buffer, header: BatchHeader, look: Look, bytes_max: int | None) -> Buffer:
    if bytes_max is None or bytes_max >= look.decompressed_bytes_max:
        return _look(batch, header, look)
    if not look.needs_keys and header.codec == look.codec:
        return batch
    if bytes_max == 0:
        raise NeedsLookError(look)
    try:
        return _look(batch, header, replace(look, decompressed_bytes_max=bytes_max))
    except RecordTooLargeError:
        raise NeedsLookError(look) from None


def admit(
    data: Buffer,
    *,
    config: LogConfig,
    producers: ProducerState,
    now_ms: int,
    is_coordinator: bool,
    looked: Look | None = None,
    inline_bytes_max: int | None = None,
) -> list[Admitted]:
    """The batches in `data`, ready to be written.

    `is_coordinator`: the caller is a part of the cluster, which may write control batches (transaction markers).
    A call with several batches holds at most one of each producer id, since each is checked against the state before
    the call. A repeat whose offsets are not known any more is answered only alone: the answer, which clients take for
    an acknowledgement, would stand for all of them.

    `looked` is what `look_inside` was asked when it gave `data`; without it records are decoded here, in a call with
    one batch up to `inline_bytes_max`.
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
        try:
            bytes_max = inline_bytes_max if batch is data or inline_bytes_max is None else 0
            admitted.append(_admit_one(batch, header, config, producers, now_ms, looked, bytes_max))
        except DuplicateSequenceError as error:
            if batch is data:
                raise
            raise InvalidRecordError(f"one of several batches cannot be answered, none is stored: {error}") from error
    return admitted


def _admit_one(
    batch: Buffer,
    header: BatchHeader,
    config: LogConfig,
    producers: ProducerState,
    now_ms: int,
    looked: Look | None,
    inline_bytes_max: int | None,
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
    changed = batch
    if config.looks_inside:
        look = look_of(config)
        if look != looked:
            changed = _look_now(batch, header, look, inline_bytes_max)
    return _fit(batch, changed, header, config, now_ms)


def _fit(batch: Buffer, changed: Buffer, header: BatchHeader, config: LogConfig, now_ms: int) -> Admitted:
    """The time is as the topic wants it; `changed` is what has become of the batch."""
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
