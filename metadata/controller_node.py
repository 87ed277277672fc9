"""A controller node: Raft member, state machine, and the API for brokers and tools.

    call   "metadata"             a request or query (`metadata.requests`); only the active controller responds, others
                                  name it. Queries are linearizable: they see every change that completed before.
    call   "metadata-local"       a query on the state that this controller has applied, active or not
    stream "metadata-heartbeats"  one for each broker, to the active controller: heartbeats, and a reply to the newest
    call   "metadata-levels"      the feature levels that this controller supports; the active controller asks each
                                  member of the quorum before it decides on an `UpdateFeatures`; a member that does not
                                  respond might not support the new level: the update is rejected and names the member
    (out)  "metadata-incarnation" to a broker whose stream broke: its incarnation (`metadata.broker_sessions`)

A frame of the heartbeat stream is `[0, 1, reply]` or `[1, 1, error]`, msgpack; after an error the stream is closed.

The active controller also fences brokers (every `tick_ms`), balances leaders, adds replicas to internal topics, and
writes a NoOp when the log has not moved for `idle_ms` and there are live brokers (`metadata.max.idle.interval.ms`): a
broker that sees new commits knows that its source has a working leader.

Bounds: pending requests (`waiting_max`, then OVERLOADED; the controller's own decisions and heartbeats have a reserve),
one heartbeat of each stream (a newer one replaces a pending one), bytes of a request (`requests.REQUEST_BYTES_MAX`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack

from tidelog.metadata import configs
from tidelog.metadata.broker_sessions import BrokerSessions, FenceNow, ProbeResult
from tidelog.metadata.brokers import Drained, Fence, Heartbeat, HeartbeatReply, Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.features import UpdateFeatures
from tidelog.metadata.image import Broker, ClusterImage
from tidelog.metadata.log_ends import REPORT_WAIT_MS
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partitions import (
    AlterPartition,
    AssignDirectories,
    BalanceLeaders,
    ElectLeaders,
    ElectMissingLeaders,
    ReportLogEnds,
)
from tidelog.metadata.producer_ids import AllocateProducerIdBlock
from tidelog.metadata.reassignments import GrowInternalTopics
from tidelog.metadata.records import DECISION_BYTES_MAX
from tidelog.metadata.recovering_replicas import ReplicasRecovered
from tidelog.metadata.requests import decode_request, encode_reply
from tidelog.metadata.state_machine import Bootstrap, Levels, MetadataStateMachine, WriteNoOp, is_query
from tidelog.metadata.topics import AdvanceLogStart
from tidelog.metadata.voter_changes import VoterChanges
from tidelog.model.admin_errors import FeatureUpdateError
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    CallTimeoutError,
    InvalidRequestError,
    RemoteError,
    StaleBrokerEpochError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
    UnknownOutcomeError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.raft.config import BootState
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.storage import RaftStorage
from tidelog.world.clock import Clock
from tidelog.world.transport import Stream, Transport, encode_error
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

METHOD = "metadata"
LOCAL_METHOD = "metadata-local"
HEARTBEATS = "metadata-heartbeats"
INCARNATION = "metadata-incarnation"

PROBES_MAX = 5
PROBE_WAIT_MS = 20
REPORT_POLL_MS = 100
LEVELS = "metadata-levels"

_OWN = (Fence, BalanceLeaders, ElectMissingLeaders, GrowInternalTopics)
"""Only the controller itself submits these."""
_OF_SENDER = (
    Register,
    AlterPartition,
    AssignDirectories,
    AllocateProducerIdBlock,
    ReplicasLost,
    ReplicasRecovered,
    AdvanceLogStart,
    ReportLogEnds,
)
"""A broker sends these only for itself."""


def encode_beat(answer: object) -> bytes:
    if isinstance(answer, TidelogError):
        return bytes(msgpack.packb([1, 1, encode_error(answer)]))
    return bytes(msgpack.packb([0, 1, encode_reply(answer)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    driver: DriverConfig = field(default_factory=DriverConfig)
    tick_ms: int = 50
    """Interval of session checks; a broker that refuses connections is fenced at the next check."""
    probe_timeout_ms: int = 1_000
    idle_ms: int = 500
    """Write a NoOp after this time without a record; 0: never."""
    grow_every_ms: int = 5_000
    waiting_max: int = 10_000
    decision_bytes_max: int = DECISION_BYTES_MAX
    broker_listener: str = "CONTROLLER"
    """The listener name of a broker's endpoint for probes (its first endpoint, if none has this name)."""


