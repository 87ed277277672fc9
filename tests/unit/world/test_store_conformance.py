"""What `world.store` promises, for LMDB and the simulated store alike."""

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tidelog.model.errors import CorruptStateError, DiskFullError, StorageError
from tidelog.world.real.store import LmdbStore
from tidelog.world.sealing import CRC_BYTES
from tidelog.world.simulated import SimWorld
from tidelog.world.store import StateStore


@dataclass
class Side:
    """One of the two worlds: how to open its store again, to run a coroutine, to damage a stored value."""

    reopen: Callable[[], StateStore]
    run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
    flip: Callable[[bytes, int], None]
    transactions: Callable[[], int]
    set_full: Callable[[bool], None]


@pytest.fixture(params=["real", "simulated"])
def side(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    if request.param == "real":
        yield from _real_side(tmp_path / "state", monkeypatch)
    else:
        yield from _simulated_side()


def _real_side(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    held: list[LmdbStore] = []

    def reopen() -> StateStore:
        while held:
            held.pop().close()
        held.append(LmdbStore(path))
        return held[0]

    def flip(key: bytes, position: int) -> None:
        environment = held[0]._environment
        with environment.begin(write=True) as transaction:
            stored = bytearray(transaction.get(key) or b"")
            stored[position] ^= 1
            transaction.put(key, bytes(stored))

    def allocate(descriptor: int, position: int, length: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "a test says so")

    def set_full(is_full: bool) -> None:
        if is_full:
            monkeypatch.setattr(os, "posix_fallocate", allocate)
        else:
            monkeypatch.undo()

    yield Side(reopen, lambda main: asyncio.run(main()), flip, lambda: held[0].transactions, set_full)
    held.pop().close()


def _simulated_side() -> Iterator[Side]:
    with SimWorld(seed=1) as world:
        machine = world.machine("a")

        def reopen() -> StateStore:
            if machine.node is not None:
                machine.kill()
            return machine.boot().store()

        def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            assert machine.node is not None
            return world.run(machine.node, lambda _: main())

        def set_full(is_full: bool) -> None:
            machine.store().fill(1.0 if is_full else 0.0)

        yield Side(reopen, run, machine.store().flip_bit, lambda: machine.store().transactions, set_full)


def commit(side: Side, store: StateStore, writes: dict[bytes, bytes | None]) -> None:
    async def main() -> None:
        await store.commit(writes)

    side.run(main)


def test_values_come_back_also_after_opening_again(side: Side) -> None:
    store = side.reopen()
    assert store.get(b"epoch") is None
    commit(side, store, {b"epoch": b"7", b"vote": b"", b"long": bytes(100_000)})
    for _ in range(2):
        assert store.get(b"epoch") == b"7"
        assert store.get(b"vote") == b""
        assert store.get(b"long") == bytes(100_000)
        store = side.reopen()


def test_none_deletes_also_what_is_not_there(side: Side) -> None:
    store = side.reopen()
    commit(side, store, {b"a": b"1", b"b": b"2"})
    commit(side, store, {b"a": None, b"missing": None})
    assert store.get(b"a") is None
    assert store.scan(b"") == [(b"b", b"2")]


def test_a_scan_gives_the_keys_of_a_prefix_in_order(side: Side) -> None:
    store = side.reopen()
    commit(side, store, {b"log/b": b"2", b"lof": b"0", b"log/a": b"1", b"loh": b"3", b"log/\xff": b"4"})
    assert store.scan(b"log/") == [(b"log/a", b"1"), (b"log/b", b"2"), (b"log/\xff", b"4")]
    assert [key for key, _ in store.scan(b"")] == [b"lof", b"log/a", b"log/b", b"log/\xff", b"loh"]
    assert store.scan(b"nothing") == []


def test_keys_are_listed_whatever_their_values(side: Side) -> None:
    store = side.reopen()
    commit(side, store, {b"log/b": b"2", b"lof": b"0", b"log/a": b"1", b"log/\xff": b"4"})
    side.flip(b"log/b", CRC_BYTES)
    assert store.keys(b"log/") == [b"log/a", b"log/b", b"log/\xff"]
    assert store.keys(b"") == [b"lof", b"log/a", b"log/b", b"log/\xff"]
    assert store.keys(b"nothing") == []
    with pytest.raises(CorruptStateError):
        store.scan(b"log/")


def test_nothing_is_seen_before_it_is_committed(side: Side) -> None:
    store = side.reopen()

    async def main() -> None:
        waiting = asyncio.ensure_future(store.commit({b"a": b"1"}))
        assert store.get(b"a") is None
        await waiting
        assert store.get(b"a") == b"1"

    side.run(main)


def test_commits_that_wait_share_a_transaction_and_keep_their_order(side: Side) -> None:
    store = side.reopen()

    async def main() -> None:
        await asyncio.gather(*(store.commit({b"last": b"%d" % number, b"%d" % number: b""}) for number in range(50)))

    side.run(main)
    assert store.get(b"last") == b"49"
    assert len(store.scan(b"")) == 51
    assert side.transactions() == 2


def test_a_cancelled_commit_leaves_the_store_usable(side: Side) -> None:
    store = side.reopen()

    async def main() -> None:
        waiting = asyncio.ensure_future(store.commit({b"a": b"1"}))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await store.commit({b"b": b"2"})

    side.run(main)
    assert store.get(b"b") == b"2"


@pytest.mark.parametrize("position", [0, CRC_BYTES, CRC_BYTES + 2])
def test_a_flipped_bit_is_an_error_that_names_the_key(side: Side, position: int) -> None:
    store = side.reopen()
    commit(side, store, {b"epoch": b"777", b"other": b"1"})
    side.flip(b"epoch", position)
    with pytest.raises(CorruptStateError, match="b'epoch'"):
        store.get(b"epoch")
    with pytest.raises(CorruptStateError, match="b'epoch'"):
        store.scan(b"e")
    assert store.get(b"other") == b"1"


@pytest.mark.parametrize("key", [b"", b"k" * 256])
def test_keys_have_1_to_255_bytes(side: Side, key: bytes) -> None:
    store = side.reopen()
    with pytest.raises(AssertionError):
        commit(side, store, {key: b""})
    commit(side, store, {b"k" * 255: b"fits"})
    assert store.get(b"k" * 255) == b"fits"


def test_closing_fails_what_still_waits(side: Side) -> None:
    store = side.reopen()

    async def main() -> list[BaseException | None]:
        waiting = [asyncio.ensure_future(store.commit({b"%d" % number: b""})) for number in range(3)]
        await asyncio.sleep(0)
        store.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = side.run(main)
    assert results[0] is None
    assert [type(result) for result in results[1:]] == [StorageError, StorageError]


LARGE = bytes(8 << 20)
"""More than any reserve."""


def test_what_finds_no_room_is_refused_as_a_whole_and_may_be_tried_again(side: Side) -> None:
    store = side.reopen()
    commit(side, store, {b"epoch": b"1", b"old": b"x"})
    wanted: dict[bytes, bytes | None] = {b"epoch": b"2", b"old": None, b"large": LARGE}
    side.set_full(True)
    for _ in range(3):
        with pytest.raises(DiskFullError, match=r"commit to|enlarge"):
            commit(side, store, wanted)
        assert store.scan(b"") == [(b"epoch", b"1"), (b"old", b"x")], "reads go on, and nothing has changed"
    side.set_full(False)
    commit(side, store, wanted)
    for _ in range(2):
        assert store.scan(b"") == [(b"epoch", b"2"), (b"large", LARGE)]
        store = side.reopen()


def test_nothing_of_what_was_refused_is_there_after_a_restart(side: Side) -> None:
    store = side.reopen()
    commit(side, store, {b"epoch": b"1"})
    side.set_full(True)
    with pytest.raises(DiskFullError):
        commit(side, store, {b"epoch": b"2", b"large": LARGE})
    side.set_full(False)
    assert side.reopen().scan(b"") == [(b"epoch", b"1")]


def test_all_sharing_a_refused_transaction_fail_and_later_ones_have_their_own(side: Side) -> None:
    store = side.reopen()

    async def main() -> list[BaseException | None]:
        first = asyncio.ensure_future(store.commit({b"first": LARGE}))
        await asyncio.sleep(0)
        shared = [asyncio.ensure_future(store.commit(writes)) for writes in ({b"small": b"1"}, {b"large": LARGE})]
        with pytest.raises(DiskFullError):
            await first
        await asyncio.sleep(0)
        late = asyncio.ensure_future(store.commit({b"late": b"1"}))
        results = await asyncio.gather(*shared, return_exceptions=True)
        side.set_full(False)
        return [*results, *await asyncio.gather(late, return_exceptions=True)]

    side.set_full(True)
    *refused, late = side.run(main)
    assert [type(result) for result in refused] == [DiskFullError, DiskFullError]
    assert late is None
    assert store.scan(b"") == [(b"late", b"1")]
