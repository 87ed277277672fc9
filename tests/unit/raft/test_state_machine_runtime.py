"""The replicated-state-machine runtime, over a log whose commits and refusals the tests decide."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tidelog.model.errors import (
    InvalidRequestError,
    MovedLogError,
    NotLeaderError,
    OverloadedError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.runtime import StateMachineRuntime

ME, OTHER = NodeId(1), NodeId(2)
E = Epoch(7)
State = tuple[str, ...]


class Words:
    """Appends words to a list; rejects a word that is there. A word is a record; `cut` words need two entries."""

    def __init__(self) -> None:
        self.offsets: list[Offset] = []

    def decide(self, state: State, request: Any, *, offset: Offset) -> tuple[Sequence[str], str]:
        self.offsets.append(offset)
        if request == "":
            return (), f"{len(state)} words"
        if request in state:
            raise InvalidRequestError(f"{request} is there")
        return (request,), f"{request} is number {len(state)}"

    def apply(self, state: State, records: Sequence[str]) -> State:
        return (*state, *records)

    def encode(self, records: Sequence[str]) -> list[bytes]:
        whole = " ".join(records).encode()
        return [b"begin", whole, b"end"] if b"large" in whole else [whole]

    def abort(self) -> bytes:
        return b"abort"


class ModelLog:
    """Takes appends; the test commits, rejects, or lets an entry of the log's own in between.

    In a `wide` one an entry takes an offset for each of its words, as in the log of a partition.
    """

    def __init__(self, *, is_wide: bool = False) -> None:
        self.is_wide = is_wide
        self.entries: list[bytes] = [b"no-op"]
        self.epoch = E
        self.committed = 1
        self.waiting: list[tuple[Offset, asyncio.Future[None]]] = []
        self.refuse_next: list[TidelogError | None] = []
        self.owner: StateMachineRuntime[State] | None = None
        self.replayed: State = ()
        self.open: list[bytes] | None = None
        self.deposed = False

    @property
    def end_offset(self) -> Offset:
        return self.offset_of(len(self.entries))

    def width(self, data: bytes) -> int:
        return len(data.split()) if self.is_wide else 1

    def offset_of(self, count: int) -> Offset:
        """Where so many entries end."""
        return Offset(sum(map(self.width, self.entries[:count])))

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        rejection = self.refuse_next.pop(0) if self.refuse_next else None
        if rejection is not None:
            raise rejection
        if at != self.end_offset or epoch != self.epoch:
            raise MovedLogError("the log does not end there")
        self.entries.append(data)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((at, done))
        await done

    async def confirm(self) -> None:
        if self.deposed:
            raise NotLeaderError("another node leads", leader=OTHER)

    def own_entry(self) -> None:
        self.entries.append(b"no-op")

    def commit(self) -> None:
        """Everything that is in the log, as a replay sees it."""
        assert self.owner is not None
        while self.committed < len(self.entries):
            data = self.entries[self.committed]
            self.committed += 1
            if data == b"begin":
                self.open = []
            elif data == b"abort":
                self.open = None
            elif data == b"end":
                assert self.open is not None, "a decision ends that has begun"
                self.replayed = (*self.replayed, *b" ".join(self.open).decode().split())
                self.open = None
            elif self.open is not None:
                self.open.append(data)
            elif not data.startswith(b"no-op"):
                self.replayed = (*self.replayed, *data.decode().split())
            mine = not data.startswith(b"no-op") and self.owner.is_mine(self.offset_of(self.committed - 1), self.epoch)
            self.owner.committed(self.offset_of(self.committed), self.replayed, mine=mine)
        for _, done in self.waiting:
            done.set_result(None)
        self.waiting.clear()


class Bench:
    def __init__(self, *, is_wide: bool = False, **more: Any) -> None:
        self.log = ModelLog(is_wide=is_wide)
        self.words = Words()
        self.machine: StateMachineRuntime[State] = StateMachineRuntime(self.words, self.log, (), **more)
        self.log.owner = self.machine
        self.machine.committed(Offset(1), (), mine=False)

    def ask(self, word: str) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self.machine.submit(word))

    async def turns(self) -> None:
        """Let everything run that can."""
        for _ in range(10):
            await asyncio.sleep(0)

    def check(self) -> None:
        assert self.machine.state == self.log.replayed, "the committed state is a replay of the log"


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(**getattr(request, "param", {}))
    bench.machine.lead(E, ME)
    yield bench
    bench.check()


async def test_requests_of_one_turn_share_an_entry_and_are_answered_when_it_commits(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("a", "b", "c")]
    await bench.turns()
    assert bench.log.entries[1:] == [b"a b c"]
    assert bench.machine.state == ()
    assert not any(task.done() for task in asked)
    bench.log.commit()
    assert [await task for task in asked] == ["a is number 0", "b is number 1", "c is number 2"]


async def test_what_is_decided_while_an_append_is_under_way_goes_into_the_next(bench: Bench) -> None:
    first = bench.ask("a")
    await bench.turns()
    later = [bench.ask("b"), bench.ask("c")]
    await bench.turns()
    assert bench.log.entries[1:] == [b"a"]
    bench.log.commit()
    await bench.turns()
    assert first.done()
    assert bench.log.entries[1:] == [b"a", b"b c"]
    assert bench.words.offsets == [1, 2, 2]
    bench.log.commit()
    assert [await task for task in later] == ["b is number 1", "c is number 2"]


async def test_a_refusal_and_an_answer_without_records_wait_for_what_they_were_decided_on(bench: Bench) -> None:
    first = bench.ask("a")
    again, question = bench.ask("a"), bench.ask("")
    await bench.turns()
    third = bench.ask("")
    await bench.turns()
    assert not any(task.done() for task in (first, again, question, third))
    bench.log.commit()
    assert await question == "1 words"
    assert await third == "1 words"
    with pytest.raises(InvalidRequestError, match="a is there"):
        await again
    assert await bench.machine.submit("") == "1 words"


async def test_a_standby_says_who_leads(bench: Bench) -> None:
    bench.machine.follow(OTHER)
    with pytest.raises(NotLeaderError, match="node 2 leads") as rejection:
        await bench.machine.submit("a")
    assert rejection.value.leader == OTHER


async def test_a_leader_that_is_one_no_more_and_does_not_know_it_answers_nothing(bench: Bench) -> None:
    first = bench.ask("a")
    await bench.turns()
    bench.log.commit()
    await first
    bench.log.deposed = True
    for request in ("", "a"):
        with pytest.raises(NotLeaderError, match="another node leads"):
            await bench.machine.submit(request)


async def test_loss_of_leadership_drops_speculation_and_says_what_is_known(bench: Bench) -> None:
    under_way = bench.ask("a")
    await bench.turns()
    gathered = bench.ask("b")
    await bench.turns()
    bench.machine.follow(OTHER)
    with pytest.raises(UnknownOutcomeError):
        await under_way
    with pytest.raises(NotLeaderError):
        await gathered
    # The next leader has thrown the entry away.
    bench.log.entries[1:] = [b"no-op", b"z"]
    bench.log.waiting.clear()
    bench.log.commit()
    assert bench.machine.state == ("z",)
    bench.log.epoch = Epoch(9)
    bench.machine.lead(Epoch(9), ME)
    again = bench.ask("a")
    await bench.turns()
    bench.log.commit()
    assert await again == "a is number 1"


async def test_an_entry_of_the_logs_own_in_between_makes_it_decide_again(bench: Bench) -> None:
    asked = bench.ask("a")
    await asyncio.sleep(0)
    bench.log.own_entry()
    await bench.turns()
    assert bench.log.entries[1:] == [b"no-op", b"a"]
    assert bench.words.offsets == [1, 2]
    bench.log.commit()
    assert await asked == "a is number 0"


async def test_a_decision_that_is_made_again_replaces_the_rejection_of_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(state: State, request: Any, *, offset: Offset) -> tuple[Sequence[str], str]:
        if request == "b":
            raise InvalidRequestError("not yet")
        return Words.decide(bench.words, state, request, offset=offset)

    monkeypatch.setattr(bench.words, "decide", reject)
    first, second = bench.ask("a"), bench.ask("b")
    await asyncio.sleep(0)
    bench.log.own_entry()
    monkeypatch.undo()
    await bench.turns()
    bench.log.commit()
    assert [await first, await second] == ["a is number 0", "b is number 1"]


async def test_an_entry_of_the_logs_own_that_commits_in_an_appends_place_answers_nobody(bench: Bench) -> None:
    asked = bench.ask("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.machine.appends == 1
    assert len(bench.log.entries) == 1, "handed over, not yet taken"
    bench.log.own_entry()
    bench.log.commit()
    assert not asked.done()
    assert bench.machine.state == ()
    await bench.turns()
    assert bench.log.entries[1:] == [b"no-op", b"a"]
    bench.log.commit()
    assert await asked == "a is number 0"


async def test_an_entry_of_the_logs_own_inside_of_a_large_decision_tears_it(bench: Bench) -> None:
    asked = bench.ask("large")
    await bench.turns()
    bench.log.commit()
    await bench.turns()
    bench.log.own_entry()
    bench.log.commit()
    await bench.turns()
    assert not asked.done(), "its end is not in the log"
    for _ in range(5):
        bench.log.commit()
        await bench.turns()
    assert await asked == "large is number 0"
    assert bench.log.entries[1:] == [b"begin", b"large", b"no-op", b"abort", b"begin", b"large", b"end"]


async def test_nothing_stands_on_a_state_that_the_log_refused(bench: Bench) -> None:
    """An append is rejected and an entry of the log's own takes its place: nothing that came after is on top of it."""
    first = bench.ask("a")
    await bench.turns()
    bench.log.commit()
    await first
    bench.log.refuse_next = [OverloadedError("too much")]
    rejected, after = bench.ask("b"), bench.ask("c")
    await bench.turns()
    bench.log.own_entry()
    for task in (rejected, after):
        with pytest.raises(OverloadedError):
            await task
    again = bench.ask("d")
    await bench.turns()
    bench.log.commit()
    assert await again == "d is number 1"
    assert bench.machine.state == ("a", "d")


