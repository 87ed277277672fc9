"""Walks the batches of an open log on its simulated device: what is durable, or what is visible. Changes nothing.

Checks read devices and not logs: a read through a log would move its files in the pool, and its hints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tidelog.log.batch import read_header
from tidelog.log.log import Log
from tidelog.log.segment import INDEX, LOG
from tidelog.model.errors import TidelogError
from tidelog.world.simulated.device import Directory, Inode, Node
from tidelog.world.simulated.disk import SimDevice, SimDisk

if TYPE_CHECKING:
    from tidelog.log.batch_header import BatchHeader


class Found(NamedTuple):
    """A batch on the device."""

    header: BatchHeader
    segment: int
    position: int
    data: memoryview


def device_of(log: Log) -> SimDevice:
    disk = log.disk
    assert isinstance(disk, SimDisk), "a log on a simulated disk"
    return disk._device


def image_of(log: Log, base_offset: int, *, durable: bool, suffix: str = LOG) -> bytearray:
    """The bytes of a segment's file; empty if there is none. `durable`: as a loss of power would leave them, so the
    names on the way count too."""
    device, path = device_of(log), log.segments.file_path(base_offset, suffix)
    node = find_durable(device, path) if durable else device.find(path)
    if not isinstance(node, Inode):
        return bytearray()
    return node.durable if durable else node.data


def find_durable(device: SimDevice, path: str) -> Node | None:
    """What has this path on the device itself; None if a name of it is not there."""
    node: Node | None = device.root
    for name in path.split("/"):
        if not isinstance(node, Directory):
            return None
        node = node.durable.get(name)
    return node


def index_image(log: Log, base_offset: int) -> bytearray:
    return image_of(log, base_offset, durable=False, suffix=INDEX)


class LogWalk:
    """A position in a log that only moves forward. Begins again (`restart`) after anything but appends."""

    __slots__ = ("durable", "generation", "log", "offset", "position", "segment", "version")

    def __init__(self, log: Log, *, durable: bool) -> None:
        self.log = log
        self.durable = durable
        self.restart()

    def restart(self) -> None:
        log = self.log
        self.segment = self.offset = int(log.segments.first_offset)
        self.position = 0
        self.generation, self.version = log.durability.generation, log.segments.version

    @property
    def is_stale(self) -> bool:
        """The log was truncated or cleaned since the walk began, or has dropped where it stands."""
        log = self.log
        return (
            self.generation != log.durability.generation
            or self.version != log.segments.version
            or self.segment < log.segments.first_offset
        )

    def batches(self, end: int) -> Iterator[Found]:
        """The next batches below `end`, as far as there are any that can be read."""
        segments = self.log.segments
        while self.offset < end:
            active = segments.active
            size, following = active.size, -1
            if self.segment != active.base_offset:
                at = bisect_left(segments.sealed, self.segment, key=lambda info: info.base_offset)
                size, following = segments.sealed[at].size, segments.sealed[at].next_offset
            image = image_of(self.log, self.segment, durable=self.durable)
            limit = min(size, len(image))
            while self.position < limit and self.offset < end:
                try:
                    header = read_header(image, self.position)
                except TidelogError:
                    return
                if self.position + header.size > limit or header.next_offset > end:
                    return
                data = memoryview(bytes(image[self.position : self.position + header.size]))
                found = Found(header, self.segment, self.position, data)
                self.position += header.size
                self.offset = int(header.next_offset)
                yield found
            if following < 0 or self.position < size:
                return
            self.segment, self.position, self.offset = following, 0, following
