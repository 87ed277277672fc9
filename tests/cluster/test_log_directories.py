"""A node with two log directories, as a real process: a replica moves from one to the other and back, and a directory
that is gone, at a start or while the node runs, takes only its own partitions with it."""

from __future__ import annotations

import fcntl
import os
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harmed_machine import loop_device, mounted
from support.clusters.commands import Shell
from support.clusters.waiting import until
from support.root_commands import MissingError, run

import tidelog
from tidelog import TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PARTITIONS = 4
RECORDS = 5
SHUTDOWN, WITHOUT_FLUSH = 0x8004587D, 2
"""EXT4_IOC_SHUTDOWN: from then on the file system answers every access with EIO, as if its device were gone."""


def write(cluster: LocalCluster, *partitions: int) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in partitions:
            for value in range(RECORDS):
                producer.send("orders", value=b"%d" % value * 1000, partition=number)


def ends(admin: tidelog.Admin, *partitions: int) -> list[int | None]:
    places = [TopicPartition("orders", number) for number in partitions]
    found = admin.list_offsets(places)
    return [found[place].offset for place in places]


def places(admin: tidelog.Admin) -> dict[int, str]:
    """The directory of each replica of node 1."""
    (dirs,) = admin.describe_log_dirs([1], ["orders"]).succeeded.values()
    return {row.partition.partition: one.path for one in dirs for row in one.replicas}


def leaders(admin: tidelog.Admin) -> dict[int, int | None]:
    return {one.partition: one.leader for one in admin.describe_topic("orders").partitions}


def figure(cluster: LocalCluster, name: str) -> list[str]:
    with urllib.request.urlopen(f"http://localhost:{cluster.ports(1).http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(f"tidelog_{name}")]


def test_a_replica_moves_between_log_directories_and_one_that_is_gone_takes_only_its_own(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one", settings={"log.dirs": ["data", "more"]}) as cluster:
        first, second = (str(cluster.path(1) / name) for name in ("data", "more"))
        shell = Shell(cluster.bootstrap)
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=PARTITIONS, replication_factor=1)
            write(cluster, *range(PARTITIONS))
            before = places(admin)
            assert set(before.values()) == {first, second}, "replicas are spread over the directories"
            everything = {TopicPartition("orders", number): second for number in range(PARTITIONS)}
            admin.move_replicas(1, everything, timeout=60)
            assert set(places(admin).values()) == {second}
            admin.move_replicas(1, everything)  # they are there: nothing to do
            with pytest.raises(TidelogError, match=f"no online log directory '/elsewhere': use one of {first}"):
                admin.move_replicas(1, {TopicPartition("orders", 0): "/elsewhere"})
            with pytest.raises(TidelogError) as unknown:
                admin.move_replicas(1, {TopicPartition("orders", 9): second})
            assert unknown.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            moved = shell.json("brokers", "move-replicas", "1", "--topic", "orders", "--directory", first + "/")
            assert [row["error"] for row in moved["partitions"]] == [None] * PARTITIONS
            (dirs,) = admin.describe_log_dirs([1]).succeeded.values()
            by_id = str(next(one.directory_id for one in dirs if one.path == second))
            said = shell.run(
                *("brokers", "move-replicas", "1", "--topic", "orders", "--partition", "3", "--directory", by_id)
            )
            assert said == f"orders-3: moved to {by_id}\n"
            assert places(admin) == {0: first, 1: first, 2: first, 3: second}
            shell.run("brokers", "move-replicas", "1", "--topic", "orders", "--directory", "/elsewhere", code=1)
            assert "broker 1: the broker has no online log directory '/elsewhere'" in shell.err
            shell.run("brokers", "move-replicas", "1", "--topic", "other", "--directory", second, code=1)
            write(cluster, *range(PARTITIONS))
            assert ends(admin, 0, 1, 2, 3) == [2 * RECORDS] * PARTITIONS, "nothing was lost on the way"
            cluster.stop(1)
            os.rename(second, second + ".away")
            cluster.start(1)
            until(lambda: leaders(admin) == {0: 1, 1: 1, 2: 1, 3: None}, "only what was in it is offline")
            write(cluster, 0, 1, 2)
            assert ends(admin, 0, 1, 2) == [3 * RECORDS] * 3
            cluster.stop(1)
            os.rename(second + ".away", second)
            cluster.start(1)
            # It was the only replica and counted as lost: whether it is believed again, a person decides.
            shell.run("elect-leaders", "--topic", "orders", "--partition", "3", "--unclean", "--yes")
            until(lambda: leaders(admin)[3] == 1, "it is back")
            assert ends(admin, 3) == [2 * RECORDS]


@contextmanager
def mortal_disk(at: Path, image: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with image.open("wb") as file:
            file.truncate(64 << 20)
        run("mkfs.ext4", "-q", "-F", str(image))
        stack.enter_context(mounted(at, "-t", "ext4", stack.enter_context(loop_device(image))))
        yield


def die(disk: Path) -> None:
    descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
    finally:
        os.close(descriptor)


def test_a_directory_whose_device_dies_takes_only_its_own_partitions_offline(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        try:
            stack.enter_context(mortal_disk(disk, tmp_path / "disk.img"))
        except MissingError as error:
            pytest.skip(str(error))
        dirs = ["data", str(disk / "logs")]
        cluster = stack.enter_context(LocalCluster(1, data=tmp_path / "one", settings={"log.dirs": dirs}))
        admin = stack.enter_context(tidelog.Admin(cluster.bootstrap))
        admin.create_topic("orders", partitions=PARTITIONS, replication_factor=1)
        write(cluster, *range(PARTITIONS))
        dead = [number for number, path in places(admin).items() if path == dirs[1]]
        alive = [number for number in range(PARTITIONS) if number not in dead]
        assert dead
        assert alive
        die(disk)
        short: tidelog.ProducerOptions = {"request_timeout_ms": 1_000, "delivery_timeout_ms": 2_000}
        with pytest.raises(TidelogError), tidelog.Producer(cluster.bootstrap, **short) as producer:
            producer.send("orders", value=b"lost to the device", partition=dead[0]).result()
        wanted = {number: 1 if number in alive else None for number in range(PARTITIONS)}
        until(lambda: leaders(admin) == wanted, "only what was on it is offline")
        write(cluster, *alive)
        assert ends(admin, *alive) == [2 * RECORDS] * len(alive)
        assert f'tidelog_directory_failed{{directory="{dirs[1]}"}} 1' in figure(cluster, "directory_failed")
        assert figure(cluster, "partitions_offline") == [f"tidelog_partitions_offline {len(dead)}"]
        (found,) = Shell(cluster.bootstrap).json("brokers", "describe", "1")["brokers"]
        assert len(found["offline_directories"]) == 1
        broken = {one["path"]: one["error"] is not None for one in found["directories"]}
        assert broken == {str(cluster.path(1) / "data"): False, dirs[1]: True}
        with pytest.raises(TidelogError, match="no online log directory"):
            admin.move_replicas(1, {TopicPartition("orders", alive[0]): dirs[1]})