async def test_a_large_decision_that_is_torn_is_aborted_before_anything_else(bench: Bench) -> None:
    bench.log.refuse_next = [None, OverloadedError("too much")]
    torn = bench.ask("large")
    await bench.turns()
    bench.log.commit()
    with pytest.raises(OverloadedError):
        await torn
    assert bench.log.open is not None
    asked = bench.ask("b")
    await bench.turns()
    bench.log.commit()
    await bench.turns()
    bench.log.commit()
    assert await asked == "b is number 0"
    assert bench.log.entries[1:] == [b"begin", b"abort", b"b"]
    assert bench.words.offsets[-1] == 3, "decided for the entry behind the abort"


def test_a_leader_aborts_what_a_former_one_left_open() -> None:
    async def body() -> None:
        bench = Bench()
        bench.log.entries += [b"begin", b"ghost", b"no-op"]
        bench.log.commit()
        bench.machine.lead(E, ME, is_torn=True)
        asked = bench.ask("a")
        for _ in range(3):
            await bench.turns()
            bench.log.commit()
        assert await asked == "a is number 0"
        assert bench.machine.state == ("a",)
        bench.check()

    asyncio.run(body())


async def test_a_large_decision_shows_when_its_last_entry_commits(bench: Bench) -> None:
    asked = bench.ask("large")
    for seen in ((), (), ("large",)):
        await bench.turns()
        bench.log.commit()
        assert bench.machine.state == seen
    assert await asked == "large is number 0"


