"""A machine that goes wrong on command: a disk that is full, a disk that hangs, a network that delays and loses.

Root's work: file systems are mounted and a network namespace is made, all of it undone when the block ends. A machine
that cannot do that says why (`MissingError`); tests skip with it. To see whether this one can, by doing all of it once:

    PYTHONPATH=tests python tests/cluster/harmed_machine.py
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.root_commands import MissingError, run

FREEZE, THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of linux/fs.h."""
TUN_SET_INTERFACE, TUN_PLAIN = 0x400454CA, 0x1001
"""TUNSETIFF; IFF_TUN and IFF_NO_PI: whole IP packets, nothing before them."""
PACKET_BYTES_MAX = 65_536
PACKETS_MAX = 100_000
"""On their way at once; more are lost, as in any router."""
BALLAST = "ballast"


@contextmanager
def mounted(at: Path, *options: str) -> Iterator[None]:
    at.mkdir(parents=True, exist_ok=True)
    run("mount", *options, str(at))
    try:
        yield
    finally:
        run("umount", str(at))


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    device = run("losetup", "--find", "--show", str(image))
    try:
        yield device
    finally:
        run("losetup", "--detach", device)


class SmallDisk:
    """A file system of its own in memory that `fill` leaves without a free byte."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def made(cls, path: Path, *, size_mib: int) -> Iterator[SmallDisk]:
        with mounted(path, "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs"):
            yield cls(path)

    @contextmanager
    def full(self) -> Iterator[None]:
        """No byte can be written for the length of the block."""
        try:
            with (self.path / BALLAST).open("wb", buffering=0) as file:
                block = 1 << 20
                while block:
                    try:
                        while file.write(bytes(block)) == block:
                            pass
                    except OSError:
                        block //= 2
            yield
        finally:
            (self.path / BALLAST).unlink(missing_ok=True)


class HangingDisk:
    """A file system on a device that does not answer on command.

    The device is a file of an outer file system. While that one is frozen, everything that goes to the device waits,
    as with a controller that has lost its disk: the page cache takes writes, a sync does not return. Nothing is lost.
    """

    def __init__(self, outer: Path) -> None:
        self._outer = outer

    @classmethod
    @contextmanager
    def made(cls, path: Path, *, images: Path, size_mib: int) -> Iterator[HangingDisk]:
        """Mounted at `path`; the images of the two file systems lie in `images`."""
        with ExitStack() as stack:
            outer_image, outer = images / "outer.img", images / "outer"
            _make_image(outer_image, size_mib + size_mib // 4 + 8)
            device = stack.enter_context(loop_device(outer_image))
            stack.enter_context(mounted(outer, "-t", "ext4", device))
            inner_image = outer / "inner.img"
            # Without a journal: a transaction that waits for the device would hold up writes to the page cache too.
            _make_image(inner_image, size_mib, "-O", "^has_journal")
            device = stack.enter_context(loop_device(inner_image))
            stack.enter_context(mounted(path, "-t", "ext4", device))
            yield cls(outer)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """For the length of the block, whatever happens in it: nothing that waits could be ended otherwise."""
        descriptor = os.open(self._outer, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(descriptor, THAW, 0)
        finally:
            os.close(descriptor)


def _make_image(path: Path, size_mib: int, *options: str) -> None:
    with path.open("wb") as file:
        file.truncate(size_mib << 20)
    run("mkfs.ext4", "-q", "-F", *options, str(path))


class Network:
    """A namespace for clients, and the way between it and this machine: every packet passes through `_carry`.

    Servers have an address of their own each, so that one of them can be cut off from the clients and from nobody
    else. On this machine itself these addresses always work.
    """

    def __init__(self, namespace: str, subnet: str, ends: Sequence[int]) -> None:
        self.namespace = namespace
        self.delay_s = 0.0
        """One way."""
        self.lost = 0
        self._subnet = subnet
        self._ends = ends
        self._cut: frozenset[bytes] = frozenset()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)

    @classmethod
    @contextmanager
    def made(cls, servers: Sequence[int]) -> Iterator[Network]:
        name = f"tl{os.getpid()}"
        subnet = f"198.18.{os.getpid() % 256}"
        with ExitStack() as stack:
            ends: list[int] = []
            for side in "ab":
                ends.append(_open_tun(f"{name}{side}"))
                stack.callback(os.close, ends[-1])  # the interface goes with it
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
            run("ip", "link", "set", f"{name}b", "netns", name)
            for number in servers:
                run("ip", "address", "add", f"{subnet}.{number}/32", "dev", f"{name}a")
            run("ip", "link", "set", f"{name}a", "up")
            run("ip", "route", "add", f"{subnet}.200/32", "dev", f"{name}a")
            inside = ("ip", "-n", name)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "address", "add", f"{subnet}.200/32", "dev", f"{name}b")
            run(*inside, "link", "set", f"{name}b", "up")
            run(*inside, "route", "add", f"{subnet}.0/24", "dev", f"{name}b")
            network = cls(name, subnet, ends)
            network._thread.start()
            stack.callback(network._end)
            yield network

    def address(self, server: int) -> str:
        return f"{self._subnet}.{server}"

    def command(self) -> list[str]:
        """What to put before a command that shall run on the clients' side."""
        return ["ip", "netns", "exec", self.namespace]

    @contextmanager
    def cut_off(self, server: int) -> Iterator[None]:
        """Packets between the clients and this server are lost without a notice to either side."""
        self._cut = frozenset({bytes(int(part) for part in self.address(server).split("."))})
        try:
            yield
        finally:
            self._cut = frozenset()

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        self.delay_s = delay_s
        try:
            yield
        finally:
            self.delay_s = 0.0

    def _end(self) -> None:
        os.write(self._woken, b".")
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def _carry(self) -> None:
        """Packets from either end to the other one, in order, each after the delay that held when it came."""
        first, second = self._ends
        other = {first: second, second: first}
        under_way: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([self._wake, first, second], [], [], wait_s)
            if self._wake in ready:
                return
            for end in ready:
                packet = os.read(end, PACKET_BYTES_MAX)
                is_cut = packet[12:16] in self._cut or packet[16:20] in self._cut
                if packet[0] >> 4 != 4 or is_cut or len(under_way) >= PACKETS_MAX:
                    self.lost += is_cut
                    continue
                due_s = time.monotonic() + self.delay_s
                under_way.append((max(due_s, under_way[-1][0]) if under_way else due_s, other[end], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                os.write(end, packet)


def _open_tun(name: str) -> int:
    descriptor = -1
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, TUN_SET_INTERFACE, struct.pack("16sH22x", name.encode(), TUN_PLAIN))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise MissingError(f"/dev/net/tun: {error}") from error
    return descriptor


def probe() -> None:
    """Have each of them for a moment; `MissingError` if that cannot be."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        root = Path(directory)
        (root / "images").mkdir()
        hanging = stack.enter_context(HangingDisk.made(root / "hanging", images=root / "images", size_mib=8))
        with hanging.hanging():
            pass
        stack.enter_context(SmallDisk.made(root / "small", size_mib=8))
        stack.enter_context(Network.made((1,)))


if __name__ == "__main__":
    try:
        probe()
    except (MissingError, OSError) as error:
        sys.exit(str(error))
