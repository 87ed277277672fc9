"""A cluster of yours as the target of a chaos run: faults are commands of a TOML file.

    [nodes.1]                                       # node id
    kill = "ssh host1 systemctl kill -s KILL tidelog@1"
    start = "ssh host1 systemctl start tidelog@1"   # after kill and stop
    stop = "ssh host1 systemctl stop tidelog@1"
    pause = "ssh host1 systemctl kill -s STOP tidelog@1"   # with resume
    resume = "ssh host1 systemctl kill -s CONT tidelog@1"
    isolate = "ssh host1 /etc/tidelog/cut-network"   # with heal
    heal = "ssh host1 /etc/tidelog/heal-network"

A command runs in `sh`, and has to end within `COMMAND_S` with exit code 0. All nodes have the same commands. Without a
file there are no faults: only the workload and the checkers.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import tidelog
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.testing.chaos.plan import FREEZE, ISOLATE, KILL, KINDS, RESTART, Fault, Kind
from tidelog.testing.chaos.target import CALL_S, ClusterView, FaultError, Stage, Strike

COMMAND_S = 120.0
READY_S = 300.0
LOOK_S = 0.5
PAIRS: Mapping[str, tuple[str, str]] = {
    KILL: ("kill", "start"),
    RESTART: ("stop", "start"),
    FREEZE: ("pause", "resume"),
    ISOLATE: ("isolate", "heal"),
}
"""Kind of fault -> the commands that begin and end it."""
COMMANDS = tuple(sorted({name for pair in PAIRS.values() for name in pair}))
PARTITIONS = {"events": 6, "orders": 3}
REPLICAS_MAX = 3

NodeCommands = Mapping[int, Mapping[str, str]]


def read_nodes(path: Path) -> NodeCommands:
    """Read the TOML file. Raises `InvalidRequestError` with what is wrong in it."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("nodes", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    if not isinstance(tables, dict) or not tables:
        raise InvalidRequestError(f"{path}: there is no table [nodes.ID]")
    found: dict[int, dict[str, str]] = {}
    for name, commands in tables.items():
        if not name.isdigit() or not isinstance(commands, dict):
            raise InvalidRequestError(f"{path}: [nodes.{name}]: ID is the id of a node")
        unknown = [key for key, text in commands.items() if key not in COMMANDS or not isinstance(text, str)]
        if unknown:
            raise InvalidRequestError(
                f"{path}: [nodes.{name}]: {unknown[0]!r} is no command: use {', '.join(COMMANDS)}, each a string"
            )
        found[int(name)] = commands
    _check_commands(path, found)
    return found


def _check_commands(path: Path, found: NodeCommands) -> None:
    first, *others = sorted(found)
    for node in others:
        if found[node].keys() != found[first].keys():
            different = ", ".join(sorted(found[node].keys() ^ found[first].keys()))
            raise InvalidRequestError(f"{path}: nodes {first} and {node} differ in {different}: all need the same")
    for begin, end in PAIRS.values():
        if begin in found[first] and end not in found[first]:
            raise InvalidRequestError(f"{path}: [nodes.{first}]: {begin!r} needs {end!r}")
    if not any(begin in found[first] for begin, _ in PAIRS.values()):
        raise InvalidRequestError(f"{path}: [nodes.{first}]: no command begins a fault")


