"""One partition of a coordinator's topic, while this broker leads it in one leader epoch; of all kinds of coordinators.

    led --> loading --> leading --> over               a new epoch has a new shard: nothing is carried over
               |
               '--> broken                             the log has records that this version cannot read

While it loads, requests get COORDINATOR_LOAD_IN_PROGRESS. While it leads, decisions are appended to the partition
(`raft.runtime` over `partition_log`); replies rest only on state below the high watermark. When the epoch is over,
speculative state is dropped and waiting requests fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Hashable, Sequence
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tidelog.coordinator.loading import LogFormat, Progress, load, wait_until_confirmed
from tidelog.coordinator.partition_log import PartitionLog
from tidelog.coordinator.records import DECISION_BYTES_MAX
from tidelog.coordinator.timers import Timers
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    LeaderNotAvailableError,
    NotEnoughReplicasError,
    NotLeaderError,
    NotLeaderOrFollowerError,
    StorageError,
    TidelogError,
)
from tidelog.model.group_errors import CoordinatorLoadingError, CoordinatorNotAvailableError, NotCoordinatorError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.runtime import DecisionMachine, StateMachineRuntime
from tidelog.replication.leader_replica import LeaderReplica

LOGGER = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

RETRY_S = 0.5


class Phase(Enum):
    LOADING = "loading"
    LEADING = "leading"
    BROKEN = "broken"
    OVER = "over"


class PartitionHost(Protocol):
    """A broker's coordinator (`PartitionCoordinator`), as all shards use it."""

    me: NodeId
    timers: Timers
    waiting_max: int
    load_slots: asyncio.Semaphore

    def now_ms(self) -> int:
        """Return wall clock time, stored with records."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]: ...

    def failed(self, error: BaseException) -> None: ...

    def report_corruption(self, leader: LeaderReplica, offset: int) -> None: ...

    def loaded(self, shard: Any, seconds: float, records: int) -> None: ...


async def coordinator_errors(shard: PartitionShard[Any], work: Awaitable[T]) -> T:
    """Await the work; translate errors of the log (NOT_LEADER...) to those of a coordinator (NOT_COORDINATOR...)."""
    try:
        return await work
    except (NotLeaderError, NotLeaderOrFollowerError) as error:
        raise NotCoordinatorError(str(error), coordinator=shard.leader.replica.partition.leader) from error
    except (NotEnoughReplicasError, LeaderNotAvailableError, StorageError) as error:
        raise CoordinatorNotAvailableError(str(error)) from error


class SizedDecision(Protocol):
    @property
    def size(self) -> int: ...


def _weigh(decisions: Sequence[SizedDecision]) -> int:
    return sum(decision.size for decision in decisions)


class PartitionShard(Generic[S]):
    """See the module. Created when the leader epoch begins; `end` when it is over. A kind of shard has these hooks:

    _prepare          the state is loaded; may take its turns; nothing is decided yet
    _begin            the shard leads
    _state_changed    a decision has committed
    _due              a deadline has passed
    _close            the shard is over
    """

    CONTENTS: ClassVar[str]
    """What a partition holds, in messages."""
    SUBJECT: ClassVar[str]
    """One of them."""

    def __init__(
        self, host: PartitionHost, leader: LeaderReplica, machine: DecisionMachine[S], log_format: LogFormat[S, Any]
    ) -> None:
        self.leader = leader
        self.number = leader.replica.partition_id.partition
        self.phase = Phase.LOADING
        self._partition_host = host
        self._format = log_format
        self._load_error = ""
        self._log = PartitionLog(leader, self._committed)
        self.runtime: StateMachineRuntime[S] = StateMachineRuntime(
            machine,
            self._log,
            log_format.empty,
            waiting_max=host.waiting_max,
            gather_max=DECISION_BYTES_MAX,
            weigh=_weigh,
            on_failure=host.failed,
        )
        self.timers = host.timers.new_set(self._due)
        self._loading: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loading = self._partition_host.spawn(self._load(), name=f"load-{self.CONTENTS}-{self.number}")

    @property
    def size(self) -> int:
        """How many subjects the committed state has."""
        raise NotImplementedError

    @property
    def is_leading(self) -> bool:
        return self.phase is Phase.LEADING

    @property
    def state(self) -> S:
        """The committed state."""
        return self.runtime.state

    # Hooks.

    async def _prepare(self, state: S) -> None: ...

    async def _begin(self, state: S) -> None: ...

    def _state_changed(self, before: S, after: S) -> None: ...

    def _due(self, key: Hashable) -> None: ...

    def _close(self, error: NotCoordinatorError) -> None: ...

    # Lifecycle.

    async def _load(self) -> None:
        host, loop = self._partition_host, asyncio.get_running_loop()
        try:
            # Without a load slot: this waits as long as too few replicas are in sync.
            await wait_until_confirmed(self.leader)
            began_s = loop.time()
            state, end, records = await self._read_log()
            self.runtime.load(state, end)
            await self._prepare(state)
        except TidelogError as error:
            if self.phase is Phase.LOADING:
                self.phase, self._load_error = Phase.BROKEN, str(error)
                LOGGER.error("broker=%d %s of partition %d: %s", host.me, self.CONTENTS, self.number, error)
            return
        if self.phase is not Phase.LOADING:
            return
        self.runtime.lead(Epoch(self.leader.leader_epoch), host.me)
        self.phase = Phase.LEADING
        host.loaded(self, loop.time() - began_s, records)
        await self._begin(state)

    async def _read_log(self) -> tuple[S, Offset, int]:
        """Return (state, log end, number of records); retry transient errors."""
        host = self._partition_host
        while True:
            progress = Progress()
            try:
                # The retry delay is outside of the load slot: other partitions load meanwhile.
                async with host.load_slots:
                    return *await load(self.leader, progress, self._format), progress.records
            except CorruptStateError:
                raise
            except TidelogError as error:
                if self.phase is not Phase.LOADING:
                    raise
                if isinstance(error, CorruptBatchError | DamagedLogError):
                    host.report_corruption(self.leader, self.leader.log.start_offset)
                LOGGER.warning("broker=%d %s of partition %d, retry: %s", host.me, self.CONTENTS, self.number, error)
                await asyncio.sleep(RETRY_S)

    def end(self) -> None:
        """End the shard: its leader epoch is over."""
        self.phase = Phase.OVER
        leader = self.leader.replica.partition.leader
        self.runtime.follow(NodeId(leader) if leader >= 0 else None)
        # Tasks, streams and the parts of this shard form cycles that the garbage collector ignores after a load
        # (`gc.freeze`): they must not keep large objects alive.
        self.runtime.load(self._format.empty, Offset(0))
        self._close(self._not_coordinator())
        self.timers.clear()
        if self._loading is not None:
            self._loading.cancel()

    def _not_coordinator(self) -> NotCoordinatorError:
        leader = self.leader.replica.partition.leader
        who = f"broker {leader} does" if leader >= 0 else "no broker does now"
        return NotCoordinatorError(
            f"broker {self._partition_host.me} does not coordinate the {self.SUBJECT}; {who}", coordinator=leader
        )

    def check(self) -> None:
        """Raise the error for the client if this shard cannot answer."""
        if self.phase is Phase.LOADING:
            raise CoordinatorLoadingError(f"the {self.CONTENTS} of partition {self.number} are being loaded")
        if self.phase is Phase.BROKEN:
            raise CoordinatorNotAvailableError(f"the {self.CONTENTS} of partition {self.number}: {self._load_error}")
        if self.phase is Phase.OVER or not self._log.is_led:
            raise self._not_coordinator()

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants: only a leading shard decides and has deadlines."""
        runtime, is_leading = self.runtime, self.phase is Phase.LEADING
        runtime.validate()
        assert runtime.is_leading or not is_leading, "leads, and may not decide"
        assert is_leading or not runtime.is_leading, f"decides while it is {self.phase.value}"
        assert is_leading or not len(self.timers), f"has deadlines while it is {self.phase.value}"
        assert runtime.applied <= self.leader.log.end_offset or not is_leading, "applied more than its log has"

    async def submit(self, request: object, *, is_own: bool = False) -> Any:
        """Return the reply once everything that it depends on has committed."""
        self.check()
        return await self.runtime.submit(request, is_own=is_own)

    def _committed(self, first: Offset, end: Offset) -> None:
        runtime = self.runtime
        if self.phase is not Phase.LEADING or not runtime.is_mine(first, Epoch(self.leader.leader_epoch)):
            return
        before, after = runtime.state, runtime.pending_state
        assert after is not None, "one entry is in flight at a time"
        runtime.committed(end, after, mine=True)
        self._state_changed(before, after)