@pytest.mark.parametrize("bench", [{"waiting_max": 2}], indirect=True)
async def test_requests_without_a_reply_are_bounded(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("a", "b")]
    await bench.turns()
    with pytest.raises(OverloadedError):
        await bench.machine.submit("c")
    bench.log.commit()
    await asyncio.gather(*asked)
    last = bench.ask("c")
    await bench.turns()
    bench.log.commit()
    assert await last == "c is number 2"


async def test_a_caller_that_gives_up_does_not_disturb_the_others(bench: Bench) -> None:
    gone, stays = bench.ask("a"), bench.ask("b")
    await bench.turns()
    gone.cancel()
    await bench.turns()
    bench.log.commit()
    assert await stays == "b is number 1"
    assert bench.machine.state == ("a", "b")


@pytest.mark.parametrize("bench", [{"waiting_max": 2}], indirect=True)
async def test_what_the_owner_decides_has_room_beyond_the_bound(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("a", "b")]
    await bench.turns()
    with pytest.raises(OverloadedError):
        await bench.machine.submit("c")
    own = asyncio.ensure_future(bench.machine.submit("own", is_own=True))
    await bench.turns()
    bench.log.commit()
    await bench.turns()
    bench.log.commit()
    assert await own == "own is number 2"
    await asyncio.gather(*asked)


@pytest.mark.parametrize("where", ["encode", "append", "decide again"])
def test_an_error_of_ours_tells_everybody_who_waits_and_ends_the_node(where: str) -> None:
    failures: list[BaseException] = []

    async def test(bench: Bench) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("ours")

        async def broken_append(*_: Any, **__: Any) -> None:
            raise RuntimeError("ours")

        if where == "encode":
            bench.words.encode = broken  # type: ignore[method-assign]
        if where == "append":
            bench.log.append_at = broken_append  # type: ignore[method-assign]
        first = bench.ask("a")
        await bench.turns()
        if where == "decide again":
            bench.words.decide = broken  # type: ignore[method-assign]
            bench.log.waiting[0][1].set_exception(MovedLogError("an entry of the log's own came in between"))
            bench.log.waiting.clear()
            bench.log.entries.pop()
        with pytest.raises((UnknownOutcomeError, NotLeaderError)):
            async with asyncio.timeout(5):
                await first
        await bench.turns()
        assert [str(failure) for failure in failures] == ["ours"]
        assert not bench.machine.is_leading

    bench = Bench(on_failure=failures.append)
    bench.machine.lead(E, ME)
    asyncio.run(test(bench))
    bench.check()


