"""What `make chaos` breaks machines with: the disk that forgets, the network that loses, the clock that jumps."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from chaos import native_tools
from chaos.lossy_disk import LossyDisk
from chaos.network import CUT, OPERATOR, LinkFault, Network, remove_leftovers
from support.clusters.fault_devices import cannot
from support.root_commands import MissingError, run

ECHO = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('', 9))\nprint(flush=True)\n"
ECHO += "while True:\n    data, at = s.recvfrom(100)\n    s.sendto(data, at)\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    try:
        with LossyDisk.made(tmp_path / "disk", tmp_path / "backing") as made:
            yield made
    except MissingError as error:
        cannot(str(error))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    sync(path)


def names(disk: LossyDisk) -> set[str]:
    return set(os.listdir(disk.path)) - {".sync"}


def test_disk_that_loses_power_forgets_what_was_not_synced(disk: LossyDisk) -> None:
    path = disk.path
    for name in ("grown", "changed", "removed", "moved", "replaced"):
        write(path / name, name.encode())
    sync(path)
    with (path / "grown").open("ab") as file:
        file.write(b" more")
    with (path / "changed").open("r+b") as file:
        file.write(b"CH")
    write(path / "new", b"synced, but its name is not")
    (path / "removed").unlink()
    (path / "moved").rename(path / "elsewhere")
    write(path / "other", b"other")
    (path / "other").rename(path / "replaced")
    disk.lose_power(None)
    assert names(disk) == {"grown", "changed", "removed", "moved", "replaced"}
    assert {name: (path / name).read_bytes().decode() for name in names(disk)} == {name: name for name in names(disk)}


def test_disk_keeps_what_was_synced(disk: LossyDisk) -> None:
    path = disk.path
    (path / "directory").mkdir()
    write(path / "directory" / "temporary", b"kept")
    (path / "directory" / "temporary").rename(path / "directory" / "final")
    sync(path / "directory")
    sync(path)
    disk.lose_power(None)
    assert (path / "directory" / "final").read_bytes() == b"kept"
    assert os.listdir(path / "directory") == ["final"]


def test_disk_keeps_a_state_store_commit(disk: LossyDisk) -> None:
    def store() -> lmdb.Environment:
        return lmdb.open(str(disk.path / "store"), map_size=1 << 20)

    with store() as environment:
        sync(disk.path)
        sync(disk.path / "store")
        for number in range(5):
            with environment.begin(write=True) as transaction:
                transaction.put(b"last", b"%d" % number)
    disk.lose_power(None)
    with store() as environment, environment.begin() as transaction:
        assert transaction.get(b"last") == b"4"


def test_partial_loss_keeps_the_oldest_changes_of_each_file(disk: LossyDisk) -> None:
    write(disk.path / "log", b"")
    sync(disk.path)
    kept = set()
    for seed in range(1, 9):
        with (disk.path / "log").open("ab", buffering=0) as file:
            file.truncate(0)
            sync(disk.path / "log")
            for number in range(6):
                file.write(b"%d" % number)
        disk.lose_power(seed)
        kept.add((disk.path / "log").read_bytes())
    assert kept <= {b"012345"[:length] for length in range(7)}
    assert len(kept) > 1


def test_syncfs_of_a_node_reaches_the_disk(disk: LossyDisk) -> None:
    (disk.path / "file").write_bytes(b"synced with the whole disk")
    program = "import ctypes, os; raise SystemExit(ctypes.CDLL(None).syncfs(os.open('.', os.O_RDONLY)))"
    environment = {"LD_PRELOAD": str(native_tools.preload()), "CHAOS_SYNC": str(disk.sync_file)}
    subprocess.run([sys.executable, "-c", program], cwd=disk.path, env=environment, check=True)
    disk.lose_power(None)
    assert (disk.path / "file").read_bytes() == b"synced with the whole disk"


def test_disk_fails_is_full_and_stalls_on_command(disk: LossyDisk) -> None:
    path = disk.path / "file"
    write(path, b"")
    for command, message in (("fail w", "Input/output error"), ("full", "No space left")):
        disk.command(command)
        with pytest.raises(OSError, match=message), path.open("wb", buffering=0) as file:
            file.write(b"refused")
        disk.command("go")
    disk.command("stall s")
    with subprocess.Popen([sys.executable, "-c", f"import os; os.fsync(os.open({str(path)!r}, os.O_RDWR))"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        disk.command("go")
        assert process.wait(30) == 0


SILENCE_S = 1.5
"""Nothing comes any more; a packet takes less than a millisecond, and a busy machine may be late."""


@contextmanager
def two_hosts() -> Iterator[tuple[Network, subprocess.Popen[str]]]:
    """And a process on the second that sends packets back."""
    try:
        with Network.made([1, 2], seed=7) as network:
            command = [*network.wrapper(2), sys.executable, "-c", ECHO]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                try:
                    yield network, process
                finally:
                    process.kill()
    except MissingError as error:
        cannot(str(error))


def answers(network: Network, count: int) -> list[tuple[bytes, float]]:
    """Of packets from this process to the second host: what came back, and after how many seconds."""
    found: list[tuple[bytes, float]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.settimeout(SILENCE_S)
        began_s = time.monotonic()
        for number in range(count):
            mine.sendto(b"%d" % number, (network.address(2), 9))
        try:
            while True:
                found.append((mine.recv(100), time.monotonic() - began_s))
        except TimeoutError:
            return found


def test_network_cuts_delays_doubles_and_heals() -> None:
    with two_hosts() as (network, _):
        assert [text for text, _ in answers(network, 3)] == [b"0", b"1", b"2"]
        network.set_link(2, OPERATOR, CUT)
        assert answers(network, 3) == [], "the way back is cut"
        network.clear()
        network.between([2], [OPERATOR], LinkFault(delay_ms=60))
        delayed = answers(network, 3)
        assert [text for text, _ in delayed] == [b"0", b"1", b"2"]
        assert min(after_s for _, after_s in delayed) >= 0.12, "60 ms each way"
        network.clear()
        network.set_link(OPERATOR, 2, LinkFault(double=1.0))
        assert sorted(text for text, _ in answers(network, 2)) == [b"0", b"0", b"1", b"1"]
        network.set_link(OPERATOR, 2, LinkFault(loss=0.5))
        assert 0 < len(answers(network, 60)) < 60
        counts = network.counts()
        assert counts["lost"] > 3
        assert counts["doubled"] == 2


def test_network_reorders_packets() -> None:
    with two_hosts() as (network, _):
        network.set_link(OPERATOR, 2, LinkFault(delay_ms=30, early=0.5))
        order = [int(text) for text, _ in answers(network, 20)]
        assert sorted(order) == list(range(20))
        assert order != sorted(order)


def test_namespaces_of_a_run_that_was_killed_are_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    name = f"tlchaos{process.pid}-1"
    try:
        run("ip", "netns", "add", name)
    except MissingError as error:
        cannot(str(error))
    remove_leftovers()
    assert name not in run("ip", "netns", "list")


def test_clock_of_a_process_jumps_and_comes_back(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("q", 3_600 * 10**9))
    program = f"""if True:
        import struct, time
        ahead = time.time()
        monotonic = time.monotonic()
        open({str(clock)!r}, "r+b", buffering=0).write(struct.pack("q", 0))
        print(ahead - time.time(), time.monotonic() - monotonic)
    """
    try:
        environment = {"LD_PRELOAD": str(native_tools.preload()), "CHAOS_CLOCK": str(clock)}
    except MissingError as error:
        cannot(str(error))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    ahead_s, monotonic_s = map(float, done.stdout.split())
    assert 3_590 < ahead_s <= 3_600
    assert 0 <= monotonic_s < 60