class CommandTarget:
    """See `target.Target`."""

    def __init__(
        self,
        bootstrap: str,
        kafka_bootstrap: str,
        topics: Mapping[str, int],
        commands: NodeCommands,
        *,
        call_s: float = CALL_S,
        switched_off: Set[int] = frozenset(),
    ) -> None:
        """`switched_off`: brokers that nobody waits for."""
        self._call_s = call_s
        self._switched_off = switched_off
        self.bootstrap = self.operator_bootstrap = bootstrap
        self.kafka_bootstrap = kafka_bootstrap
        self.wrapper: Sequence[str] = ()
        self.topics = topics
        self.facts: dict[str, object] = {}
        self._commands = commands
        self._struck: dict[int, str] = {}
        """Node -> the command that should have ended its fault, and failed."""
        known = next(iter(commands.values()), {})
        self.kinds: Mapping[str, Kind] = {kind: KINDS[kind] for kind, (begin, _) in PAIRS.items() if begin in known}
        self.strikes: Mapping[str, Strike] = dict.fromkeys(self.kinds, self._strike)

    @property
    def nodes(self) -> Sequence[int]:
        return sorted(self._commands)

    def _strike(self, node: int, fault: Fault, stage: Stage) -> None:
        """Strikes no second node while the fault of another one did not end."""
        if self._struck:
            raise FaultError(f"no fault begins: {self._still_struck()}")
        begin, end = PAIRS[fault.kind]
        # Also if the run is interrupted, or the first command failed half way.
        try:
            self._run(node, begin)
            stage.wait(fault.seconds)
        finally:
            self._end(node, end)

    def _end(self, node: int, name: str) -> None:
        try:
            self._run(node, name)
        except FaultError:
            self._struck[node] = name
            raise
        except BaseException:  # Ctrl-C or SIGTERM during the command: the node must not stay as it is
            self._run(node, name)
            raise

    def _still_struck(self) -> str:
        rows = [f"node {node}: run {self._commands[node][name]!r}" for node, name in sorted(self._struck.items())]
        return "a fault did not end; " + "; ".join(rows)

    def _run(self, node: int, name: str) -> None:
        command = self._commands[node][name]
        try:
            done = subprocess.run(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=COMMAND_S,
                start_new_session=True,  # Ctrl-C is for the run, not for the command
            )
        except subprocess.TimeoutExpired as error:
            raise FaultError(f"node {node}: {name}: {command!r} did not end in {COMMAND_S:.0f} s") from error
        if done.returncode != 0:
            raise FaultError(
                f"node {node}: {name}: {command!r} ended with code {done.returncode}: {done.stderr.strip()[-300:]}"
            )

    def recover(self) -> list[str]:
        """Waits until the controller counts all brokers as live that were when the run began, or that the run strikes;
        nodes that only vote are not waited for."""
        if not self._commands:
            return []
        for node, name in list(self._struck.items()):
            with contextlib.suppress(FaultError):
                self._run(node, name)
                del self._struck[node]
        if self._struck:
            return [f"fault-not-ended: {self._still_struck()}"]
        end_s = time.monotonic() + READY_S
        words = "no answer"
        with tidelog.Admin(self.bootstrap) as admin:
            while time.monotonic() < end_s:
                try:
                    rows = admin.describe_brokers(timeout=self._call_s)
                    fenced = [row.id for row in rows if row.is_fenced and row.id not in self._switched_off]
                    if not fenced:
                        return []
                    words = f"brokers {fenced} are fenced"
                except TidelogError as error:
                    words = str(error)
                time.sleep(LOOK_S)
        return [f"node-not-ready: after {READY_S:.0f} s: {words}"]

    def logged_failures(self) -> list[str]:
        return []

    def remove_traces(self, groups: Sequence[str]) -> list[str]:
        """Delete the topics and groups of a run. Returns those that stay, with the reason."""
        with tidelog.Admin(self.bootstrap) as admin:
            admin.delete_topics(list(self.topics), if_exists=True, timeout=self._call_s)
            deleted = admin.delete_groups(groups, partial=True, timeout=self._call_s)
        errors = deleted.errors.items()
        return [f"group {name} ({error})" for name, error in errors if error.code is not ErrorCode.GROUP_ID_NOT_FOUND]


@contextmanager
def cluster_of_yours(
    bootstrap: str, kafka_bootstrap: str, prefix: str, commands: NodeCommands, timeout_s: float
) -> Iterator[CommandTarget]:
    """Topics of its own, whose names begin with `prefix`. They and its groups stay in the cluster (`remove_traces`).

    `timeout_s` is that of each request of the operator. Brokers that are fenced now count as switched off: the run
    neither uses nor awaits them.
    """
    topics = {f"{prefix}{name}": count for name, count in PARTITIONS.items()}
    with tidelog.Admin(bootstrap, bootstrap_wait_ms=0) as admin:
        rows = admin.describe_brokers(timeout=timeout_s)
        fenced = frozenset(row.id for row in rows if row.is_fenced)
        replicas = min(REPLICAS_MAX, len(rows) - len(fenced))
        for name, count in topics.items():
            configs = {"min.insync.replicas": max(1, replicas - 1)}
            admin.create_topic(name, partitions=count, replication_factor=replicas, configs=configs, timeout=timeout_s)
    target = CommandTarget(
        bootstrap, kafka_bootstrap, topics, commands, call_s=timeout_s, switched_off=fenced - commands.keys()
    )
    end_s = time.monotonic() + READY_S
    with ClusterView(bootstrap, topics) as view:
        while not view.is_whole():
            if time.monotonic() > end_s:
                raise InvalidRequestError(f"the topics {', '.join(topics)} are not in sync: is a broker down?")
            time.sleep(LOOK_S)
    yield target
