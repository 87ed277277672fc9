"""`ConsumerCore`: what a consumer does on its loop: membership, positions, fetching ahead, commits.

The user is elsewhere: in a thread of his own, or in a task of another loop. He comes by `poll` and goes away with a
`Handover`: fetched data, which his side decodes and gives out (`client.hand`), or a change of the partitions, which his
side carries out by a callback and confirms by `finished`. Whatever he was given he tells by `marks` at the next call.

    the user is ...            here
    in `poll`                  changes and data go to him at once
    away, with data in hand    heartbeats go on, data is fetched ahead up to `prefetch_bytes`; a change sets `attention`
                               and waits for him: a partition is given up only when he has come back
    away for longer than       the member leaves the group and says why in the log; its partitions are lost. The next
      max_poll_interval_ms     `poll` hands that over, and joins again. In any call of the consumer he is not away
    gone in mid-call           (Ctrl-C, a cancelled task) what was done is done; after `stay` or `rewind` both agree

Used on one loop; `poll` by one task at a time. Time and randomness come from the `ClusterClient`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tidelog.client.cluster import ClusterClient
from tidelog.client.commits import Commits, Offsets, Told
from tidelog.client.consumer_errors import CommitFailedError, ConsumerClosedError, SubscriptionError, WakeupError
from tidelog.client.consumer_figures import figures_of
from tidelog.client.consumer_settings import isolation_of, member_settings, reader_config
from tidelog.client.coordinators import Coordinators
from tidelog.client.errors import PositionError
from tidelog.client.group_offsets import GroupOffsets, Identity, Nobody
from tidelog.client.hand import Hand
from tidelog.client.lookups import Lookups, topic_of
from tidelog.client.membership import Assignment, Membership
from tidelog.client.names import ConsumerOptions
from tidelog.client.placing import Placing
from tidelog.client.positions import Held, Marks, Positions
from tidelog.client.reader import LOOK_S, Reader
from tidelog.client.rebalance import Change, Handover, Rebalance, change_of
from tidelog.client.record import GroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.tasks import Ending, Tasks
from tidelog.client.upkeep import Upkeep
from tidelog.model.errors import CallTimeoutError, InvalidRequestError, TidelogError, UnknownTopicIdError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

_GOODBYE_MS = 5_000
"""Long enough for a coordinator to move; the session says it otherwise."""
HANDOVER_BYTES = 4 << 20
"""Of fetched data that go to the user's side at once; as much again is behind it."""


