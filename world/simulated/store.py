"""A simulated state store. `SimStoreDevice` outlives every process, `SimStore` is one process's handle. The contract is
in `world.store`, the stored form of a value in `world.sealing`.

    commit()            joins the pending commits
    device is free      takes all pending commits into one transaction, which takes virtual time
    transaction done    its writes become visible and durable, all at once; the commits return; the next starts
    process or power gone before that    the transaction has happened or not, by the draw; pending commits have not
    no space            the transaction has not happened, its commits fail, and the next starts
    error               the transaction has happened or not, by the draw, and becomes visible only to the next process;
                        the handle has failed for good
"""

import errno
import random
from collections.abc import Callable, Mapping

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.sealing import seal, unseal
from tidelog.world.simulated.faults import Faults, Latency, Stall, resolve
from tidelog.world.simulated.loop import SimFuture, SimLoop
from tidelog.world.simulated.scheduler import MachineDied
from tidelog.world.storage_errors import NO_SPACE, storage_error

Writes = dict[bytes, bytes | None]


class SimStoreDevice:
    """The stored bytes of one store of one machine, and its faults."""

    def __init__(self, world_loop: SimLoop, label: str, stream: random.Random) -> None:
        self.label = label
        self.commit_latency = Latency(0.0003, 0.0015)
        self.faults = Faults()
        self.stall = Stall(f"store {label}")
        self.transactions = 0
        self.refusals = 0
        self.refusal_probability = 0.0
        self.stored: dict[bytes, bytes] = {}
        self.crash_at_commit: int | None = None
        self.on_crash_point: Callable[[], None] | None = None
        self.on_call: Callable[[str, tuple[str, ...]], None] | None = None
        """As `SimDevice.on_call`, with `get` and `commit`."""
        self._world_loop = world_loop
        self._stream = stream
        self._in_flight: list[Writes] | None = None
        self._flights = 0

    # -- faults

    def fail(self, operation: str = "commit", *, number: int = errno.EIO, times: int = 1) -> None:
        """The next `commit` or `get` (or scan) raises."""
        self.faults.arm(operation, number=number, times=times)

    def fill(self, refusal_probability: float = 1.0) -> None:
        """The disk is full. A store has a reserve: it rejects all transactions, some of them, or none."""
        self.refusal_probability = refusal_probability

    def begin_stall(self, *, everything: bool = False) -> None:
        self.stall.begin(everything=everything)

    def heal(self) -> None:
        self.refusal_probability = 0.0
        self.faults.clear()
        self.stall.end()

    def flip_bit(self, key: bytes, position: int, bit: int = 0) -> None:
        """Flips a bit of the stored form: the CRC first, then the value."""
        stored = bytearray(self.stored[key])
        stored[position] ^= 1 << bit
        self.stored[key] = bytes(stored)

    def wipe(self) -> None:
        self.stored.clear()

    def end_of_process(self) -> None:
        """The process died, or power was lost: a running transaction may have happened."""
        self._flights += 1
        self.stall.drop_queue()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None and self._stream.random() < 0.5:
            self._apply(in_flight)

    # -- for the handle

    def begin(self, batch: list[Writes], complete: Callable[[StorageError | None], None]) -> None:
        """Starts a transaction; `complete` runs when it has ended, unless the process ends first."""
        assert self._in_flight is None, "one transaction at a time"
        self._in_flight = batch
        flight = self._flights

        def arrive() -> None:
            if flight != self._flights or self.stall.wait(arrive):
                return
            self._in_flight = None
            error = self.faults.take("commit", ())
            if error is None and self._is_refused():
                error = OSError(errno.ENOSPC, "simulated")
            if error is None:
                self.transactions += 1
                self._apply(batch)
                complete(None)
            elif error.errno in NO_SPACE:
                self.refusals += 1
                complete(storage_error("commit to state store", self.label, error))
            else:
                # Not visible yet: this process has failed, and the next one may find it or not.
                self._in_flight = batch
                complete(storage_error("commit to state store", self.label, error))

        self._world_loop.call_later(self.commit_latency.draw(self._stream), arrive)

    def _is_refused(self) -> bool:
        return self.refusal_probability > 0 and self._stream.random() < self.refusal_probability

    def crash_point(self) -> None:
        """Like `SimDevice.crash_at_operation`, counted in commits."""
        if self.crash_at_commit is not None:
            self.crash_at_commit -= 1
            if self.crash_at_commit <= 0:
                self.crash_at_commit = None
                assert self.on_crash_point is not None, "a machine that can lose its power"
                self.on_crash_point()
                raise MachineDied("power lost before a commit")

    def _apply(self, batch: list[Writes]) -> None:
        for writes in batch:
            for key, stored in writes.items():
                if stored is None:
                    self.stored.pop(key, None)
                else:
                    self.stored[key] = stored


class SimStore:
    """Implements `world.store.StateStore` for one incarnation of a node."""

    def __init__(self, device: SimStoreDevice, loop: SimLoop) -> None:
        self._device = device
        self._loop = loop
        self._waiting: list[tuple[Writes, SimFuture]] = []
        self._is_writing = False
        self._failed: StorageError | None = None
        self._is_dead = False
        self._is_closed = False

    def die(self) -> None:
        self._is_dead = True
        self._waiting.clear()

    def get(self, key: bytes) -> bytes | None:
        stored = self._enter("get").stored.get(key)
        return None if stored is None else unseal(key, stored, path=self._device.label)

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        stored = self._enter("get").stored
        keys = sorted(key for key in stored if key.startswith(prefix))
        return [(key, unseal(key, stored[key], path=self._device.label)) for key in keys]

    def keys(self, prefix: bytes) -> list[bytes]:
        return sorted(key for key in self._enter("get").stored if key.startswith(prefix))

    async def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        self._enter("begin commit")
        self._device.crash_point()
        if self._failed is not None:
            raise self._failed
        sealed = {key: None if value is None else seal(key, value) for key, value in writes.items()}
        done = self._loop.create_future()
        self._waiting.append((sealed, done))
        if not self._is_writing:
            self._start_transaction()
        await done

    def close(self) -> None:
        self._is_closed = True
        if not self._is_dead:
            self._fail_waiting(StorageError(f"state store {self._device.label}: closed", path=self._device.label))

    def _start_transaction(self) -> None:
        batch, self._waiting = self._waiting, []
        self._is_writing = True

        def complete(error: StorageError | None) -> None:
            self._loop.call_soon(self._finish, [done for _, done in batch], error)

        self._device.begin([writes for writes, _ in batch], complete)

    def _finish(self, batch: list[SimFuture], error: StorageError | None) -> None:
        self._is_writing = False
        for done in batch:
            resolve(done, None, error)
        if error is not None and not isinstance(error, DiskFullError):
            self._failed = error
            self._fail_waiting(error)
        elif self._waiting and not self._is_closed:
            self._start_transaction()

    def _fail_waiting(self, error: StorageError) -> None:
        waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            resolve(done, None, error)

    def _enter(self, operation: str) -> SimStoreDevice:
        if self._is_dead:
            raise MachineDied(f"{operation} after death")
        assert not self._is_closed, "the store is closed"
        if self._device.on_call is not None:
            self._device.on_call("commit" if operation == "begin commit" else operation, ())
        error = self._device.faults.take(operation, ())
        if error is not None:
            raise storage_error(f"{operation} of state store", self._device.label, error)
        self._device.stall.touch(self._loop)
        return self._device
