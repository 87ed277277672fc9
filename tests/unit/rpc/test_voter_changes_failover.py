"""Additions of voters while controllers fail, or several operators act at once."""

from __future__ import annotations

from typing import Any

from support.grpc_api.simulated_nodes import ApiCluster

from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member, Membership


def membership(quorum: ApiCluster) -> Membership:
    return quorum.controller(quorum.active()).driver.core.log.membership


class Adding:
    """An addition at the active controller."""

    def __init__(self, quorum: ApiCluster, *, timeout_ms: int, node: int = 4) -> None:
        self.node = node
        self.answers: list[Any] = []
        member = Member(NodeId(node), bytes([node]) * 16, (("CONTROLLER", "host:9192"),))

        async def add(controller: ControllerNode) -> None:
            try:
                await controller.voters.add(member, timeout_ms=timeout_ms)
                self.answers.append(None)
            except TidelogError as error:
                self.answers.append(error)

        process, controller = quorum.controllers[quorum.active()]
        self.task = process.spawn(add(controller))


def test_additions_at_once_are_made_or_refused_as_they_say() -> None:
    """One change at a time: the others are refused, and undo nothing of it."""
    with ApiCluster(21, brokers=()) as quorum:
        quorum.start(NodeId(4), NodeId(5))
        additions = [
            Adding(quorum, timeout_ms=20_000),
            Adding(quorum, timeout_ms=1),
            Adding(quorum, timeout_ms=1_000, node=5),
        ]
        quorum.world.run_until(lambda: all(one.answers for one in additions), timeout=60)
        made = [one.node for one in additions if one.answers == [None]]
        assert len(made) == 1
        assert {member.node for member in membership(quorum).voters} == {1, 2, 3, *made}
        assert not membership(quorum).learners


def test_addition_that_loses_its_controller_can_be_repeated_at_the_next_one() -> None:
    with ApiCluster(22, brokers=()) as quorum:
        quorum.start(NodeId(4))
        before = quorum.active()
        Adding(quorum, timeout_ms=10_000)
        quorum.world.run_until(lambda: membership(quorum).learner(NodeId(4)) is not None, timeout=10)
        quorum.kill(NodeId(4))
        quorum.kill(before)
        quorum.active(among=[node for node in (NodeId(1), NodeId(2), NodeId(3)) if node != before])
        again = Adding(quorum, timeout_ms=3_000)
        quorum.world.run_until(lambda: bool(again.answers), timeout=60)
        assert "nothing was changed" in str(again.answers), "node 4 does not run"
        assert membership(quorum).voter(NodeId(4)) is None
        quorum.start(NodeId(4))
        last = Adding(quorum, timeout_ms=10_000)
        quorum.world.run_until(lambda: bool(last.answers), timeout=60)
        assert last.answers == [None]
        assert membership(quorum).voter(NodeId(4)) is not None
        assert not membership(quorum).learners
