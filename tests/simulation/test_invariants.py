"""What the simulator checks while a run goes on is worth something: it names what is wrong, and changes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from simulation.invariants import Invariants
from simulation.raft_sim import run_seed
from simulation.stored_promises import unstored_promise
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import HardState
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import AppendResponse, VoteRequest, VoteResponse
from tidelog.raft.persistent_state import PersistentState, pack_catalogue, pack_state
from tidelog.raft.runtime import StateMachineRuntime
from tidelog.raft.storage import CATALOGUE_KEY, STATE_KEY
from tidelog.world.simulated import SimNode, SimWorld

DIRECTORY = bytes(16)
STATE = PersistentState(HardState(Epoch(3), VoterKey(NodeId(2), DIRECTORY)), Offset(10))
ACK = AppendResponse(
    Epoch(3), NodeId(1), DIRECTORY, Offset(10), rejected=False, hint_epoch=Epoch(0), hint_end=Offset(0), probe=0,
    counts=True,
)  # fmt: skip


def promise(message: Any, state: PersistentState = STATE) -> str | None:
    """What a node that has stored this state breaks with this message."""
    with SimWorld(seed=1) as world:
        node = world.machine("n1").boot()
        storage: Any = SimpleNamespace(store=node.store())

        async def store(node: SimNode) -> None:
            await node.store().commit({STATE_KEY: pack_state(state), CATALOGUE_KEY: pack_catalogue({})})

        node.spawn(store(node))
        world.run_for(1.0)
        return unstored_promise(storage, message)


def test_an_ack_of_stored_entries_in_a_stored_epoch_keeps_its_promise() -> None:
    assert promise(ACK) is None
    assert promise(ACK._replace(match=Offset(11), rejected=True)) is None, "a rejection promises nothing"


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        (ACK._replace(match=Offset(11)), "acknowledges entries up to 11, and has stored that 10 are synced"),
        (ACK._replace(epoch=Epoch(4)), "acknowledges in epoch 4"),
        (VoteResponse(Epoch(4), NodeId(1), DIRECTORY, True), "grants its vote in epoch 4"),
        (VoteRequest(Epoch(4), NodeId(1), DIRECTORY, DIRECTORY, Offset(10), Epoch(3)), "asks for votes in epoch 4"),
    ],
)
def test_a_message_that_promises_more_than_is_stored_is_named(message: Any, broken: str) -> None:
    found = promise(message)
    assert found is not None
    assert broken in found


def test_a_follower_that_speculates_is_a_finding_with_node_and_object() -> None:
    findings: list[tuple[str, str]] = []
    runtime: StateMachineRuntime[Any] = StateMachineRuntime(None, None, ("a",))  # type: ignore[arg-type]  # neither acts
    runtime._speculative = ("b",)
    machine: Any = SimpleNamespace(runtime=runtime)
    Invariants(lambda who, what: findings.append((who, what))).runtime("n1", machine)
    ((who, what),) = findings
    assert (who, what.startswith("Invariant of the decisions: a node that does not lead")) == ("n1", True)


@pytest.mark.sim
@pytest.mark.timeout(240)
def test_the_checks_of_a_run_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Invariants] = []
    finish = Invariants.finish

    def finished(self: Invariants, apps: Any) -> None:
        seen.append(self)
        finish(self, apps)

    monkeypatch.setattr(Invariants, "finish", finished)
    checked = run_seed(3, stack="brokers")
    assert checked.failure is None
    assert seen[0].validated > 1_000
    assert seen[0].audited > 100
    monkeypatch.setattr(Invariants, "watcher", lambda _self, _app: lambda _looked: None)
    monkeypatch.setattr(Invariants, "controller", lambda _self, _name, _machine: None)
    assert run_seed(3, stack="brokers").digest == checked.digest
