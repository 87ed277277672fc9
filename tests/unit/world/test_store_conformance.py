"""What `world.store` promises, for LMDB and the simulated store alike."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tidelog.model.errors import CorruptStateError, StorageError
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


@pytest.fixture(params=["real", "simulated"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    if request.param == "real":
        yield from _real_side(tmp_path / "state")
    else:
        yield from _simulated_side()


def _real_side(path: Path) -> Iterator[Side]:
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

    yield Side(reopen, lambda main: asyncio.run(main()), flip, lambda: held[0].transactions)
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

        yield Side(reopen, run, machine.store().flip_bit, lambda: machine.store().transactions)


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


def test_keys_are_told_whatever_their_values(side: Side) -> None:
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
