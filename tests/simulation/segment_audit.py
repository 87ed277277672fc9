"""What the batches of a segment say of it, gathered in one pass, against what the log says of the segment.

sealed, active    size, CRC, first and largest timestamp, and the offset of that one
time index        an entry is a batch whose timestamp was the largest so far; the last one of a sealed segment is
                  the largest of all
transactions      `aborted` counts the transactions that abort markers have ended
names             the directory has the files of these segments and of no others, as long as the log says
"""

from __future__ import annotations

from dataclasses import dataclass, field

from crc32c import crc32c

from simulation.log_walk import Found, device_of, image_of
from tidelog.log.index import TIME_ENTRY_BYTES, decode_time_entries
from tidelog.log.log import Log
from tidelog.log.segment import LOG, TIME_INDEX, ActiveSegment, SegmentInfo, parse_name
from tidelog.world.simulated.device import Directory, Inode


@dataclass(slots=True)
class Facts:
    """Of the batches of one segment that were read."""

    next_offset: int = 0
    size: int = 0
    crc: int = 0
    first_timestamp: int = -1
    largest_timestamp: int = -1
    largest_offset: int = -1
    aborted: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    """Last offset of a batch -> its timestamp, where that is larger than all before."""
    timed: int = 0
    """Bytes of the time index that were compared."""
    sealed: SegmentInfo | None = None
    """What was compared last, of a sealed segment."""

    def add(self, found: Found, *, is_abort: bool) -> None:
        header = found.header
        timestamp = int(header.max_timestamp)
        if self.first_timestamp < 0:
            self.first_timestamp = timestamp
        if timestamp > self.largest_timestamp:
            self.largest_timestamp, self.largest_offset = timestamp, int(header.last_offset)
            self.peaks[self.largest_offset] = timestamp
        self.aborted += is_abort
        self.crc = crc32c(found.data, self.crc)
        self.size += header.size
        self.next_offset = int(header.next_offset)


class SegmentAudit:
    """Of all segments of one open log. `add` takes its batches in order."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._facts: dict[int, Facts] = {}

    def add(self, found: Found, *, is_abort: bool) -> None:
        facts = self._facts.get(found.segment)
        if facts is None:
            facts = self._facts[found.segment] = Facts()
        facts.add(found, is_abort=is_abort)

    def check(self) -> None:
        """All batches have been added. Asserts."""
        log = self._log
        for base in [base for base in self._facts if base < log.segments.first_offset]:
            del self._facts[base]
        for info in log.segments.sealed:
            facts = self._facts.get(int(info.base_offset))
            if facts is not None and facts.sealed is not info:
                self._check_sealed(info, facts)
                facts.sealed = info
        active = log.segments.active
        facts = self._facts.get(int(active.base_offset))
        if facts is not None:
            self._check_active(active, facts)

    def _check_sealed(self, info: SegmentInfo, facts: Facts) -> None:
        log, base = self._log, int(info.base_offset)
        size = len(image_of(log, base, durable=False))
        assert size == info.size == facts.size, f"{info} has {size} bytes, and batches of {facts.size}"
        assert info.crc in (None, facts.crc), f"{info} has the CRC {facts.crc}"
        if log.gaps:
            return
        self._check_times(info, facts)
        assert self._is_known(info.aborted, facts), f"{info} has {facts.aborted} abort markers"
        data = bytes(image_of(log, base, durable=False, suffix=TIME_INDEX))
        self._check_time_index(base, data, facts)
        entries = decode_time_entries(data, base_offset=base)
        if entries and info.largest_timestamp >= 0:
            last = (entries[-1].timestamp, entries[-1].last_offset)
            assert last == (facts.largest_timestamp, facts.largest_offset), f"the time index of {info} ends with {last}"

    def _check_active(self, active: ActiveSegment, facts: Facts) -> None:
        log, base = self._log, int(active.base_offset)
        size = len(image_of(log, base, durable=False))
        assert size == active.size == facts.size, (
            f"the active segment {base} has {size} bytes and batches of {facts.size}, not {active.size}"
        )
        assert active.crc in (None, facts.crc), f"the active segment {base} has the CRC {facts.crc}, not {active.crc}"
        if log.gaps:
            return
        self._check_times(active.info(facts.next_offset), facts)
        assert self._is_known(active.aborted_count, facts), (
            f"the active segment {base} has {facts.aborted} abort markers, not {active.aborted_count}"
        )
        data = bytes(image_of(log, base, durable=False, suffix=TIME_INDEX))
        if len(data) >= active.time_bytes:
            self._check_time_index(base, data[: active.time_bytes] + bytes(active.index.times or b""), facts)

    def _is_known(self, aborted: int, facts: Facts) -> bool:
        """Of a transaction whose first records are deleted, the batches that are left do not say that it was open."""
        return aborted == facts.aborted or (aborted > facts.aborted and self._log.segments.first_offset > 0)

    def _check_times(self, info: SegmentInfo, facts: Facts) -> None:
        times = (facts.first_timestamp, facts.largest_timestamp, facts.largest_offset)
        known = (info.first_timestamp, info.largest_timestamp, info.largest_offset)
        assert known == times, f"{info} has the times {times}"

    def _check_time_index(self, base: int, data: bytes, facts: Facts) -> None:
        start = facts.timed if facts.timed <= len(data) else 0
        for entry in decode_time_entries(data[start:], base_offset=base):
            assert facts.peaks.get(int(entry.last_offset)) == entry.timestamp, (
                f"the time index of {base} has {entry}, where no batch has the largest timestamp so far"
            )
        facts.timed = len(data) // TIME_ENTRY_BYTES * TIME_ENTRY_BYTES

    def check_names(self) -> None:
        """While nobody changes the files. Asserts."""
        log = self._log
        directory = device_of(log).find(log.path)
        if not isinstance(directory, Directory):
            assert not log.segments.end_offset, f"{log.path} is not there"
            return
        known = {int(info.base_offset) for info in log.segments.sealed}
        active = log.segments.active
        for name, node in directory.entries.items():
            parsed = parse_name(name)
            if parsed is None or parsed[2]:
                continue
            base = int(parsed[0])
            assert base in known or base == active.base_offset, f"{name} belongs to no segment"
            if parsed[1] == LOG and base == active.base_offset:
                size = len(node.data) if isinstance(node, Inode) else -1
                assert size == active.size, f"{name} has {size} bytes, not {active.size}"
