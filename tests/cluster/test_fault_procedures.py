"""The fault procedures of the sources on real processes: three brokers, three replicas, two of them must be in sync.

Each says first what is expected. All the while numbered records are written with acks=all and read by commands of
their own; in the end everything acknowledged is there once, in order, in its place, and all replicas are in sync.

One cluster serves all: broker 2 has its logs on a device that can hang, broker 3 on one that
can be full, where this machine can do that (REQUIRE_FAULT_DEVICES=1: it has to); each test leaves it whole.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from harmed_machine import HangingDisk, Network, SmallDisk
from procedures import (
    BROKERS,
    EACH_LEADS_ONE,
    are_in_sync,
    controller,
    create,
    is_left,
    is_whole,
    judge,
    partitions,
    traffic,
    write_some,
)
from support.clusters.commands import Shell
from support.clusters.fault_devices import cannot
from support.clusters.waiting import DEADLINE_S, until
from support.root_commands import MissingError

from tidelog.client.consumer.threaded import Consumer
from tidelog.client.errors import LogTruncatedError
from tidelog.client.record import TopicPartition
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

HANGING, SMALL = 2, 3
"""Brokers with a disk of their own kind."""
CUT_OFF = 2
DISK_MIB = 64
DELAY_S = 0.1
LAG_MAX_MS = 2_000
DELIVERY_TIMEOUT_S = 120
"""After that a writer gives a record up, unless it is set."""
FULL = (
    "No space left on device (ENOSPC); nothing was written; free space on the disk of this log directory, "
    "no restart is needed"
)
SPARES = (4, 5)
"""Brokers only; they run for one test."""


@dataclass
class Scene:
    cluster: LocalCluster
    hanging: HangingDisk | None = None
    small: SmallDisk | None = None
    network: Network | None = None
    why_not: str = ""
    """What a machine lacks that has none of these."""

    @property
    def at(self) -> str:
        return self.cluster.bootstrap

    def clients_at(self, network: Network) -> str:
        """Where the brokers are for those on the clients' side of the network."""
        return ",".join(f"{network.address(one)}:{self.cluster.ports(one).grpc}" for one in BROKERS)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    data = tmp_path_factory.mktemp("procedures")
    settings = {"log.dirs": ["disk"], "metadata.log.dir": "metadata", "replica.lag.time.max.ms": LAG_MAX_MS}
    with ExitStack() as stack:
        cluster = LocalCluster(nodes=5, data=data, settings=settings, start=False)
        scene = Scene(cluster)
        try:
            with ExitStack() as harms:
                images = tmp_path_factory.mktemp("images")
                scene.hanging = harms.enter_context(
                    HangingDisk.made(cluster.path(HANGING) / "disk", images=images, size_mib=DISK_MIB)
                )
                scene.small = harms.enter_context(SmallDisk.made(cluster.path(SMALL) / "disk", size_mib=DISK_MIB))
                scene.network = harms.enter_context(Network.made(BROKERS))
                stack.push(harms.pop_all())
        except MissingError as error:
            scene = Scene(cluster, why_not=str(error))
        stack.enter_context(cluster)
        if scene.network is not None:
            for number in BROKERS:
                advertise(cluster, number, scene.network.address(number))
        for number in BROKERS:
            cluster.start(number, wait=False)
        for number in BROKERS:
            cluster.wait_ready(number)
        yield scene


@pytest.fixture(autouse=True)
def whole(scene: Scene) -> Iterator[None]:
    """The three run after each test, with all of their directories, and the spares do not, however it has ended."""
    yield
    for number in SPARES:
        if runs(scene.cluster, number):
            scene.cluster.stop(number)
    for number in BROKERS:
        if runs(scene.cluster, number):
            scene.cluster.resume(number)
        if runs(scene.cluster, number) and has_given_up(scene.cluster, number):
            scene.cluster.stop(number)
        if not runs(scene.cluster, number):
            scene.cluster.start(number)


