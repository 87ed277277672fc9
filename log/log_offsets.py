"""The log start offset and the high watermark of an open log. Pure."""

from tidelog.log.stored_state import encode_high_watermark
from tidelog.model.ids import Offset


class LogOffsets:
    """Owns both offsets. The high watermark belongs to replication; the log keeps it so that it survives a restart."""

    __slots__ = ("high_watermark", "start_offset")

    def __init__(self, *, start_offset: int, high_watermark: int) -> None:
        self.start_offset = Offset(start_offset)
        self.high_watermark = Offset(high_watermark)

    def set_start(self, offset: int) -> None:
        self.start_offset = Offset(offset)

    def set_high_watermark(self, offset: Offset) -> None:
        self.high_watermark = offset

    def lower_high_watermark(self, end: int) -> bytes:
        """Limit the high watermark to the new log end and return its stored form.

        The commit of a truncation stores it too. Otherwise the next start would find the old high watermark and take
        records that were appended since for committed ones.
        """
        self.high_watermark = Offset(min(self.high_watermark, end))
        return encode_high_watermark(self.high_watermark)