@pytest.mark.parametrize("bench", [{"is_wide": True}], indirect=True)
async def test_an_entry_takes_as_many_offsets_as_the_log_says(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("a", "b", "c")]
    await bench.turns()
    later = bench.ask("d")
    await bench.turns()
    assert bench.words.offsets == [1, 1, 1, 4], "the next append begins behind three records"
    assert bench.machine.pending_state == ("a", "b", "c"), "one entry, whatever its width"
    bench.log.commit()
    await bench.turns()
    bench.log.commit()
    assert [await task for task in (*asked, later)] == [f"{word} is number {at}" for at, word in enumerate("abcd")]
    assert bench.log.end_offset == bench.machine.applied == 5


@pytest.mark.parametrize("bench", [{"is_wide": True}], indirect=True)
async def test_a_wide_entry_of_the_logs_own_in_between_makes_it_decide_again(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("a", "b")]
    await asyncio.sleep(0)
    bench.log.entries.append(b"no-op no-op")
    await bench.turns()
    assert bench.log.entries[1:] == [b"no-op no-op", b"a b"]
    assert bench.words.offsets == [1, 1, 3, 3]
    bench.log.commit()
    assert [await task for task in asked] == ["a is number 0", "b is number 1"]


@pytest.mark.parametrize("bench", [{"is_wide": True}], indirect=True)
async def test_a_torn_decision_in_a_wide_log_is_aborted_and_the_next_one_stands_behind_that(bench: Bench) -> None:
    bench.log.refuse_next = [None, OverloadedError("too much")]
    torn = [bench.ask(word) for word in ("large", "x")]
    await bench.turns()
    bench.log.commit()
    for task in torn:
        with pytest.raises(OverloadedError):
            await task
    asked = bench.ask("b")
    for _ in range(2):
        await bench.turns()
        bench.log.commit()
    assert await asked == "b is number 0"
    assert bench.log.entries[1:] == [b"begin", b"abort", b"b"]


@pytest.mark.parametrize(
    "bench", [{"is_wide": True, "gather_max": 5, "weigh": lambda records: sum(map(len, records))}], indirect=True
)
async def test_decisions_that_weigh_too_much_together_go_into_several_appends(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("aaa", "bb", "ccccc", "d")]
    again = bench.ask("aaa")
    await bench.turns()
    assert bench.log.entries[1:] == [b"aaa bb"], "one append is under way at a time"
    bench.log.commit()
    await bench.turns()
    assert [task.done() for task in asked] == [True, True, False, False]
    assert not again.done(), "it was decided on all that came before it"
    assert bench.machine.state == ("aaa", "bb")
    bench.log.commit()
    await bench.turns()
    bench.log.commit()
    assert [await task for task in asked] == [
        "aaa is number 0",
        "bb is number 1",
        "ccccc is number 2",
        "d is number 3",
    ]
    with pytest.raises(InvalidRequestError):
        await again
    assert bench.log.entries[1:] == [b"aaa bb", b"ccccc", b"d"]


@pytest.mark.parametrize("bench", [{"gather_max": 3, "weigh": lambda records: sum(map(len, records))}], indirect=True)
async def test_waiters_for_a_later_append_learn_of_a_loss_too(bench: Bench) -> None:
    asked = [bench.ask(word) for word in ("aaa", "bbb", "ccc")]
    await bench.turns()
    bench.machine.follow(OTHER)
    with pytest.raises(UnknownOutcomeError):
        await asked[0]
    for task in asked[1:]:
        with pytest.raises(NotLeaderError):
            await task
    bench.log.entries[1:] = []
    bench.log.waiting.clear()


@pytest.mark.parametrize("bench", [{"waiting_max": 4}], indirect=True)
async def test_requests_whose_callers_have_given_up_count_as_long_as_their_decisions_are_kept(bench: Bench) -> None:
    """An append that hangs and callers that try again and again must not fill the memory."""
    first = bench.ask("a")
    await bench.turns()
    for word in ("b", "", "c"):
        given_up = bench.ask(word)
        await bench.turns()
        given_up.cancel()
        await asyncio.wait([given_up])
    with pytest.raises(OverloadedError, match="4 requests"):
        await bench.machine.submit("d")
    bench.log.commit()
    await bench.turns()
    bench.log.commit()
    assert await first == "a is number 0"
    assert await bench.machine.submit("") == "3 words"
