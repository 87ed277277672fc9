"""Every request in every state of a transactional id: what it does, or why it is rejected.

A cell of `support.transactions.request_table` is what happens: `same` (a reply, and nothing changes), `ending` (so that
the request is repeated), the status after it, with `+` if the owner's epoch rises, or the name of the error, which
changes nothing. The names there are states and groups of states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.transactions.machine import TIMEOUT_MS, Coordinator
from support.transactions.request_table import GROUPS, TABLE

from tidelog.coordinator.transactions.queries import status_name
from tidelog.coordinator.transactions.records import NOBODY, ProducerIdentity
from tidelog.coordinator.transactions.requests import Abort, ForgetIdle, InitReply, Join
from tidelog.model.errors import TidelogError

FIRST = 10
"""Producer id of the owner. It has recovered once, so that its epoch is 1, and 0 the one before."""
MEMBER = 11
TOKEN = b"batch 7"


def unknown() -> Coordinator:
    return Coordinator()


def empty() -> Coordinator:
    coordinator = Coordinator()
    coordinator.init()
    coordinator.init((FIRST, 0))
    return coordinator


def replaced() -> Coordinator:
    """Another instance has initialized the id."""
    coordinator = Coordinator()
    coordinator.init()
    coordinator.init()
    return coordinator


def ongoing() -> Coordinator:
    coordinator = empty()
    coordinator.add(0)
    return coordinator


def joint() -> Coordinator:
    coordinator = ongoing()
    coordinator.join("task")
    coordinator.add(1, who=(MEMBER, 0))
    return coordinator


def prepared() -> Coordinator:
    coordinator = joint()
    coordinator.prepare()
    return coordinator


def taken_over() -> Coordinator:
    coordinator = prepared()
    coordinator.init(keep_prepared=True)
    return coordinator


def committing() -> Coordinator:
    coordinator = joint()
    coordinator.commit(members=(MEMBER,), token=TOKEN)
    return coordinator


def aborting() -> Coordinator:
    coordinator = joint()
    coordinator.abort()
    return coordinator


def timing_out() -> Coordinator:
    coordinator = joint()
    assert coordinator.time_out()
    return coordinator


def fencing() -> Coordinator:
    coordinator = joint()
    assert coordinator.init().is_ending
    return coordinator


def _complete(begin: Callable[[], Coordinator]) -> Callable[[], Coordinator]:
    def build() -> Coordinator:
        coordinator = begin()
        assert coordinator.complete()
        return coordinator

    return build


def operator_aborted() -> Coordinator:
    coordinator = joint()
    assert coordinator.operator_aborts()
    assert coordinator.complete()
    return coordinator


def rejoined() -> Coordinator:
    """A member has opened the next transaction before the owner knows that the last one is committed."""
    coordinator = _complete(committing)()
    coordinator.join("straggler")
    return coordinator


def v1_ongoing() -> Coordinator:
    coordinator = empty()
    coordinator.add(0, version=1)
    return coordinator


def v1_committing() -> Coordinator:
    coordinator = v1_ongoing()
    coordinator.commit(version=1)
    return coordinator


def v1_aborting() -> Coordinator:
    coordinator = v1_ongoing()
    coordinator.abort(version=1)
    return coordinator


def v1_timing_out() -> Coordinator:
    coordinator = v1_ongoing()
    assert coordinator.time_out()
    return coordinator


STATES: dict[str, Callable[[], Coordinator]] = {
    "unknown": unknown,
    "empty": empty,
    "replaced": replaced,
    "ongoing": ongoing,
    "joint": joint,
    "prepared": prepared,
    "taken-over": taken_over,
    "committing": committing,
    "aborting": aborting,
    "timing-out": timing_out,
    "fencing": fencing,
    "committed": _complete(committing),
    "aborted": _complete(aborting),
    "timed-out": _complete(timing_out),
    "fenced": _complete(fencing),
    "operator-aborted": operator_aborted,
    "rejoined": rejoined,
    "v1-ongoing": v1_ongoing,
    "v1-committing": v1_committing,
    "v1-committed": _complete(v1_committing),
    "v1-aborted": _complete(v1_aborting),
    "v1-timed-out": _complete(v1_timing_out),
}


def current(coordinator: Coordinator) -> ProducerIdentity:
    known = coordinator.state.get(coordinator.id)
    return (FIRST, 0) if known is None else known.owner


def previous(coordinator: Coordinator) -> ProducerIdentity:
    """What the owner had before, or a replaced one."""
    known = coordinator.state.get(coordinator.id)
    if known is None:
        return FIRST, 0
    return known.previous if known.previous != NOBODY else (known.owner[0], known.owner[1] - 1)


OTHER = 99, 0
Build = Callable[[Coordinator], Any]
REQUESTS: dict[str, Build] = {
    "init of a new instance": lambda c: c.init_request(),
    "init, keep prepared": lambda c: c.init_request(keep_prepared=True),
    "init of the owner": lambda c: c.init_request(current(c)),
    "init of the owner, repeated": lambda c: c.init_request(previous(c)),
    "init of the owner, keep prepared": lambda c: c.init_request(current(c), keep_prepared=True),
    "init of another producer": lambda c: c.init_request(OTHER),
    "add": lambda c: c.add_request(2, who=current(c)),
    "add the same": lambda c: c.add_request(0, who=current(c)),
    "add, late": lambda c: c.add_request(2, who=previous(c)),
    "add, another producer": lambda c: c.add_request(2, who=OTHER),
    "add, epoch to come": lambda c: c.add_request(2, who=(current(c)[0], current(c)[1] + 1)),
    "add of the member": lambda c: c.add_request(2, who=(MEMBER, 0)),
    "add of the member, another epoch": lambda c: c.add_request(2, who=(MEMBER, 1)),
    "add, version 1": lambda c: c.add_request(2, who=current(c), version=1),
    "add, version 1, late": lambda c: c.add_request(2, who=previous(c), version=1),
    "verify, version 1": lambda c: c.add_request(0, who=current(c), version=1, verify_only=True),
    "verify, version 1, another partition": lambda c: c.add_request(5, who=current(c), version=1, verify_only=True),
    "join": lambda c: Join(transactional_id=c.id, now_ms=c.now_ms),
    "prepare": lambda c: c.prepare_request(current(c)),
    "prepare, late": lambda c: c.prepare_request(previous(c)),
    "commit": lambda c: c.end_request(who=current(c)),
    "commit, another token": lambda c: c.end_request(who=current(c), token=b"batch 8"),
    "commit, the stored token": lambda c: c.end_request(who=current(c), token=TOKEN),
    "commit, a member": lambda c: c.end_request(who=current(c), members=(MEMBER,)),
    "commit, no member": lambda c: c.end_request(who=current(c), members=(MEMBER, 55)),
    "abort": lambda c: c.end_request(is_commit=False, who=current(c)),
    "commit, repeated": lambda c: c.end_request(who=previous(c)),
    "commit, repeated, the stored token": lambda c: c.end_request(who=previous(c), token=TOKEN),
    "commit, repeated, another token": lambda c: c.end_request(who=previous(c), token=b"batch 8"),
    "abort, repeated": lambda c: c.end_request(is_commit=False, who=previous(c)),
    "end of another producer": lambda c: c.end_request(who=OTHER),
    "end of the member": lambda c: c.end_request(who=(MEMBER, 0)),
    "commit, version 1": lambda c: c.end_request(who=current(c), version=1),
    "abort, version 1": lambda c: c.end_request(is_commit=False, who=current(c), version=1),
    "commit, version 1, repeated": lambda c: c.end_request(who=previous(c), version=1),
    "abort, version 1, repeated": lambda c: c.end_request(is_commit=False, who=previous(c), version=1),
    "abort of an operator": lambda c: Abort(transactional_id=c.id, now_ms=c.now_ms),
    "complete": lambda c: c.complete_request(_number(c)),
    "complete, another transaction": lambda c: c.complete_request(_number(c) - 1),
    "timeout": lambda c: c.timeout_request(number=_number(c)),
    "timeout, too early": lambda c: c.timeout_request(number=_number(c), after_ms=TIMEOUT_MS - 1),
    "timeout, another transaction": lambda c: c.timeout_request(number=_number(c) - 1),
    "timeout of a prepared one": lambda c: c.timeout_request(number=_number(c), after_ms=86_400_000),
    "forget idle": lambda c: ForgetIdle(now_ms=c.now_ms + 10, expiration_ms=10),
}


def _number(coordinator: Coordinator) -> int:
    known = coordinator.state.get(coordinator.id)
    return 1 if known is None else known.number


def cell(state: str, request: str) -> str:
    coordinator = STATES[state]()
    before = coordinator.state.get(coordinator.id)
    try:
        reply = coordinator.submit(REQUESTS[request](coordinator))
    except TidelogError as error:
        assert coordinator.state.get(coordinator.id) is before
        return error.code.name
    after = coordinator.state.get(coordinator.id)
    if after is before:
        return "ending" if isinstance(reply, InitReply) and reply.is_ending else "same"
    if after is None:
        return "forgotten"
    has_new_owner = before is None or after.owner != before.owner
    return status_name(after) + "+" * has_new_owner


def expected(state: str, request: str) -> str:
    cells: dict[str, str] = {}
    for what, names in TABLE[request].items():
        for name in names.split():
            for each in GROUPS.get(name, name).split():
                assert cells.setdefault(each, what) == what, f"{request!r}: two cells of {each!r}"
    assert cells.keys() <= {*STATES, "else"}, f"{request!r}: there is no state {cells.keys() - STATES.keys()}"
    return cells.get(state, cells["else"])


@pytest.mark.requirement("a:H-11", "a:H-13", "a:H-15", "a:H-16", "a:H-22")
@pytest.mark.parametrize("request_name", list(TABLE))
def test_each_request_in_each_state_does_what_the_table_says(request_name: str) -> None:
    found = {state: cell(state, request_name) for state in STATES}
    assert found == {state: expected(state, request_name) for state in STATES}


def test_the_table_has_every_request() -> None:
    assert list(TABLE) == list(REQUESTS)
