"""Scenarios: readable scripts with golden traces, one file each in `scenarios/`.

A file is a list of steps. A step is one or more lines of commands, a line of dashes, and the trace that they must give,
up to an empty line; lines that begin with `#` before a step are its comment.

    cluster 3 [others=4,5] [kept=BYTES] [append=BYTES] [inflight=BYTES] [uncommitted=BYTES]
    tick N · wait MS · run MS             time: `wait` tells nobody, `run` delivers everything meanwhile
    deliver [A B] · drop [A B] · pending  messages: all, or those from A to B
    cut A [B ...] · heal · disconnect A B
    crash N · start N · lose N OFFSET     `lose` takes synced entries from a node that is down
    log N EPOCH ...                       start a node that is down with entries of these epochs
    slow N · fast N · persist N [COUNT]   a slow disk finishes only what `persist` says
    propose N TEXT · read N · transfer N [TO] · add N NODE · remove N NODE · snapshot N
    status                                one line for each node
    quiet COMMAND ...                     the same, without its trace

`SCENARIOS_UPDATE=1` writes the traces that the cores give now into the files: read the difference before you keep it.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.raft.core_cluster import Cluster, data, member
from support.raft.core_trace import describe

from tidelog.model.ids import Epoch, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import HardState

SCENARIOS = Path(__file__).parent / "scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))


@dataclass
class Step:
    comment: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)


def parse(text: str) -> list[Step]:
    steps: list[Step] = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.splitlines()
        step = Step()
        while lines and lines[0].startswith("#"):
            step.comment.append(lines.pop(0))
        if "----" in lines:
            at = lines.index("----")
            step.commands, step.expected = lines[:at], lines[at + 1 :]
        else:
            step.commands = lines
        steps.append(step)
    return steps


def render(steps: list[Step]) -> str:
    blocks = []
    for step in steps:
        lines = [*step.comment, *step.commands]
        if step.commands:
            lines += ["----", *step.expected]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def make_cluster(arguments: list[str]) -> Cluster:
    count = int(arguments[0])
    options = dict(argument.split("=", 1) for argument in arguments[1:])
    others = [int(node) for node in options.pop("others", "").split(",") if node]
    names = {
        "kept": "kept_behind_snapshot_bytes",
        "append": "append_bytes_max",
        "inflight": "inflight_bytes_max",
        "uncommitted": "uncommitted_bytes_max",
    }
    config = RaftConfig(**{names[name]: int(value) for name, value in options.items()})
    return Cluster(count, others=others, config=config)


OF_CLUSTER = ("wait", "run", "cut", "heal", "disconnect", "crash", "start", "persist", "read", "transfer")
"""Commands that are methods of `Cluster`."""


class Player:
    """Carries out the commands of one scenario on one cluster."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "a scenario begins with `cluster N`"
        return self._cluster

    def play(self, step: Step) -> list[str]:
        lines: list[str] = []
        for command in step.commands:
            words = command.split()
            quiet = words[0] == "quiet"
            said = self.command(*words[quiet:])
            traced = self.cluster.trace.take()
            lines += [] if quiet else [*traced, *said]
        return lines or ["nothing"]

    def command(self, name: str, *words: str) -> list[str]:
        if name == "cluster":
            self._cluster = make_cluster(list(words))
            self._cluster.trace.on = True
            return [f"{len(self._cluster.nodes)} nodes"]
        arguments = list(words) if name == "propose" else [int(word) for word in words]
        if name in OF_CLUSTER:
            getattr(self.cluster, name)(*arguments)
            return []
        handler = getattr(self, f"do_{name}", None)
        assert handler is not None, f"no such command: {name}"
        said: list[str] | None = handler(*arguments)
        return said or []

    def do_tick(self, node: int) -> None:
        core = self.cluster.core(node)
        self.cluster.now_ms = max(self.cluster.now_ms, core.deadline_ms)
        self.cluster.tick(node)

    def do_deliver(self, sender: int | None = None, to: int | None = None) -> None:
        self.cluster.deliver_all(None if sender is None else lambda e: (e.sender, e.to) == (sender, to))

    def do_drop(self, sender: int | None = None, to: int | None = None) -> list[str]:
        gone = self.cluster.take(lambda e: sender is None or (e.sender, e.to) == (sender, to))
        return [f"lost: {e.sender} -> {e.to} {describe(e.message)}" for e in gone]

    def do_pending(self) -> list[str]:
        return [f"pending: {e.sender} -> {e.to} {describe(e.message)}" for e in self.cluster.network]

    def do_lose(self, node: int, offset: int) -> list[str]:
        self.cluster.nodes[node].disk.lose_after(Offset(offset))
        return [f"{node} has lost everything from {offset} on"]

    def do_log(self, node: int, *epochs: int) -> None:
        disk = self.cluster.nodes[node].disk
        disk.entries = [data(epoch, f"{epoch}.{offset}") for offset, epoch in enumerate(epochs)]
        disk.hard_state = HardState(Epoch(max(epochs)), None)
        self.cluster.start(node)

    def do_slow(self, node: int) -> None:
        self.cluster.slow_disks.add(node)

    def do_fast(self, node: int) -> None:
        self.cluster.slow_disks.discard(node)
        self.cluster.persist(node)

    def do_propose(self, node: str, *text: str) -> None:
        self.cluster.propose(int(node), " ".join(text).encode())

    def do_add(self, node: int, new: int) -> None:
        self.cluster.change(node, add=member(new))

    def do_remove(self, node: int, old: int) -> None:
        self.cluster.change(node, remove=old)

    def do_snapshot(self, node: int) -> list[str]:
        taken = self.cluster.take_snapshot(node)
        return [f"{node} has taken snapshot {taken.offset}/{taken.epoch}"]

    def do_status(self) -> list[str]:
        lines = []
        for node, at in self.cluster.nodes.items():
            if at.core is None:
                lines.append(f"{node} is down")
                continue
            core = at.core
            members = ",".join(str(m.node) for m in core.log.membership.voters)
            learners = ",".join(str(m.node) for m in core.log.membership.learners)
            log = " ".join(str(entry.epoch) for entry in core.log.entries)
            lines.append(
                f"{node} {core.role.value}, epoch {core.epoch}, leader {core.leader or 'none'}, log from "
                f"{core.log.start} [{log}], commit {core.commit}, voters {members}"
                + (f", learners {learners}" if learners else "")
                + (f", recovering until {core.recovering_until}" if core.recovering_until is not None else "")
            )
        return lines


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_scenario_plays_as_its_golden_trace_says(path: Path) -> None:
    steps = parse(path.read_text(encoding="utf-8"))
    player = Player()
    played = [Step(s.comment, s.commands, player.play(s) if s.commands else []) for s in steps]
    if os.environ.get("SCENARIOS_UPDATE"):
        path.write_text(render(played), encoding="utf-8")
        return
    for step, now in zip(steps, played, strict=True):
        assert now.expected == step.expected, "\n".join([*step.comment, *step.commands])


def test_there_are_scenarios_and_every_one_is_written_as_it_is_rendered() -> None:
    assert len(FILES) >= 12
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert render(parse(text)) == text, path.name