class ControllerNode:
    """Life cycle: `start`, `close`; not reusable."""

    def __init__(
        self,
        storage: RaftStorage,
        boot: BootState,
        transport: Transport,
        controller: Controller,
        config: ControllerConfig,
        random: Random,
        *,
        clock: Clock,
        work: Work,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config = config
        self.machine = MetadataStateMachine(
            storage.me.node,
            controller,
            clock,
            random,
            decision_bytes_max=config.decision_bytes_max,
            waiting_max=config.waiting_max,
            on_role=self._role_changed,
        )
        self.driver = RaftDriver(
            storage.me,
            storage,
            boot,
            transport,
            self.machine,
            config.driver,
            random,
            work=work,
            on_failure=self._failed,
        )
        self.machine.log.attach(self.driver)
        self._transport = transport
        self.voters = VoterChanges(self.driver, transport)
        self._on_failure = on_failure
        self._sessions: BrokerSessions | None = None
        """While this controller is active."""
        self._to_fence: dict[int, FenceNow] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Of the active controller. They end by cancellation or with their work; an error in one stops the node."""
        transport.serve(METHOD, self._serve)
        transport.serve(LOCAL_METHOD, self._serve_local)
        transport.serve(LEVELS, self._serve_levels)
        transport.serve_stream(HEARTBEATS, self._serve_heartbeats)

    # Life cycle.

    async def start(self) -> None:
        await self.driver.start()

    async def close(self, *, step_down_ms: int = 0) -> None:
        """Transfers leadership if there is time, then stops."""
        if step_down_ms and self.driver.failed is None:
            await self.driver.step_down(timeout_ms=step_down_ms)
        tasks = list(self._tasks)
        self._end_active()
        await self.voters.close()
        if tasks:
            await asyncio.wait(tasks)
        await self.driver.close()

    def _failed(self, error: BaseException) -> None:
        self.machine.runtime.follow(None)
        self._end_active()
        if self._on_failure is not None:
            self._on_failure(error)

    @property
    def image(self) -> ClusterImage:
        """The committed and applied state."""
        return self.machine.image

    @property
    def is_active(self) -> bool:
        return self.machine.runtime.is_leading

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.driver.fail(error)

    # Active controller.

    def _role_changed(self, is_active: bool) -> None:
        self._end_active()
        if not is_active:
            return
        now_ms = self._now_ms()
        self.machine.decider.log_ends.clear()
        self._follow_stall_timeout()
        timeout_ms = configs.cluster_int(self.image, "broker.session.timeout.ms")
        self._sessions = BrokerSessions(now_ms, session_timeout_ms=timeout_ms)
        unfenced = self._unfenced()
        self._sessions.begin(now_ms, [(broker.broker, broker.broker_epoch) for broker in unfenced])
        LOGGER.info("controller=%d is active, epoch=%s", self.machine.me, self.machine.runtime.epoch)
        for broker in unfenced:
            self._spawn(self._probe(broker))
        # A former controller may have unfenced a broker without electing leaders for all of its partitions.
        parts = (
            self._watch_sessions(),
            self._balance_leaders(),
            self._grow_internal_topics(),
            self._write_no_ops(),
            self._elect_missing_leaders(),
        )
        for part in parts:
            self._spawn(part)

    def _end_active(self) -> None:
        self._sessions = None
        self._to_fence.clear()
        for task in list(self._tasks):
            task.cancel()

    async def submit(self, request: object) -> Any:
        """Decides as the active controller; raises the rejection, `NotLeaderError`, `UnknownOutcomeError`..."""
        if isinstance(request, UpdateFeatures) and self.is_active:
            self.machine.decider.others = await self._ask_levels()
        if isinstance(request, ElectLeaders) and self.is_active:
            await self._wait_for_log_ends(request)
        # Each broker has one heartbeat at a time, and rejecting one would end its stream: the controller would notice
        # the death of that broker only by its silence.
        reply = await self.machine.runtime.submit(request, is_own=isinstance(request, Heartbeat))
        if (
            isinstance(reply, HeartbeatReply | Drained)
            and reply.has_more
            and not getattr(request, "validate_only", False)
        ):
            finished: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._spawn(self._finish(request, finished))
            return await finished
        return reply

    async def _finish(self, request: object, finished: asyncio.Future[Any]) -> None:
        """Decides the other steps, also if the caller does not wait for them any more."""
        try:
            has_more = True
            while has_more:
                if isinstance(request, Heartbeat):
                    await self._elect_missing_leaders(request.broker)
                reply = await self.machine.runtime.submit(request, is_own=True)
                has_more = reply.has_more
        except TidelogError as error:
            _resolve(finished, error)
        except asyncio.CancelledError:
            _resolve(finished, UnknownOutcomeError("this controller is not active any more: a part may be done"))
            raise
        else:
            _resolve(finished, reply)

    async def _wait_for_log_ends(self, request: ElectLeaders) -> None:
        """An admin's unclean election waits a moment for missing reports: this controller may be new."""
        for _ in range(REPORT_WAIT_MS // REPORT_POLL_MS):
            if not self.machine.decider.lacks_log_ends(self.image, request):
                return
            await asyncio.sleep(REPORT_POLL_MS / 1000)

    async def _elect_missing_leaders(self, broker: int = -1) -> None:
        """Elects all leaders that the rules allow, step by step."""
        done = await self._try(ElectMissingLeaders(broker=broker))
        while done is not None and done.has_more:
            done = await self._try(ElectMissingLeaders(broker=broker))

    async def _ask_levels(self) -> Levels:
        members = self.driver.core.log.membership
        others = sorted({member.node for member in (*members.voters, *members.learners)} - {self.machine.me})
        result: list[tuple[int, tuple[tuple[str, int, int], ...]]] = []
        for node in others:
            try:
                data = await self._transport.call(node, LEVELS, b"?", timeout_ms=self.config.probe_timeout_ms)
                levels = tuple((str(name), int(low), int(high)) for name, low, high in msgpack.unpackb(data))
            except (TransportError, RemoteError, ValueError, TypeError, msgpack.UnpackException) as error:
                raise FeatureUpdateError(f"controller {node} does not report its feature levels: {error}") from error
            result.append((int(node), levels))
        return tuple(result)

    async def _serve_levels(self, _sender: NodeId, _data: bytes) -> bytes:
        return bytes(msgpack.packb(self.machine.decider.own_levels))

    async def ask(self, query: object) -> Any:
        """Answers a query, linearizably. Raises `NotLeaderError`."""
        if not self.is_active:
            raise self.machine.runtime.not_leader()
        await self.driver.wait_applied(await self.driver.read_index())
        return self.machine.decider.answer(self.image, query)

    async def _try(self, request: object) -> Any:
        """Submits a request of the controller's own; a failure is logged, since it is retried later."""
        try:
            return await self.machine.runtime.submit(request, is_own=True)
        except TidelogError as error:
            LOGGER.info("controller=%d %s: %s", self.machine.me, type(request).__name__, error)
            return None

    async def _balance_leaders(self) -> None:
        waited_s = 0
        while True:
            await asyncio.sleep(1)
            waited_s += 1
            # Read each time: a shorter interval does not wait for the end of a longer one.
            if waited_s < configs.cluster_int(self.image, "leader.imbalance.check.interval.seconds"):
                continue
            waited_s = 0
            done = await self._try(BalanceLeaders())
            while done is not None and done.has_more:
                done = await self._try(BalanceLeaders())

    async def _grow_internal_topics(self) -> None:
        while True:
            await asyncio.sleep(self.config.grow_every_ms / 1000)
            await self._try(GrowInternalTopics())

    async def _write_no_ops(self) -> None:
        while not self.image.features:
            await self._try(Bootstrap())
            await asyncio.sleep(self.config.tick_ms / 1000)
        while self.config.idle_ms:
            before = self.machine.offset
            await asyncio.sleep(self.config.idle_ms / 1000)
            if self.machine.offset == before and self.image.live_brokers():
                await self._try(WriteNoOp())

    # Sessions.

    def _unfenced(self) -> list[Broker]:
        return [broker for _, broker in sorted(self.image.brokers.items()) if not broker.fenced]

    async def _watch_sessions(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_ms / 1000)
            sessions = self._sessions
            if sessions is None:
                return
            sessions.session_timeout_ms = configs.cluster_int(self.image, "broker.session.timeout.ms")
            self._follow_stall_timeout()
            now_ms = self._now_ms()
            for entry in sessions.tick(now_ms):
                LOGGER.warning("broker=%d epoch=%d is fenced: %s", entry.broker, entry.broker_epoch, entry.reason)
                self._fence_soon(entry)
            for broker in self._unfenced():
                if broker.is_leaving:
                    # A stopping broker, another controller, or this one began it.
                    self._fence_soon(FenceNow(broker.broker, broker.broker_epoch, "it is leaving"))
                elif broker.broker not in self._to_fence and sessions.expect(
                    now_ms, broker.broker, broker.broker_epoch
                ):
                    self._spawn(self._probe(broker))

    def _follow_stall_timeout(self) -> None:
        """Applies the disk stall timeout of brokers to this Raft member; only leaders use it."""
        limit_ms = configs.broker_config(self.image, "disk.stall.timeout.ms", self.machine.me).value
        assert isinstance(limit_ms, int), "it has a default"
        self.driver.set_disk_stall_timeout_ms(limit_ms)

    def _fence_soon(self, entry: FenceNow) -> None:
        if entry.broker not in self._to_fence:
            self._to_fence[entry.broker] = entry
            self._spawn(self._fence(entry))

    async def _fence(self, entry: FenceNow) -> None:
        """Retries until the broker is fenced, or has another epoch."""
        while self._sessions is not None and self._is_unfenced(entry.broker, entry.broker_epoch):
            if await self._try(Fence(broker=entry.broker, broker_epoch=entry.broker_epoch)) is None:
                await asyncio.sleep(self.config.tick_ms / 1000)
        self._to_fence.pop(entry.broker, None)

    def _is_unfenced(self, broker: int, broker_epoch: int) -> bool:
        registered = self.image.brokers.get(broker)
        return registered is not None and registered.broker_epoch == broker_epoch and not registered.fenced

    async def _probe(self, broker: Broker) -> None:
        """Connects to a broker and reports the outcome to the sessions."""
        answer = await self._ask_incarnation(broker)
        if self._sessions is not None:
            self._sessions.probed(self._now_ms(), broker.broker, broker.broker_epoch, answer)

    def broker_address(self, broker: Broker) -> str:
        """Returns the registered address of a broker for controllers. Endpoints of the quorum are not used: a wrong
        endpoint of a voter must not cut off a broker."""
        named = [(host, port) for name, _, host, port in broker.endpoints if name == self.config.broker_listener]
        host, port = [*named, *((host, port) for _, _, host, port in broker.endpoints)][0]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _ask_incarnation(self, broker: Broker) -> ProbeResult:
        node, incarnation, timeout_ms = NodeId(broker.broker), broker.incarnation, self.config.probe_timeout_ms
        for _ in range(PROBES_MAX):
            try:
                if node == self._transport.me:  # its advertised address may be outside of the machine
                    data = await self._transport.call(node, INCARNATION, b"?", timeout_ms=timeout_ms)
                else:
                    address = self.broker_address(broker)
                    data = await self._transport.call_at(node, address, INCARNATION, b"?", timeout_ms=timeout_ms)
            except UnreachableError as error:
                # No address or no route counts as silence: only a refused connection proves that it is down.
                return ProbeResult.REFUSED if error.is_refused else ProbeResult.SILENT
            except (CallTimeoutError, RemoteError):
                return ProbeResult.SILENT
            except TransportError:
                # A dying old connection: only a new one shows which incarnation runs.
                await asyncio.sleep(PROBE_WAIT_MS / 1000)
            else:
                return ProbeResult.SAME_INCARNATION if data == incarnation.bytes else ProbeResult.OTHER_INCARNATION
        return ProbeResult.SILENT

    # API.

    async def _serve(self, sender: NodeId, data: bytes) -> bytes:
        if not self.is_active:
            raise self.machine.runtime.not_leader()
        request = decode_request(data)
        if isinstance(request, (*_OWN, Heartbeat)):
            raise InvalidRequestError(f"{type(request).__name__} is reserved for the controller itself")
        if isinstance(request, _OF_SENDER) and request.broker != sender:
            raise InvalidRequestError(f"node {sender} sends a request of broker {request.broker}")
        if is_query(request):
            return encode_reply(await self.ask(request))
        return encode_reply(await self.submit(request))

    async def _serve_local(self, _sender: NodeId, data: bytes) -> bytes:
        request = decode_request(data)
        if not is_query(request):
            raise InvalidRequestError(f"{type(request).__name__} is for the active controller")
        return encode_reply(self.machine.decider.answer(self.image, request))

    async def _serve_heartbeats(self, stream: Stream) -> None:
        beats = _HeartbeatStream(self, stream)
        try:
            await beats.run()
        finally:
            beats.ended()

    def heard(self, beat: Heartbeat, sender: NodeId) -> Broker:
        """Notes a heartbeat; raises if it is invalid."""
        if self._sessions is None:
            raise self.machine.runtime.not_leader()
        if beat.broker != sender:
            raise InvalidRequestError(f"node {sender} sends a heartbeat of broker {beat.broker}")
        broker = self.image.brokers.get(beat.broker)
        if broker is None:
            raise BrokerNotRegisteredError(f"broker {beat.broker} is not registered")
        if broker.broker_epoch != beat.broker_epoch:
            raise StaleBrokerEpochError(f"broker {beat.broker} is in epoch {broker.broker_epoch}")
        self._sessions.heard(self._now_ms(), beat.broker, beat.broker_epoch)
        return broker

    def stream_ended(self, broker: Broker) -> None:
        sessions = self._sessions
        if sessions is not None and sessions.stream_broke(self._now_ms(), broker.broker, broker.broker_epoch):
            self._spawn(self._probe(broker))


def _resolve(finished: asyncio.Future[Any], outcome: object) -> None:
    if finished.done():
        if isinstance(outcome, TidelogError):
            LOGGER.warning("a change in several steps is incomplete: %s", outcome)
    elif isinstance(outcome, TidelogError):
        finished.set_exception(outcome)
    else:
        finished.set_result(outcome)


class _HeartbeatStream:
    """One heartbeat stream. A heartbeat counts when it is received, however long the replies take."""

    def __init__(self, node: ControllerNode, stream: Stream) -> None:
        self._node = node
        self._stream = stream
        self._broker: Broker | None = None
        self._newest: Heartbeat | None = None
        self._rejection: TidelogError | None = None
        self._arrived = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read())
            await self._answer()
            reader.cancel()

    def ended(self) -> None:
        """Reports the end at once, not after the commit of a pending reply."""
        if self._broker is not None and not self._has_ended:
            self._has_ended = True
            self._node.stream_ended(self._broker)

    async def _read(self) -> None:
        try:
            while True:
                beat = decode_request(await self._stream.receive())
                if not isinstance(beat, Heartbeat):
                    raise InvalidRequestError("this stream carries only heartbeats")
                self._broker = self._node.heard(beat, self._stream.peer)
                self._newest = beat
                self._arrived.set()
        except TidelogError as error:
            if isinstance(error, StreamBrokenError | StreamClosedError):
                self.ended()
            self._rejection = error
            self._arrived.set()

    async def _answer(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if isinstance(self._rejection, StreamBrokenError | StreamClosedError):
                return
            answer: object = self._rejection
            if answer is None:
                assert self._newest is not None, "a heartbeat has arrived"
                try:
                    answer = await self._node.submit(self._newest)
                except TidelogError as error:
                    answer = error
            try:
                await self._stream.send(encode_beat(answer))
            except StreamBrokenError:
                return
            if isinstance(answer, TidelogError):
                return
