"""The accumulator: records of all topics, in parcels by partition, within `buffer_memory`. No IO, no thread of its own.

Callers' threads put records in; the core, on the IO thread, takes parcels out. Everything stands under one lock, which
is held for a few steps only.

    open      `place.open[partition]`, one for each partition at most; `limit` bytes are reserved for it
    sealed    in `sealed`, in order; reserved is what it has. By a full parcel (the caller), or by the core: its linger
              is over, somebody flushes, or the memory is short
    done      told, and its bytes are free again

`reserved` never exceeds `buffer_memory`, but for one record that is larger than all of it. A caller without room
registers a waiter (`on_room`), which is called when bytes become free; who waits longer than `max_block_ms` gives up.

Whoever changes what the core has to look at calls `wake` afterwards, outside of the lock; it is called once until the
core has looked (`looked`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from tidelog.client.hot import Delivery, Entrance, Parcel, Place, Row, Told, append
from tidelog.client.partitioners import DIRECT, Partitioner
from tidelog.model.errors import UnknownTopicOrPartitionError

SHARE = 16
"""An open parcel reserves at most this part of the memory, so that a few partitions do not take all of it."""


class TopicPlace(Place):
    """A `Place`, and which of its partitions have a leader."""

    def __init__(self, topic: str, count: int, available: tuple[int, ...]) -> None:
        super().__init__(topic, count)
        self.available = available
        self.turn = 0
        """For partitioners that go round."""


class Accumulator(Entrance):
    def __init__(
        self,
        *,
        lock: Any,
        random: Random,
        now_s: Callable[[], float],
        wake: Callable[[], None],
        batch_size: int,
        buffer_memory: int,
        row_bytes_max: int,
        partitioner: Partitioner,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(lock, row_bytes_max, clock_ms)
        self.is_direct = partitioner is DIRECT
        self.partitioner = partitioner
        self.random = random
        self.now_s = now_s
        self.batch_size = min(batch_size, max(1, buffer_memory // SHARE))
        self.buffer_memory = buffer_memory
        self.reserved = 0
        self.records = 0
        """Entered so far, of sealed parcels."""
        self.opened: deque[Parcel] = deque()
        """In the order of opening; some may be sealed meanwhile."""
        self.sealed: deque[Parcel] = deque()
        self.unfinished: dict[Parcel, None] = {}
        self.is_pressed = False
        """Somebody has found no room: what is open is to be sealed, whatever its linger."""
        self.is_closed = False
        self._wake = wake
        self._is_woken = False
        self._waiters: dict[Callable[[], object], None] = {}

    # In.

    def put(self, place: TopicPlace, partition: int | None, row: Row, size: int, told: Told | None) -> Delivery | None:
        """A record in, by opening a parcel if need be. None: there is no room now. `partition` None: by its key, as the
        partitioner has it."""
        with self.lock:
            where = self.partition_of(place, row) if partition is None else partition
            if not 0 <= where < place.count:
                raise UnknownTopicOrPartitionError(
                    f"'{place.topic}' has {place.count} partitions from 0 on, there is no {where}"
                )
            parcel = place.open[where]
            if parcel is not None and parcel.size + size > parcel.limit:
                self.seal(parcel)
                if partition is None and self.partitioner.is_sticky(row[1]):
                    where = place.sticky  # it has moved on with the parcel
                parcel = place.open[where]
                if parcel is not None and parcel.size + size > parcel.limit:
                    self.seal(parcel)
                    parcel = None
            if parcel is None:
                parcel = self._open(place, where, size)
            made = None if parcel is None else append(parcel, row, parcel.size + size, told)
        self.wake_core()
        return made

    def partition_of(self, place: TopicPlace, row: Row) -> int:
        """Under the lock."""
        return self.partitioner.partition(place, row[1], row[2])

    def _open(self, place: TopicPlace, where: int, size: int) -> Parcel | None:
        if self.is_closed:
            return None
        limit = max(self.batch_size, size)
        if self.reserved + limit > self.buffer_memory and self.reserved:
            # What is open has more reserved than it may need: the core seals it all, and then there may be room.
            self.is_pressed = True
            return None
        parcel = Parcel(place.topic, where, limit, self.now_s())
        parcel.lock = self.lock
        place.open[where] = parcel
        self.reserved += limit
        self.opened.append(parcel)
        self.unfinished[parcel] = None
        return parcel

    def add_sealed(self, parcel: Parcel, place: TopicPlace) -> bool:
        """A parcel of bulk, whole and encoded, behind what its partition has. False: there is no room now. The core is
        woken only then; otherwise the caller does it, once for many."""
        with self.lock:
            size = parcel.size
            if self.is_closed:
                made = False
            elif self.reserved and self.reserved + size > self.buffer_memory:
                self.is_pressed = True
                made = False
            else:
                before = place.open[parcel.partition] if parcel.partition < place.count else None
                if before is not None:
                    self.seal(before)
                elif parcel.partition == place.sticky:
                    self.move_sticky(place)
                parcel.lock = self.lock
                parcel.limit = size
                parcel.is_sealed = True
                self.reserved += size
                self.records += parcel.count
                self.unfinished[parcel] = None
                self.sealed.append(parcel)
                made = True
        if not made:
            self.wake_core()
        return made

    def on_room(self, waiter: Callable[[], object]) -> bool:
        """Call it when bytes have become free; it has to look again then."""
        with self.lock:
            self._waiters[waiter] = None
        return True

    def off_room(self, waiter: Callable[[], object]) -> None:
        """It waits no longer."""
        with self.lock:
            self._waiters.pop(waiter, None)

    # Under the lock.

    def seal(self, parcel: Parcel) -> None:
        """No more records into it; it is the core's."""
        place = self.places.get(parcel.topic)
        assert not parcel.is_sealed, "it is sealed once"
        parcel.is_sealed = True
        parcel.count = len(parcel.rows)
        self.records += parcel.count
        self.reserved -= parcel.limit - parcel.size
        parcel.limit = parcel.size
        self.sealed.append(parcel)
        if place is not None and parcel.partition < len(place.open) and place.open[parcel.partition] is parcel:
            place.open[parcel.partition] = None
            if parcel.partition == place.sticky:
                self.move_sticky(place)

    def move_sticky(self, place: Place) -> None:
        """Another partition for records without a key: one that has a leader, if any has."""
        assert isinstance(place, TopicPlace)
        choices = place.available or range(place.count)
        if len(choices) > 1:
            place.sticky = self.random.choice([one for one in choices if one != place.sticky])
        else:
            place.sticky = choices[0]

    def seal_all(self) -> None:
        """Everything that is open, in the order of opening."""
        for parcel in list(self.unfinished):
            if not parcel.is_sealed:
                self.seal(parcel)
        self.opened.clear()

    # For the core.

    def wake_core(self) -> None:
        if (self.sealed or self.opened or self.is_pressed) and not self._is_woken:
            self._is_woken = True
            self._wake()

    def looked(self) -> None:
        """The core looks now; who comes later wakes it again."""
        self._is_woken = False

    def set_place(self, topic: str, count: int, available: tuple[int, ...]) -> None:
        """What is known of a topic: new, more partitions, or made anew with fewer of them."""
        with self.lock:
            place = self.places.get(topic)
            if place is None:
                self.places[topic] = place = TopicPlace(topic, count, available)
                self.move_sticky(place)
                return
            assert isinstance(place, TopicPlace)
            for parcel in place.open[count:]:
                if parcel is not None:
                    self.seal(parcel)
            place.open = place.open[:count] + [None] * (count - len(place.open))
            place.count, place.available = count, available
            if place.sticky >= count or (available and place.sticky not in available):
                self.move_sticky(place)

    def forget_place(self, topic: str) -> bool:
        """Of a topic that is gone. False: something is on its way there."""
        with self.lock:
            if any(parcel.topic == topic for parcel in self.unfinished):
                return False
            self.places.pop(topic, None)
            return True

    def finish(self, parcel: Parcel) -> list[Callable[[], object]]:
        """Its end is set: from now on it can be read. Whom to call, outside of the lock."""
        with self.lock:
            parcel.is_done = True
            self.unfinished.pop(parcel, None)
            waiters, parcel.waiters = parcel.waiters, None
        return waiters or []

    def free(self, size: int) -> None:
        """Bytes of a parcel that is done."""
        with self.lock:
            self.reserved -= size
            assert self.reserved >= 0, "no more is freed than was reserved"
        self.rouse()

    def rouse(self) -> None:
        """There may be room: who waits for it looks again."""
        with self.lock:
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            waiter()

    def close(self) -> None:
        """Nothing gets in any more; who waits for room looks again."""
        with self.lock:
            self.is_closed = True
            self.places.clear()
        self.rouse()

    def validate(self) -> None:
        with self.lock:
            held = sum(parcel.limit for parcel in self.unfinished)
            assert self.reserved >= held, "what is unfinished is reserved"
            for place in self.places.values():
                assert len(place.open) == place.count, "a place for each partition"
                for where, parcel in enumerate(place.open):
                    if parcel is not None:
                        assert not parcel.is_sealed, "what is open is not sealed"
                        assert parcel.partition == where, "each in its place"
