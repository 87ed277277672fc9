"""Admits batches to a leader's log: checks, deduplicates and prepares batches from outside. Pure.

Each batch is checked once, in this order. The first failure rejects the whole call, and nothing was written:

    form        length, magic, CRC, counts, size (`check_batch`)
    records     a compacted topic takes no null keys; a codec other than the topic's is changed
    time        log-append time is stamped; create time must be within the topic's bounds
    producer    a duplicate of a stored batch returns its offsets; a gap or an old epoch is rejected
    transaction a batch of one is passed to `check_transaction` of the caller, which raises if it may not be appended

Decoding and compressing records may take long. A caller that must not block passes `inline_bytes_max`; more raises
`NeedsDecodingError`, with nothing done. The caller then runs `inspect_records` elsewhere, as a function of values, and
passes its result to `admit` with the `RecordRules` that it used. If the settings changed meanwhile, `admit` raises
again.

Base offset, length and leader epoch are the first 16 bytes of a batch and outside of its CRC: they are written as a new
prefix, so a batch that needs no other change is not copied.
"""

from collections.abc import Callable
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
from tidelog.log.batch_header import CONTROL_BIT, LOG_APPEND_TIME_BIT, TRANSACTIONAL_BIT
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
"""Base offset, batch length and leader epoch: replaces the first 16 bytes."""
PREFIX_BYTES = PREFIX.size
COORDINATOR_BYTES_MAX = 1 << 20
"""Batches of coordinators are appended up to this size, whatever `max.message.bytes` is: without a marker, or the
record of a decision, a transaction would stay open."""
CheckTransaction = Callable[[BatchHeader], None]


@dataclass(slots=True)
class AdmittedBatch:
    """A batch that may be written: its header as received, its bytes, or the original that it repeats."""

    header: BatchHeader
    data: Buffer
    duplicate: Duplicate | None
    control: ControlMarker | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRules:
    """What a topic's settings require of the records in a batch."""

    needs_keys: bool
    codec: Codec | None
    level: int | None
    message_bytes_max: int
    decompressed_bytes_max: int


class NeedsDecodingError(Exception):
    """The records are too many to decode inline: call `inspect_records` first. Not an error of the environment."""

    def __init__(self, rules: RecordRules) -> None:
        super().__init__("the records must be decoded first")
        self.rules = rules


def record_rules(config: LogConfig) -> RecordRules:
    return RecordRules(
        needs_keys=config.cleanup_compact,
        codec=config.compression,
        level=config.compression_level,
        message_bytes_max=config.message_bytes_max,
        decompressed_bytes_max=config.inspected_bytes_max,
    )


def inspect_records(data: bytes, rules: RecordRules) -> bytes | None:
    """The batches with their records as the topic requires; None if they are so already. Raises as `admit`."""
    parts: list[Buffer] = []
    is_changed = False
    position = 0
    while position < len(data):
        header = check_batch(data, position, size_max=rules.message_bytes_max)
        batch: Buffer = memoryview(data)[position : position + header.size]
        checked = batch if header.attributes & CONTROL_BIT else _inspect(batch, header, rules)
        is_changed |= checked is not batch
        parts.append(checked)
        position += header.size
    return b"".join(parts) if is_changed else None


def _inspect(batch: Buffer, header: BatchHeader, rules: RecordRules) -> Buffer:
    if rules.codec is None or header.codec == rules.codec:
        if rules.needs_keys:
            validate_records(batch, decompressed_bytes_max=rules.decompressed_bytes_max, needs_keys=True)
        return batch
    changed = recompress(
        batch,
        rules.codec,
        decompressed_bytes_max=rules.decompressed_bytes_max,
        level=rules.level,
        needs_keys=rules.needs_keys,
    )
    if len(changed) > rules.message_bytes_max:
        raise RecordTooLargeError(
            f"a batch of {len(changed)} bytes under {rules.codec.name.lower()}"
            f" is over the limit of {rules.message_bytes_max}"
        )
    return changed


