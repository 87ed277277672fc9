"""Whom the controller hears of: silence, refused connections, many breaks at once, and its own pauses."""

import pytest

from tidelog.metadata.broker_sessions import BrokerSessions, ProbeResult


def sessions(brokers: int, now_ms: int = 0) -> BrokerSessions:
    made = BrokerSessions(now_ms)
    made.begin(now_ms, [(broker, broker + 100) for broker in range(brokers)])
    return made


def run(made: BrokerSessions, start_ms: int, end_ms: int, *, alive: tuple[int, ...] = ()) -> dict[int, int]:
    """Ticks every 100 ms, heartbeats of `alive` before each; broker -> when it was reported for fencing."""
    fenced: dict[int, int] = {}
    for now in range(start_ms, end_ms + 1, 100):
        for broker in alive:
            made.heard(now, broker, broker + 100)
        for entry in made.tick(now):
            fenced[entry.broker] = now
    return fenced


@pytest.mark.requirement("b:E-21")
def test_silence_for_the_session_timeout_fences_and_is_reported_once() -> None:
    made = sessions(3)
    assert run(made, 0, 10_000, alive=(0, 2)) == {1: 3000}


def test_a_fence_names_the_incarnation_and_the_reason() -> None:
    made = sessions(1)
    made.heard(50, 0, 107)
    for now in range(100, 3001, 100):
        assert made.tick(now) == ()
    (entry,) = made.tick(3050)
    assert (entry.broker, entry.broker_epoch) == (0, 107)
    assert entry.reason == "silent for 3000 ms"


@pytest.mark.parametrize("answer", [ProbeResult.REFUSED, ProbeResult.OTHER_INCARNATION])
def test_a_refused_connection_after_a_break_fences_almost_at_once(answer: ProbeResult) -> None:
    made = sessions(5)
    assert made.stream_broke(100, 3, 103)
    made.probed(101, 3, 103, answer)
    assert made.tick(110) == ()
    assert made.tick(120) == ()
    assert [entry.broker for entry in made.tick(121)] == [3]


@pytest.mark.parametrize("answer", [ProbeResult.SAME_INCARNATION, ProbeResult.SILENT])
def test_otherwise_the_timeout_decides_after_a_break(answer: ProbeResult) -> None:
    made = sessions(5)
    made.stream_broke(100, 3, 103)
    made.probed(101, 3, 103, answer)
    assert run(made, 200, 5000, alive=(0, 1, 2, 4)) == {3: 3000}


def test_half_of_the_brokers_at_once_is_our_own_fault_and_only_timeouts_decide() -> None:
    made = sessions(4)
    for now, broker in ((100, 0), (105, 1)):
        made.stream_broke(now, broker, broker + 100)
        made.probed(now + 1, broker, broker + 100, ProbeResult.REFUSED)
    assert run(made, 200, 2900, alive=(2, 3)) == {}
    assert run(made, 3000, 3200, alive=(2, 3)) == {0: 3000, 1: 3000}


def test_a_refusal_reported_long_after_a_mass_disconnect_does_not_count_either() -> None:
    made = sessions(4)
    for broker in (0, 1, 2):
        made.stream_broke(100, broker, broker + 100)
    assert run(made, 200, 1500, alive=(3,)) == {}
    made.probed(1501, 0, 100, ProbeResult.REFUSED)
    assert run(made, 1600, 2900, alive=(3,)) == {}
    made.heard(2950, 0, 100)
    made.stream_broke(4000, 0, 100)
    made.probed(4001, 0, 100, ProbeResult.REFUSED)
    assert 0 in run(made, 4100, 4200, alive=(3,)), "after a heartbeat it is judged again"


def test_a_break_that_turns_out_not_to_be_alone_is_forgiven_in_time() -> None:
    made = sessions(3)
    made.stream_broke(100, 0, 100)
    made.probed(100, 0, 100, ProbeResult.REFUSED)
    made.stream_broke(115, 1, 101)
    assert made.tick(125) == ()
    assert made.tick(200) == ()


def test_two_breaks_more_than_a_second_apart_are_two_single_ones() -> None:
    made = sessions(4)
    fenced = []
    for start, broker in ((100, 0), (1200, 1)):
        made.stream_broke(start, broker, broker + 100)
        made.probed(start, broker, broker + 100, ProbeResult.REFUSED)
        fenced += list(run(made, start + 100, start + 900, alive=(2, 3)))
    assert fenced == [0, 1]


def test_one_broker_alone_is_not_a_mass() -> None:
    made = sessions(1)
    made.stream_broke(100, 0, 100)
    made.probed(100, 0, 100, ProbeResult.REFUSED)
    assert [entry.broker for entry in made.tick(120)] == [0]


def test_a_minority_of_a_large_cluster_is_fenced() -> None:
    made = sessions(10)
    for broker in range(4):
        made.stream_broke(100, broker, broker + 100)
        made.probed(100, broker, broker + 100, ProbeResult.REFUSED)
    assert [entry.broker for entry in made.tick(120)] == [0, 1, 2, 3]


@pytest.mark.case("R17")
def test_time_in_which_the_controller_did_not_run_does_not_count() -> None:
    made = sessions(5)
    assert run(made, 0, 1000) == {}
    # The controller is held up for a minute; the heartbeats of that time wait in its sockets.
    assert made.tick(61_000) == ()
    assert run(made, 61_000, 65_000, alive=(0, 1, 2, 3)) == {4: 62_800}, "the silent one is found a little later"


@pytest.mark.case("R17")
def test_a_controller_that_stalls_again_and_again_fences_nobody_who_is_heard_between() -> None:
    made = sessions(3)
    for stall in range(1, 50):
        now = stall * 5000
        assert made.tick(now) == ()
        for broker in range(3):
            made.heard(now + 1, broker, broker + 100)


def test_a_new_active_controller_gives_everybody_a_full_session() -> None:
    made = BrokerSessions(0)
    made.begin(50_000, [(0, 100), (1, 101)])
    assert run(made, 50_000, 52_900) == {}
    assert run(made, 53_000, 53_300) == {0: 53_000, 1: 53_000}


def test_a_new_active_controller_fences_whom_it_finds_gone_but_not_half_of_them() -> None:
    made = sessions(5)
    made.probed(10, 2, 102, ProbeResult.REFUSED)
    assert [entry.broker for entry in made.tick(40)] == [2]
    made = sessions(3)
    made.probed(10, 1, 101, ProbeResult.REFUSED)
    made.probed(11, 2, 102, ProbeResult.REFUSED)
    assert made.tick(100) == ()


def test_what_concerns_a_former_incarnation_is_ignored() -> None:
    made = sessions(2)
    made.heard(100, 0, 200)
    assert not made.stream_broke(200, 0, 100)
    made.probed(200, 0, 100, ProbeResult.REFUSED)
    made.heard(250, 0, 100)
    assert run(made, 300, 4000, alive=(1,)) == {0: 3100}


def test_the_clock_does_not_run_backwards() -> None:
    made = sessions(1, now_ms=1000)
    assert made.tick(900) == ()
    assert run(made, 1000, 3900) == {}
    assert made.tick(4000)