class ConsumerCore:
    """Implements `membership.Member`."""

    def __init__(self, cluster: ClusterClient, options: ConsumerOptions, hand: Hand) -> None:
        """`hand` is the user's: here its attention is set, and looked at what he works on."""
        self.cluster = cluster
        self.options = options
        self.positions = Positions()
        self.rebalances = self.polls = self.left_for_polling = 0
        self._hand = hand
        self._reader = Reader(cluster, reader_config(options))
        self._signal = self._reader.arrived
        self._coordinators = Coordinators(cluster)
        self._membership: Membership | None = None
        self._offsets: GroupOffsets | None = None
        settings = member_settings(options)
        if settings is not None:
            self._membership = Membership(cluster, self._coordinators, settings, self)
            self._offsets = GroupOffsets(cluster, self._coordinators, settings.group, self._identity)
        self._placing = Placing(
            cluster,
            self.positions,
            self._offsets,
            reset=options.auto_offset_reset,
            isolation=isolation_of(options),
            placed=self._placed,
        )
        self.lookups = Lookups(cluster, self._placing)
        self._commits = Commits(
            options, self.positions, self._offsets, partition_of=self.lookups.partition, attend=self._attend
        )
        self.ended_commits = self._commits.ended
        self._is_subscribed = self._is_assigned = False
        self._announces = False  # whether a callback wants to hear of assigned partitions before they are read
        self._target: Assignment | None = None
        self._is_rebalanced = False
        self._lost: dict[PartitionId, TopicPartition] = {}
        self._reason: TidelogError | None = None  # why this is no member
        self._fatal: TidelogError | None = None
        self._last: Handover | None = None
        self._numbers = 0
        self._polling = asyncio.Lock()
        self._is_woken = self._is_ticking = self._is_leaving = self._is_closed = False
        self._upkeep = Upkeep(
            options,
            self.positions,
            self._reader,
            self._commits,
            hand,
            attend=self._attend,
            is_member=self._is_member,
            may_commit=lambda: self._is_member() or not self._is_subscribed,
            leave=self._leave_for_polling,
        )
        self._tasks = Tasks(self._task_failed)
        self._ending = Ending()

    # ---- What to read

    async def subscribe(self, topics: Sequence[str], pattern: str, *, announces: bool) -> None:
        """Joins at the next `poll`; a member says it at once. `announces`: nothing of a new partition is read before
        `finished` has said that its callback has run."""
        self._check_open()
        if self._membership is None:
            raise SubscriptionError("to subscribe is to be a member of a group: give `group`, or use assign")
        if self._is_assigned:
            raise SubscriptionError("partitions were assigned by hand: call unsubscribe before subscribe")
        if not topics and not pattern:
            raise SubscriptionError("no topics to subscribe to; unsubscribe ends a subscription")
        self._is_subscribed = self._commits.is_subscribed = True
        self._announces = announces
        self._fatal = None
        self._membership.subscribe(topics, pattern)
        self._tasks.spawn(self.lookups.look_for(topics, may_create=self.options.allow_auto_create_topics))

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """These and no others; what is assigned already stays where it is."""
        self._check_open()
        if self._is_subscribed:
            raise SubscriptionError("this consumer has subscribed: call unsubscribe before assign")
        names = list(partitions)
        if self.options.allow_auto_create_topics:
            await self.lookups.make(name.topic for name in names)
        wanted = {await self.lookups.partition(name): name for name in names}
        gone = [held.partition for held in self.positions if held.partition not in wanted]
        self._forget(gone)
        for partition, name in wanted.items():
            if partition not in self.positions:
                self.positions.add(Held(topic_of(name.topic, partition), partition))
        self._is_assigned = bool(wanted)
        self._placed()
        self._placing.look()

    async def unsubscribed(self) -> None:
        """The end of a subscription or an assignment, after `leaving` and its callback; only the goodbye takes time."""
        self._forget(list(self.positions.held))
        self._is_subscribed = self._commits.is_subscribed = self._is_assigned = self._is_rebalanced = False
        self._target = self._fatal = self._last = self._reason = None
        self._is_leaving = False
        self._lost.clear()
        if self._membership is not None and self._membership.is_running:
            await self._say_goodbye(self._membership, _GOODBYE_MS)

    def _forget(self, partitions: Sequence[PartitionId]) -> None:
        self._reader.remove(*partitions)
        self.positions.remove(partitions)
        self._purge(partitions)

    def _purge(self, partitions: Iterable[PartitionId]) -> None:
        """What was handed over and may not have arrived holds nothing of these any more."""
        gone = set(partitions)
        if self._last is not None and self._last.pieces:
            kept = [piece for piece in self._last.pieces if piece.partition not in gone]
            self._last = Handover(self._last.number, kept) if kept else None

    # ---- Membership

    def told(self, assignment: Assignment) -> None:
        self._target = assignment
        self._reason = None
        self._is_rebalanced = True
        self.rebalances += 1
        self._adopt()
        self._notice()

    def _adopt(self) -> None:
        """Take over what is new; what has to go waits for the user."""
        assert self._target is not None and self._membership is not None, "told by the membership"  # noqa: PT018
        for partition, name in self._target.items():
            # What has no name is gone, and about to be taken away again.
            if name and partition not in self.positions and partition not in self._lost:
                self.positions.add(Held(topic_of(name, partition), partition, is_announced=not self._announces))
        self._membership.report({held.partition: held.topic.name for held in self.positions})
        self._placing.look()

    def lost(self, error: TidelogError) -> None:
        self._reason = error
        self._target = None
        self._is_rebalanced = False
        self._reader.remove(*self.positions.held)
        gone = self.positions.remove(list(self.positions.held))
        # What the user has not heard of is not lost to him either; what he is giving up he has heard of already.
        self._lost.update({held.partition: held.name for held in gone if held.is_announced})
        self._purge(self._lost)
        self._notice()

    def failed(self, error: TidelogError) -> None:
        self._fatal = error
        self._notice()

    def _attend(self) -> None:
        self._hand.attention = True

    def _notice(self) -> None:
        self._signal.set()
        self._attend()

    def _identity(self) -> Identity:
        if self._is_subscribed:
            assert self._membership is not None, "a subscription has one"
            return self._membership
        return Nobody()

    def _placed(self) -> None:
        """Positions were found: read whatever can be read now."""
        ready = [
            held
            for held in (() if self._is_leaving else self.positions)
            if held.offset >= 0 and held.is_announced and not held.is_read and held.error is None
        ]
        self._reader.add_all((held.topic, held.partition, held.offset, held.epoch) for held in ready)
        for held in ready:
            held.is_read = True
            if held.is_paused:
                self._reader.pause(held.partition)
        self._signal.set()

    # ---- The user comes by

    async def visited(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A call of the user, who is not away while it takes."""
        self._upkeep.presence.came(self._now_s())
        try:
            return await call()
        finally:
            self._upkeep.presence.went(self._now_s())

    def came_back(self, marks: Marks) -> None:
        """A sign of life, with what was given out: all of it is done, since more is asked for."""
        self.positions.note(marks)
        self.positions.came_back()
        self._upkeep.presence.polled(self._now_s())

    async def poll(
        self, timeout_ms: float, marks: Marks, *, received: int = 0, bytes_max: int = HANDOVER_BYTES
    ) -> Handover:
        """Data, a change, or after `timeout_ms` neither. Raises `WakeupError`, what is wrong with the membership, and
        what stops a partition: again at each call until it is sought elsewhere."""
        self._check_open()
        self.came_back(marks)
        # Behind one that was cancelled and has not ended yet: its caller, on another loop, does not wait for that.
        async with self._polling:
            if self._last is not None and self._last.number != received:
                return self._last
            self._last = None
            if not self._is_subscribed and not self._is_assigned:
                raise SubscriptionError("nothing to read: subscribe or assign first")
            self.polls += 1
            return await self._poll(self._now_s() + timeout_ms / 1000, bytes_max)

    async def _poll(self, end_s: float, bytes_max: int) -> Handover:
        while True:
            self._check_open()  # another task may have closed it
            # Each time: who was put out while it held nothing has nothing to tell its user, and joins again here.
            self._begin()
            self._signal.clear()
            self._raise_if_woken()
            if (rebalance := await self._rebalance()) is not None:
                return self._handed(rebalance=rebalance)
            if self._fatal is not None:
                raise self._fatal
            self._look_at_errors()
            if pieces := self._reader.take(bytes_max):
                return self._handed(pieces)
            for held in self.positions:
                if held.error is not None:
                    raise held.error
            left_s = end_s - self._now_s()
            if left_s <= 0:
                return self._handed()
            try:
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self._signal.wait()
            except TimeoutError:
                continue

    def _begin(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self._tasks.spawn(self._upkeep.run())
        if self._is_subscribed and not self._lost and self._fatal is None:
            assert self._membership is not None, "a subscription has one"
            self._membership.start()

    def _handed(self, pieces: Sequence[Any] = (), rebalance: Rebalance | None = None) -> Handover:
        self._numbers += 1
        handed = Handover(self._numbers, pieces, rebalance)
        if pieces or rebalance is not None:
            self._last = handed
        return handed

    def _look_at_errors(self) -> None:
        while (found := self._reader.failed_place()) is not None:
            partition, error = found
            held = self.positions.held[partition]
            if isinstance(error, PositionError):
                self._reader.remove(partition)
                held.is_read = False
                self._placing.reset(held, str(error))
            elif isinstance(error, UnknownTopicIdError) and self._is_subscribed:
                # The coordinator hears of it as well, and takes it away.
                LOGGER.warning("group=%s partition=%s is gone: %s", self.options.group, held.name, error)
            else:
                held.error = error
                raise error

    async def next_change(self, marks: Marks, *, received: int = 0) -> Handover | None:
        """What `attention` was about, without waiting for anything else; or what has not arrived, as in `poll`."""
        self._check_open()
        self.came_back(marks)
        self._raise_if_woken()
        async with self._polling:
            if self._last is not None and self._last.number != received:
                return self._last
            rebalance = await self._rebalance()
            return None if rebalance is None else self._handed(rebalance=rebalance)

    async def _rebalance(self) -> Rebalance | None:
        """The next change that the user's side has to carry out."""
        if self._lost:
            return Rebalance(Change.LOST, tuple(self._lost), tuple(self._lost.values()))
        target = self._target
        if target is None:
            return None
        going = [held for held in self.positions if held.partition not in target]
        if unheard := [held.partition for held in going if not held.is_announced]:
            # Taken away again before the user was told of them: his callbacks hear nothing of them.
            self._forget(unheard)
            self._adopt()
            return await self._rebalance()
        if going:
            places = tuple(held.partition for held in going)
            await self._commits.before_giving_up(places, timeout_ms=self.options.max_poll_interval_ms)
            if self._lost or self._target is not target:
                return await self._rebalance()
            # From here to the handover nothing waits: who is not told has lost nothing.
            self._reader.remove(*places)
            for held in going:
                held.is_read = held.is_announced = False
            return change_of(Change.REVOKED, going)
        if self._is_rebalanced:
            self._is_rebalanced = False
            fresh = [held for held in self.positions if not held.is_announced]
            if self._announces:
                return change_of(Change.ASSIGNED, fresh)
            for held in fresh:
                held.is_announced = True
            self._placed()
        return None

    def finished(self, rebalance: Rebalance) -> None:
        """The user's side has carried out a change. It says so again if it did not hear that it was heard."""
        if self._last is None or self._last.rebalance is not rebalance:
            return
        self._last = None
        if rebalance.change is Change.ASSIGNED:
            for partition, name in zip(rebalance.partitions, rebalance.names, strict=True):
                held = self.positions.held.get(partition)
                if held is not None:
                    held.is_announced = True
                else:
                    self._lost[partition] = name  # while its callback ran
            self._placed()
            return
        for partition in rebalance.partitions:
            self._lost.pop(partition, None)
        if rebalance.change is Change.REVOKED:
            self._forget(rebalance.partitions)
            if self._target is not None:
                self._adopt()
        elif not self._lost:
            self._begin()

    def wakeup(self) -> None:
        """The user, in `poll` or when he comes next, gets a `WakeupError`."""
        self._is_woken = True
        self._notice()

    def _raise_if_woken(self) -> None:
        if self._is_woken:
            self._is_woken = False
            raise WakeupError("woken by wakeup()")

    # ---- Signs of life

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _task_failed(self, error: BaseException) -> None:
        LOGGER.error("a task of the consumer failed", exc_info=error)
        self.failed(error if isinstance(error, TidelogError) else TidelogError(f"the consumer failed: {error!r}"))

    def _is_member(self) -> bool:
        return self._is_subscribed and self._membership is not None and self._membership.is_member

    async def _leave_for_polling(self, why: str) -> None:
        assert self._membership is not None, "only members leave"
        LOGGER.warning("group=%s member=%s %s", self.options.group, self._membership.member_id, why)
        self.left_for_polling += 1
        self.lost(CommitFailedError(why))
        await self._membership.leave()

    # ---- Commits

    async def commit(self, marks: Marks, offsets: Offsets | None = None, *, timeout_ms: int | None = None) -> None:
        """All that was given out, or these. Raises `CommitFailedError` if others have the partitions now."""
        self._check_may_commit(marks)
        await self._commits.commit(offsets, timeout_ms=timeout_ms)

    async def commit_once(self, marks: Marks, offsets: Offsets | None, told: Told | None) -> None:
        """The same without waiting: one attempt, in order with all others."""
        self._check_may_commit(marks)
        await self._commits.commit_once(offsets, told)

    def hear_commits(self, hearers: Sequence[Callable[[dict[TopicPartition, OffsetAndMetadata]], object]]) -> None:
        """Who is told of everything that is committed, on the user's side."""
        self._commits.hearers = tuple(hearers)

    def _check_may_commit(self, marks: Marks) -> None:
        self._check_open()
        self.positions.note(marks)
        if self._is_subscribed and not self._is_member() and self._reason is not None:
            raise CommitFailedError(f"this consumer is no member of '{self.options.group}' now: {self._reason}")

    # ---- Positions

    def held(self, name: TopicPartition) -> Held:
        held = self.positions.named(TopicPartition(*name))
        if held is None:
            raise SubscriptionError(f"{TopicPartition(*name)} is not assigned to this consumer")
        return held

    async def position(self, name: TopicPartition, marks: Marks) -> int:
        """The next offset to be given out; waits until it is known."""
        self._check_open()
        self.positions.note(marks)
        held = self.held(name)
        end_s = self._now_s() + self.options.default_api_timeout_ms / 1000
        while held.offset < 0:
            if held.error is not None:
                raise held.error
            if self._now_s() >= end_s:
                raise CallTimeoutError(f"the position of {held.name} is not known yet")
            self._placing.look()
            await asyncio.sleep(0.01)
        return held.offset

    def seek(self, name: TopicPartition, offset: int, *, epoch: int = -1) -> None:
        """The next record to be given out; an offset outside of the log is noticed by `poll`. The user's side has
        dropped what it had of it."""
        self._check_open()
        if offset < 0:
            raise InvalidRequestError(f"{TopicPartition(*name)}: there is no offset {offset}")
        self._place(self.held(name), offset, epoch)

    def _place(self, held: Held, offset: int, epoch: int = -1) -> None:
        held.place(offset, epoch=epoch)
        self._purge([held.partition])
        if held.is_read:
            self._reader.seek(held.partition, offset, epoch=epoch)
        self._placed()

    async def seek_to(self, names: Iterable[TopicPartition], where: str | int) -> None:
        """To "earliest", "latest", or the first record at or after a time in ms (the end, if there is none)."""
        self._check_open()
        chosen = [self.held(name) for name in names]
        for held, row in (await self._placing.find(chosen, where)).items():
            if row.error is not None:
                raise row.error
            if held.partition in self.positions:
                self._place(held, row.offset)

    def rewind(self, partitions: Iterable[PartitionId], marks: Marks) -> None:
        """A call about these was cut short, and both sides may differ about them: the user's drops what it has, and
        goes on behind what it has given out, or where the call has brought it."""
        self._check_open()
        self.positions.note(marks)
        for held in [self.positions.held[one] for one in partitions if one in self.positions]:
            self._purge([held.partition])
            if held.is_read:
                self._reader.seek(held.partition, held.offset, epoch=held.epoch)

    def pause(self, names: Iterable[TopicPartition], marks: Marks) -> None:
        """The user's side has dropped what it had of them: it is fetched again after `resume`."""
        self._check_open()
        self.positions.note(marks)
        for held in [self.held(name) for name in names]:
            if not held.is_paused:
                held.is_paused = True
                self._purge([held.partition])
                if held.is_read:
                    self._reader.seek(held.partition, held.offset, epoch=held.epoch)
                    self._reader.pause(held.partition)

    def resume(self, names: Iterable[TopicPartition]) -> None:
        self._check_open()
        for held in [self.held(name) for name in names]:
            if held.is_paused:
                held.is_paused = False
                if held.is_read:
                    self._reader.resume(held.partition)

    # ---- Questions

    async def committed(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self._check_open()
        return await self._commits.committed(names)

    def assignment(self) -> set[TopicPartition]:
        return {held.name for held in self.positions}

    def paused(self) -> set[TopicPartition]:
        return {held.name for held in self.positions if held.is_paused}

    def group_metadata(self) -> GroupMetadata:
        if self.options.group is None:
            raise InvalidRequestError("this consumer has no group")
        me = self._identity()
        return GroupMetadata(self.options.group, me.member_id, max(-1, me.member_epoch), me.instance_id)

    def metrics(self) -> dict[str, float]:
        return {
            "polls": self.polls,
            "rebalances": self.rebalances,
            "left_for_polling": self.left_for_polling,
            **figures_of(self.positions, self._reader, self._offsets, self._membership),
        }

    # ---- The end

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerClosedError("this consumer was closed")

    async def leaving(self, marks: Marks, *, is_done: bool, timeout_ms: int) -> Rebalance | None:
        """Before `close` and `unsubscribed`: commits what is due, and tells what the callback has to hear of.
        `is_done`: all that was given out is processed."""
        self.positions.note(marks)
        if is_done:
            self.positions.came_back()
        else:
            self._upkeep.look_at_hand()
        if self._lost:
            return Rebalance(Change.LOST, tuple(self._lost), tuple(self._lost.values()))
        if not self.positions.held or (self._is_subscribed and not self._is_member()):
            return None
        self._is_leaving = True
        self._reader.remove(*self.positions.held)
        heard = [held for held in self.positions if held.is_announced]
        for held in self.positions:
            held.is_read = False
        await self._commits.before_giving_up(tuple(self.positions.held), timeout_ms=timeout_ms)
        if not self._is_subscribed or not heard:
            return None
        return change_of(Change.REVOKED, heard)

    def stay(self, *, is_told: bool) -> None:
        """`leaving` did not lead to an end: what is held is read on. `is_told`: the callback has heard that it is given
        up, so it hears that it is assigned, too."""
        self._check_open()
        self._is_leaving = False
        if is_told and self._is_subscribed:
            for held in self.positions:
                held.is_announced = False
            self._is_rebalanced = True
        self._placed()

    async def close(self, *, timeout_ms: int) -> None:
        """Leaves the group; what cannot be said in time is left to the session."""
        self._is_closed = True
        self._notice()
        await self._ending.run(lambda: self._close(timeout_ms))

    async def _close(self, timeout_ms: int) -> None:
        try:
            if self._membership is not None:
                await self._say_goodbye(self._membership, max(1, min(timeout_ms, _GOODBYE_MS)))
        finally:
            await self._tasks.end()
            await self._placing.close()
            if self._offsets is not None:
                await self._offsets.close()
            await self._reader.close()
            await self.cluster.close()

    async def _say_goodbye(self, membership: Membership, timeout_ms: int) -> None:
        """After the commits that are under way, which would be refused behind it; they take half of the time."""
        end_s = self._now_s() + timeout_ms / 1000
        if self._offsets is not None:
            await self._offsets.settled(timeout_ms=timeout_ms // 2)
        await membership.leave(timeout_ms=max(1, int((end_s - self._now_s()) * 1000)))
