"""What an administrator does while nodes die: voters, brokers, versions, replicas, settings, topics.

An operation is repeated until it has succeeded, as a person would, and must succeed within `OPERATION_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import tidelog
from chaos.next_version import NEXT_LEVEL
from chaos.nodes import Node, Nodes
from tidelog.metadata.features import METADATA_VERSION
from tidelog.model.errors import TidelogError
from tidelog.testing.chaos.plan import Fault, Kind
from tidelog.testing.chaos.target import FaultError, Stage, Strike

T = TypeVar("T")

OPERATION_S = 180.0
CALL_S = 20.0
LOOK_S = 0.5
TOPIC_KINDS: Mapping[str, Kind] = {
    "reassign": Kind(2, (0.5, 5.0), has_node=True),
    "delete-records": Kind(1, (0.5, 5.0), has_node=True),
    "change-configs": Kind(2, (0.5, 5.0), has_node=True),
    "create-and-delete": Kind(1, (0.5, 5.0), has_node=True),
}
MEMBER_KINDS: Mapping[str, Kind] = {
    "change-voters": Kind(2, (2.0, 10.0), has_node=False),
    "add-broker": Kind(1, (1.0, 3.0), has_node=False),
    "upgrade": Kind(1, (0.5, 2.0), has_node=False),
}
SCRATCH = "scratch"
"""A topic whose records are deleted; nobody else writes to it."""
SCRATCH_RECORDS, SCRATCH_KEPT = 20, 5
SETTINGS: Sequence[tuple[str, str, tuple[object, ...]]] = (
    ("events", "segment.bytes", (1 << 20, 4 << 20, 64 << 20)),
    ("orders", "segment.bytes", (1 << 20, 4 << 20, 64 << 20)),
    ("events", "index.interval.bytes", (1_024, 4_096, 65_536)),
    ("orders", "compression.type", ("producer", "zstd", "lz4")),
    ("orders", "max.message.bytes", (1 << 20, 4 << 20)),
)


class Operations:
    def __init__(self, nodes: Nodes, admin: tidelog.Admin, bootstrap: str) -> None:
        self._nodes, self._admin, self._bootstrap = nodes, admin, bootstrap
        self._created = 0
        self.strikes: Mapping[str, Strike] = {
            "reassign": self._under_fire(self._reassign),
            "delete-records": self._under_fire(self._delete_records),
            "change-configs": self._under_fire(self._change_configs),
            "create-and-delete": self._under_fire(self._create_and_delete),
            "change-voters": self._change_voters,
            "add-broker": self._add_broker,
            "upgrade": self._upgrade,
        }

    # Topics, while a node is killed.

    def _under_fire(self, operate: Callable[[Fault], str]) -> Strike:
        def strike(node: int, fault: Fault, stage: Stage) -> None:
            work = _Work(operate, fault)
            work.start()
            self._nodes.kill(node)
            stage.wait(fault.seconds)
            self._nodes.start(node)
            while work.is_alive():
                stage.wait(LOOK_S)
            stage.detail(f"{work.result()}, while the node was killed")

        return strike

    def _reassign(self, fault: Fault) -> str:
        brokers = [node.number for node in self._nodes.running() if node.is_broker]
        partition = ("events", fault.pick % 6)
        turn = fault.pick // 6 % len(brokers)
        replicas = (brokers[turn:] + brokers[:turn])[:3]
        _call(lambda: self._admin.alter_reassignments({partition: replicas}, timeout=CALL_S))
        _until(lambda: not self._admin.list_reassignments([partition], timeout=CALL_S), "the reassignment is over")
        rows = self._admin.describe_topic("events", timeout=CALL_S).partitions
        found = next(row.replicas for row in rows if row.partition == partition[1])
        if sorted(found) != sorted(replicas):
            raise FaultError(f"events-{partition[1]} has replicas {found} after a reassignment to {replicas}")
        return f"events-{partition[1]} moved to {replicas}"

    def _delete_records(self, _fault: Fault) -> str:
        place = tidelog.TopicPartition(SCRATCH, 0)
        self._write(SCRATCH, SCRATCH_RECORDS)
        end = self._offset(place, "latest")
        _call(lambda: self._admin.delete_records({place: end - SCRATCH_KEPT}, timeout=CALL_S))
        start = self._offset(place, "earliest")
        if start != end - SCRATCH_KEPT:
            raise FaultError(f"{place} starts at {start} after records before {end - SCRATCH_KEPT} were deleted")
        return f"{place} starts at {start}"

    def _offset(self, place: tidelog.TopicPartition, at: Literal["earliest", "latest"]) -> int:
        offset = _call(lambda: self._admin.list_offsets([place], at=at, timeout=CALL_S))[place].offset
        assert offset is not None, "both are known"
        return offset

    def _change_configs(self, fault: Fault) -> str:
        topic, key, values = SETTINGS[fault.pick % len(SETTINGS)]
        value = values[fault.pick // len(SETTINGS) % len(values)]
        resource = tidelog.ConfigResource("topic", topic)
        _call(lambda: self._admin.alter_config(resource, sets={key: value}, timeout=CALL_S))
        found = _call(lambda: self._admin.describe_config(resource, [key], timeout=CALL_S))[key].value
        if str(found) != str(value):
            raise FaultError(f"{topic}: {key} is {found} after it was set to {value}")
        return f"{topic}: {key}={value}"

    def _create_and_delete(self, _fault: Fault) -> str:
        self._created += 1
        name = f"short-lived-{self._created}"
        _call(
            lambda: self._admin.create_topic(
                name, partitions=3, replication_factor=3, if_not_exists=True, timeout=CALL_S
            )
        )
        self._write(name, SCRATCH_RECORDS)
        _call(lambda: self._admin.delete_topic(name, if_exists=True, timeout=CALL_S))
        _until(
            lambda: name not in {topic.name for topic in self._admin.list_topics(timeout=CALL_S)}, f"{name} is deleted"
        )
        return f"{name} was created, written and deleted"

    def _write(self, topic: str, records: int) -> None:
        """Acknowledged as a whole."""
        with tidelog.Producer(self._bootstrap, delivery_timeout_ms=int(OPERATION_S * 1000)) as producer:
            sent = [producer.send(topic, b"scratch %d" % number) for number in range(records)]
            for one in sent:
                try:
                    one.result()
                except TidelogError as error:
                    raise FaultError(f"a write to {topic} failed: {error}") from error

    # Members.

    def _change_voters(self, _node: int, fault: Fault, stage: Stage) -> None:
        """The spare controller becomes a voter. Then it leaves again; or another voter leaves, and comes back first."""
        spare = next(node for node in self._nodes.by_number.values() if node.is_controller and not node.is_first_voter)
        first = [node for node in self._nodes.by_number.values() if node.is_first_voter]
        self._join(spare, stage)
        stage.wait(fault.seconds)
        if fault.pick % 2:
            replaced = first[fault.pick // 2 % len(first)]
            self._leave(replaced, stage)
            stage.wait(fault.seconds)
            self._join(replaced, stage)
        self._leave(spare, stage)

    def _join(self, node: Node, stage: Stage) -> None:
        if node.process is None:
            self._nodes.start(node.number)
        endpoints = {node.listener: node.endpoint}
        _until(
            lambda: (
                self._is_voter(node)
                or (
                    self._admin.add_voter(node.number, node.directory_id, endpoints, timeout=CALL_S) is None
                    and self._is_voter(node)
                )
            ),
            f"controller {node.number} votes",
        )
        stage.detail(f"controller {node.number} joined")

    def _leave(self, node: Node, stage: Stage) -> None:
        _until(
            lambda: (
                not self._is_voter(node)
                or (
                    self._admin.remove_voter(node.number, node.directory_id, timeout=CALL_S) is None
                    and not self._is_voter(node)
                )
            ),
            f"controller {node.number} does not vote",
        )
        self._nodes.stop(node.number)
        stage.detail(f"controller {node.number} left")

    def _is_voter(self, node: Node) -> bool:
        members = self._admin.describe_quorum(timeout=CALL_S).members
        return any(row.node == node.number and row.is_voter for row in members)

    def _add_broker(self, _node: int, fault: Fault, stage: Stage) -> None:
        """The spare broker comes, and stays; it gets a replica."""
        spare = max(node.number for node in self._nodes.by_number.values() if node.is_broker)
        if self._nodes[spare].process is None:
            self._nodes.start(spare)
            stage.detail(f"broker {spare} started")
            _until(
                lambda: any(row.id == spare and not row.is_fenced for row in self._admin.describe_brokers()),
                f"broker {spare} is registered",
            )
        stage.wait(fault.seconds)
        stage.detail(self._reassign(fault))

    def _upgrade(self, _node: int, fault: Fault, stage: Stage) -> None:
        """All nodes restart with the next version, one after the other; then the level rises."""
        for node in self._nodes.by_number.values():
            node.is_next_version = True
        for node in self._nodes.running():
            self._nodes.stop(node.number)
            stage.wait(fault.seconds)
            self._nodes.start(node.number)
            for failure in self._nodes.recover(may_end=None):
                raise FaultError(failure)
        _call(lambda: self._admin.update_features({METADATA_VERSION: NEXT_LEVEL}, timeout=CALL_S).all())
        levels = {one.name: one.level for one in _call(lambda: self._admin.describe_features(timeout=CALL_S))}
        if levels.get(METADATA_VERSION) != NEXT_LEVEL:
            raise FaultError(f"{METADATA_VERSION} is {levels.get(METADATA_VERSION)} after an upgrade to {NEXT_LEVEL}")
        stage.detail(f"{METADATA_VERSION} is {NEXT_LEVEL}")


def _call(ask: Callable[[], T]) -> T:
    """Its answer, once it has one."""
    end_s = time.monotonic() + OPERATION_S
    while True:
        try:
            return ask()
        except TidelogError as error:
            if time.monotonic() > end_s:
                raise FaultError(f"not in {OPERATION_S:.0f} s: {error}") from error
            time.sleep(LOOK_S)


def _until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + OPERATION_S
    last = "it is not so"
    while True:
        try:
            if condition():
                return
        except TidelogError as error:
            last = str(error)
        if time.monotonic() > end_s:
            raise FaultError(f"not in {OPERATION_S:.0f} s: {what}: {last}")
        time.sleep(LOOK_S)


class _Work(threading.Thread):
    """An operation on a thread of its own."""

    def __init__(self, operate: Callable[[Fault], str], fault: Fault) -> None:
        super().__init__(name="operation", daemon=True)
        self._operate, self._fault = operate, fault
        self._said = ""
        self._error: FaultError | TidelogError | None = None

    def run(self) -> None:
        try:
            self._said = self._operate(self._fault)
        except (FaultError, TidelogError) as error:
            self._error = error

    def result(self) -> str:
        if self._error is not None:
            raise FaultError(str(self._error))
        return self._said