def _inspect_inline(batch: Buffer, header: BatchHeader, rules: RecordRules, bytes_max: int | None) -> Buffer:
    if bytes_max is None or bytes_max >= rules.decompressed_bytes_max:
        return _inspect(batch, header, rules)
    if not rules.needs_keys and header.codec == rules.codec:
        return batch
    if bytes_max == 0:
        raise NeedsDecodingError(rules)
    try:
        return _inspect(batch, header, replace(rules, decompressed_bytes_max=bytes_max))
    except RecordTooLargeError:
        raise NeedsDecodingError(rules) from None


def admit(
    data: Buffer,
    *,
    config: LogConfig,
    producers: ProducerState,
    now_ms: int,
    is_coordinator: bool,
    inspected: RecordRules | None = None,
    inline_bytes_max: int | None = None,
    check_transaction: CheckTransaction | None = None,
) -> list[AdmittedBatch]:
    """The batches in `data`, ready to be written.

    `is_coordinator`: the caller is a coordinator of the cluster. It may write control batches (transaction markers) and
    records of any time: no client has chosen it, and the clock may have jumped since the record was made. Its records
    are not inspected: they have keys, and a codec that every reader knows.

    A call with several batches has at most one of each producer id, since each is checked against the state before the
    call. A duplicate whose offsets are no longer known is accepted only alone: its answer, which clients treat as an
    acknowledgement, would stand for all batches.

    `inspected` are the rules that `inspect_records` used for `data`; without it records are decoded here, in a call
    with one batch up to `inline_bytes_max`.
    """
    size = len(data)
    if size == 0:
        raise InvalidRecordError("an append without a batch")
    admitted: list[AdmittedBatch] = []
    seen: set[int] | None = None
    position = 0
    size_max = max(config.message_bytes_max, COORDINATOR_BYTES_MAX) if is_coordinator else config.message_bytes_max
    while position < size:
        header = check_batch(data, position, size_max=size_max, from_client=not is_coordinator)
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
            rest = inspected, bytes_max, check_transaction
            admitted.append(_admit_one(batch, header, config, producers, now_ms, is_coordinator, *rest))
        except DuplicateSequenceError as error:
            if batch is data:
                raise
            raise InvalidRecordError(f"one of several batches is an old duplicate, none is stored: {error}") from error
    return admitted


def _admit_one(
    batch: Buffer,
    header: BatchHeader,
    config: LogConfig,
    producers: ProducerState,
    now_ms: int,
    is_coordinator: bool,
    inspected: RecordRules | None,
    inline_bytes_max: int | None,
    check_transaction: CheckTransaction | None,
) -> AdmittedBatch:
    # Test the bits: properties of the header would cost as much as the rest of this function.
    if header.attributes & CONTROL_BIT:
        control = parse_control(batch)
        if control is not None and header.has_producer and control.ends_transaction:
            producers.check_marker(header, control)
            return AdmittedBatch(header, batch, None, control)
        return AdmittedBatch(header, batch, None, None)
    duplicate = producers.check(header)
    if duplicate is not None:
        return AdmittedBatch(header, batch, duplicate, None)
    if header.attributes & TRANSACTIONAL_BIT and check_transaction is not None:
        check_transaction(header)
    changed = batch
    if config.needs_decoding and not is_coordinator:
        rules = record_rules(config)
        if rules != inspected:
            changed = _inspect_inline(batch, header, rules, inline_bytes_max)
    return _fit(batch, changed, header, config, now_ms, is_coordinator)


def _fit(
    batch: Buffer, changed: Buffer, header: BatchHeader, config: LogConfig, now_ms: int, is_coordinator: bool
) -> AdmittedBatch:
    """Apply the topic's timestamp settings; `changed` is the batch after inspection."""
    if config.timestamp_type is TimestampType.LOG_APPEND:
        stamped = bytearray(changed)
        stamp_append_time(stamped, now_ms)
        changed = stamped
    elif header.attributes & LOG_APPEND_TIME_BIT:
        raise InvalidTimestampError("the topic uses create time, the batch has log-append time")
    elif not is_coordinator:
        _check_time(header, config, now_ms)
    if changed is batch:
        return AdmittedBatch(header, batch, None, None)
    return AdmittedBatch(read_header(changed), changed, None, None)


def _check_time(header: BatchHeader, config: LogConfig, now_ms: int) -> None:
    """Checks the first and the latest record: the others cannot be seen without decoding."""
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