def runs(cluster: LocalCluster, number: int) -> bool:
    try:
        return cluster.pid(number) > 0
    except KeyError:
        return False


def advertise(cluster: LocalCluster, number: int, host: str) -> None:
    """Nodes advertise this address to clients; nodes reach each other where they always do."""
    path, port = cluster.path(number) / "node.toml", cluster.ports(number).grpc
    text = path.read_text(encoding="utf-8").replace(f"GRPC://localhost:{port}", f"GRPC://0.0.0.0:{port}")
    path.write_text(f'{text}"advertised.listeners" = ["GRPC://{host}:{port}"]\n', encoding="utf-8")


def figures(cluster: LocalCluster, number: int, name: str) -> list[float]:
    with urllib.request.urlopen(f"http://localhost:{cluster.ports(number).http}/metrics", timeout=10) as answer:
        found = re.findall(rf"^tidelog_{name}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, f"{name} is measured"
    return [float(value) for value in found]


def has_given_up(cluster: LocalCluster, number: int) -> bool:
    """Whether the broker has closed its log directory until its next start."""
    return figures(cluster, number, "directory_failed") == [1]


def missing(scene: Scene, *brokers: int) -> tuple[float, float]:
    """By the metrics of these brokers: partitions that lack a replica, and those that lack too many to be written."""
    under_replicated, under_min = (
        sum(figures(scene.cluster, number, f"partitions_{what}")[0] for number in brokers)
        for what in ("under_replicated", "under_min_isr")
    )
    return under_replicated, under_min


def others(scene: Scene, victim: int) -> str:
    """Where the other brokers are: a frozen one would only be waited for."""
    return ",".join(f"localhost:{scene.cluster.ports(number).grpc}" for number in BROKERS if number != victim)


def leader_of(scene: Scene, topic: str, partition: int = 0) -> int:
    return partitions(scene.at, topic)[partition].leader


def read_to(reader: Consumer, place: TopicPartition, end: int) -> None:
    reader.assign([place])

    def is_there() -> bool:
        reader.poll(1.0)
        return reader.position(place) == end

    until(is_there, f"{place} is read up to {end}")


@pytest.mark.requirement("a:X3-1", "a:S-02", "a:S-03", "a:M-05", "b:EX-04", "b:D-01")
@pytest.mark.requirement("a:S-08", "a:X3-12", "b:O-08", "b:EX-32")
def test_leader_election(scene: Scene, tmp_path: Path) -> None:
    """The leader of some partitions is killed with -9.

    Expected: another member of each ISR leads, within a second or two and long before the writer gives a record up;
    the writer and the reader stand still for that long and see no error; the metrics count what lacks a replica, and
    nothing else; the dead one is a follower when it comes back."""
    create(scene.at, "many", replicas=",".join([EACH_LEADS_ONE] * 10))
    create(scene.at, "leader")
    until(lambda: missing(scene, *BROKERS) == (0, 0), "a healthy cluster misses nothing")
    with traffic(scene.at, tmp_path, "leader") as running:
        before = partitions(scene.at, "leader")
        victim = before[0].leader
        alive = [number for number in BROKERS if number != victim]
        began_s = time.monotonic()
        scene.cluster.kill(victim)
        until(lambda: is_left(scene.at, "many", victim), "all partitions are led, and it is out of sync")
        took_s = time.monotonic() - began_s
        print(f"kill -9 of a broker: all of 30 partitions had leaders after {took_s:.2f} s")
        assert took_s < DELIVERY_TIMEOUT_S / 2
        running.goes_on()
        for old, new in zip(before, partitions(scene.at, "leader"), strict=True):
            assert new.leader in set(old.isr) - {victim}
            assert (new.leader_epoch > old.leader_epoch) == (old.leader == victim), "only what it led has moved"
        until(lambda: is_left(scene.at, "leader", victim), "it is out of sync")
        until(lambda: missing(scene, *alive)[0] > 0, "what lacks a replica is counted")
        assert missing(scene, *alive)[1] == 0, "two are enough"
        scene.cluster.start(victim)
    assert all(row.leader != victim for row in partitions(scene.at, "leader"))
    until(lambda: missing(scene, *BROKERS) == (0, 0), "healthy again")
    Shell(scene.at).run("topics", "delete", "many", "--yes")


def is_fenced(at: str, broker: int) -> bool:
    (state,) = (row["state"] for row in Shell(at).json("brokers", "list")["brokers"] if row["id"] == broker)
    return bool(state == "fenced")


def is_replaced(at: str, broker: int) -> bool:
    return controller(at) not in (-1, broker)


@pytest.mark.requirement("a:X3-2", "a:B-60", "a:B-61", "a:B-62", "a:S-03")
def test_controller_election(scene: Scene, tmp_path: Path) -> None:
    """The active controller is killed with -9; the next one freezes and thaws. Each leads a partition, too.

    Expected: another one acts within a second or two, with all of the metadata, and topics can be created; it fences
    the silent broker. Partitions that the node led move, the others are not touched. When it is back, it follows."""
    create(scene.at, "controller")
    with traffic(scene.at, tmp_path, "controller") as running:
        for ending in ("killed", "frozen"):
            victim, before = controller(scene.at), partitions(scene.at, "controller")
            at, began_s = others(scene, victim), time.monotonic()
            scene.cluster.kill(victim) if ending == "killed" else scene.cluster.pause(victim)
            until(partial(is_replaced, at, victim), "another controller is active")
            print(f"the active controller was {ending}: another was active after {time.monotonic() - began_s:.2f} s")
            Shell(at).run("topics", "create", f"after-{ending}")
            running.goes_on()
            for old, new in zip(before, partitions(at, "controller"), strict=True):
                assert new.leader in (set(old.isr) - {victim} if old.leader == victim else {old.leader})
            until(partial(is_fenced, at, victim), "it is fenced")
            scene.cluster.start(victim) if ending == "killed" else scene.cluster.resume(victim)
            until(lambda: is_whole(scene.at, "controller"), "it is back in sync")
            scene.cluster.wait_ready(victim)
            assert is_replaced(f"localhost:{scene.cluster.ports(victim).grpc}", victim), "it follows"
            assert is_whole(scene.at, f"after-{ending}")


@pytest.mark.requirement("a:X3-3", "a:O-14", "a:S-03", "b:E-12")
def test_rolling_restart_of_brokers(scene: Scene, tmp_path: Path) -> None:
    """Each broker is stopped in order and started again, one after the other; one of them is the active controller.

    Expected: each hands its leaderships over before it stops, and exits with 0; the writer repeats what met the old
    leader and sees no error; topics can be created meanwhile; with a full ISR between two restarts nothing is lost."""
    create(scene.at, "rolling")
    with traffic(scene.at, tmp_path, "rolling") as running:
        for number in BROKERS:
            assert scene.cluster.stop(number) == 0
            ending = scene.cluster.log(number).rpartition("stopping in order")[2]
            assert "not ready" not in ending, "an orderly stop is no trouble"
            assert is_left(scene.at, "rolling", number), "it had handed everything over when it ended"
            Shell(scene.at).run("topics", "create", f"without-{number}")
            running.goes_on()
            scene.cluster.start(number)
            until(lambda: is_whole(scene.at, "rolling"), "the ISR is full again")


@pytest.mark.case("T4")
@pytest.mark.requirement("a:X3-4")
def test_unclean_leader_election(scene: Scene, tmp_path: Path) -> None:
    """The replicas die one by one; the first that died comes back, and lacks what was acknowledged since.

    Expected, with unclean election off: nobody leads, and the description names the brokers to bring back and the
    command that gives records up. A partition that waits for them loses nothing; one that is given up by the command
    is led again, and exactly what the new leader lacked is lost. With unclean election on: the same loss, unasked; a
    reader that had read it gets the diverging offset. Brokers that return cut off what they have more."""
    at, before, late = scene.at, 100, 60
    first, others = 3, SPARES
    waits, asked = 0, 1
    for number in others:
        scene.cluster.start(number, wait=False)
    for number in others:
        scene.cluster.wait_ready(number)
    replicas = ":".join(map(str, (*others, first)))
    create(at, "kept", "unclean.leader.election.enable=false", replicas=f"{replicas},{replicas}")
    create(at, "let-go", "unclean.leader.election.enable=true", replicas=replicas)
    histories = {topic: tmp_path / topic for topic in ("kept", "let-go")}
    for topic, history in histories.items():
        write_some(at, topic, history, before)
    scene.cluster.kill(first)
    for topic, history in histories.items():
        until(partial(are_in_sync, at, topic, others), "the first is out")
        write_some(at, topic, history, late)
    with Consumer(at, auto_offset_reset="earliest") as reader:
        read_to(reader, TopicPartition("let-go", 0), before + late)
        for number in others:
            scene.cluster.kill(number)
        scene.cluster.start(first)
        until(lambda: leader_of(scene, "let-go") == first, "it leads what it may lead by the topic's setting")
        with pytest.raises(LogTruncatedError, match="let-go-0") as raised:
            reader.poll(DEADLINE_S)
    assert (raised.value.position, raised.value.diverging_offset) == (before + late, before)
    shell = Shell(at)
    (found,) = shell.json("topics", "describe", "kept")["topics"]
    for row in found["partitions"]:
        assert (row["leader"], row["state"]) == (None, "offline")
        assert f"tidelog elect-leaders --unclean --topic kept --partition {row['partition']}" in row["advice"]
        assert "bring back broker" in row["advice"]
    shell.run("elect-leaders", "--unclean", "--topic", "kept", "--partition", str(asked), "--yes")
    assert [leader_of(scene, "kept", number) for number in (waits, asked)] == [-1, first]
    for number in others:
        scene.cluster.start(number)
    for topic, history in histories.items():
        until(partial(is_whole, at, topic), f"{topic} is in sync again")
        # Past the offsets that were lost: what lies beyond the end a reader cannot miss.
        write_some(at, topic, history, 2 * late)
    assert leader_of(scene, "kept", waits) in others
    kept = judge(at, "kept", histories["kept"], lost=late // 2)
    assert {row["partition"] for row in kept["anomalies"]} == {asked}
    judge(at, "let-go", histories["let-go"], lost=late)
    shell.run("topics", "delete", *histories, "--yes")


@pytest.mark.requirement("a:X3-5")
def test_clients_lose_connectivity_to_one_broker(scene: Scene, tmp_path: Path) -> None:
    """Every packet between the clients and one broker is lost; the brokers see each other.

    Expected: the broker stays leader, since nobody but the clients misses it; its partition stands still for them,
    the others go on; nothing fails before the delivery timeout, and when packets pass again, what waited is written
    once."""
    network = scene.network
    if network is None:
        cannot(f"no network of its own: {scene.why_not}")
    create(scene.at, "cut-off")
    with traffic(
        scene.at, tmp_path, "cut-off", clients_at=scene.clients_at(network), wrapper=network.command()
    ) as running:
        before = partitions(scene.at, "cut-off")
        led = [row.partition for row in before if row.leader == CUT_OFF]
        others = [row.partition for row in before if row.leader != CUT_OFF]
        assert led, "it leads something"
        with network.cut_off(CUT_OFF):
            running.goes_on(others)
            standing = running.acks()
            running.goes_on(others)
            assert [running.acks()[number] for number in led] == [standing[number] for number in led]
            assert network.lost > 0
        took_s = running.goes_on(led)
        print(f"the partition of the broker that was cut off went on after {took_s:.2f} s")
        epochs = [(row.leader, row.leader_epoch) for row in partitions(scene.at, "cut-off")]
        assert epochs == [(row.leader, row.leader_epoch) for row in before]


@pytest.mark.requirement("a:X3-6")
def test_high_latency_between_client_and_broker(scene: Scene, tmp_path: Path) -> None:
    """Every packet takes 100 ms, so an answer takes 200.

    Expected: nothing fails and nothing is repeated; five batches of a partition are in flight at once. One batch after
    the other could not be done in the time that 60 answers take."""
    network = scene.network
    if network is None:
        cannot(f"no network of its own: {scene.why_not}")
    create(scene.at, "latency")
    written, batches = tmp_path / "written", 60
    one_by_one_s = batches * 2 * DELAY_S
    with network.slow(DELAY_S):
        began_s = time.monotonic()
        records = 10 * batches * len(BROKERS)
        command = ("verify", "produce", "latency", "--records", str(records), "--rate", "5000", "--output", "json")
        shell = Shell(scene.clients_at(network))
        with shell.start(*command, "--history", str(written), wrapper=network.command()) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        took_s = time.monotonic() - began_s
    print(f"{batches} batches of each partition took {took_s:.2f} s; one after the other: {one_by_one_s:.1f} s")
    assert process.returncode == 0, err
    reported = json.loads(out)
    assert (reported["acknowledged"], reported["retries"]) == (records, 0)
    assert took_s < one_by_one_s
    judge(scene.at, "latency", written)


@pytest.mark.requirement("a:X3-7")
def test_disk_full(scene: Scene, tmp_path: Path) -> None:
    """The disk of one broker has no free byte.

    Expected: nothing is acknowledged that is not stored. What the broker led, others lead at once; where it follows,
    they wait for it no longer than `replica.lag.time.max.ms`. A partition that nobody else has is read-only, and says
    why, and what to do. Nobody gives up the directory; when there is room, it catches up by itself."""
    at, small = scene.at, scene.small
    if small is None:
        cannot(f"no disk of its own: {scene.why_not}")
    create(at, "full")
    create(at, "alone", replicas=str(SMALL))
    alone = tmp_path / "alone"
    write_some(at, "alone", alone, 50)
    with traffic(at, tmp_path, "full") as running:
        assert SMALL in {row.leader for row in partitions(at, "full")}
        with small.full():
            until(lambda: is_left(at, "full", SMALL), "others go on without it", timeout_s=20)
            running.goes_on()
            batch = ("--records", "1000", "--batch", "1000", "--timeout-ms", "500")
            assert FULL in Shell(at).done("verify", "produce", "alone", *batch, "--history", str(alone), code=1).err
            judge(at, "alone", alone)
            assert not has_given_up(scene.cluster, SMALL)
        assert " is full: its " in scene.cluster.log(SMALL)
        assert not scene.cluster.ended(), "the node lives"
    assert not has_given_up(scene.cluster, SMALL)
    write_some(at, "alone", alone, 50)
    judge(at, "alone", alone)


@pytest.mark.requirement("a:X3-8")
def test_hanging_disk(scene: Scene, tmp_path: Path) -> None:
    """The disk of one broker does not answer: syncs do not return, while its heartbeats go on.

    Expected: after `disk.stall.timeout.ms` (2 s) it gives up its leaderships and in-sync places, and says so; writing
    goes on without it. When the disk answers, it catches up and is in sync again."""
    at = scene.at
    if scene.hanging is None:
        cannot(f"no disk of its own: {scene.why_not}")
    create(at, "hanging")
    with traffic(at, tmp_path, "hanging") as running:
        assert HANGING in {row.leader for row in partitions(at, "hanging")}
        said = len(scene.cluster.log(HANGING))
        with scene.hanging.hanging():
            began_s = time.monotonic()
            until(lambda: is_left(at, "hanging", HANGING), "others go on without it", timeout_s=20)
            print(f"a disk that hangs: the broker was left after {time.monotonic() - began_s:.2f} s")
            running.goes_on()
            (state,) = (row["state"] for row in Shell(at).json("brokers", "list")["brokers"] if row["id"] == HANGING)
            assert state == "live", "its heartbeats go on"
        assert "stalled directories" in scene.cluster.log(HANGING)[said:]
