"""The invariants of a classic group, for tests and the simulator. Pure."""

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState


def validate_classic(group: ClassicGroup) -> None:
    """Assert what holds of a group between its events; see `classic_group`."""
    state, members, who = group.state, group.members, group.group_id
    for member_id, member in members.items():
        assert member.member_id == member_id, f"{who}: {member.member_id} is known as {member_id}"
    assert not members.keys() & group.pending.keys(), f"{who}: a member that has joined is awaited"
    instances = [member.instance_id for member in members.values() if member.instance_id]
    assert len(set(instances)) == len(instances), f"{who}: two members of one instance id in {instances}"
    tickets = [
        ticket
        for member in members.values()
        for ticket in (member.join_ticket, member.sync_ticket)
        if ticket is not None
    ]
    assert len(set(tickets)) == len(tickets), f"{who}: a ticket waits twice in {tickets}"
    if state in (ClassicState.EMPTY, ClassicState.DEAD):
        assert not members, f"{who}: {state.value}, and has members"
    elif state in (ClassicState.COMPLETING, ClassicState.STABLE):
        assert group.leader in members, f"{who}: its leader {group.leader!r} is no member"
        assert all(member.join_ticket is None for member in members.values()), f"{who}: a join waits without a round"
    if state is not ClassicState.COMPLETING:
        assert all(member.sync_ticket is None for member in members.values()), f"{who}: a sync waits in {state.value}"
    if state is ClassicState.COMPLETING and group._storing < 0:
        assert all(not member.assignment for member in members.values()), f"{who}: an assignment nobody has sent"
