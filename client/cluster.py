"""`ClusterClient`: finds the cluster, keeps its metadata, and routes requests.

A request to any node (metadata, admin) goes to the address that answered last, then to the other bootstrap addresses,
then to the known brokers. A request for partitions goes to their leaders (`ask_leaders`).

    answer                                           what happens
    the response                                     done
    UnreachableError                                 the next address; nobody at all: NoClusterError, after
                                                     `bootstrap_wait_ms` while no cluster was ever met (at once if every
                                                     address is a port of another API), else when time is up
    TransportError (it may have been carried out)    the next address if the request may be repeated, else raised;
                                                     no answer within its share of the time is one
    an error of the catalogue, not retriable         raised
    one that is retriable                            a pause, and again, if the request may be repeated; else raised
    NOT_LEADER, unknown or fenced epoch, UNKNOWN_*   (of one partition) the answer's hint, or fresh metadata; again

One metadata refresh runs at a time; it covers all topics that were requested before.

A producer creates a topic by its first look-up, where the cluster allows that (`topic(may_create=True)`). A name that
this client has known is never created again: that would undo its deletion. A refresh creates nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from google.protobuf.message import Message

from tidelog.client.config import Backoff, ClientConfig
from tidelog.client.connections import Connections, Exchange, call_in_parts
from tidelog.client.errors import (
    AdvertisedAddressError,
    NoClusterError,
    UnknownTopicError,
    WrongApiError,
    as_read_error,
)
from tidelog.client.metadata import ClusterView, LeaderInfo, TopicInfo
from tidelog.client.outage_log import OutageLog
from tidelog.client.remote_errors import with_class
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequestError,
    LeaderNotAvailableError,
    OverloadedError,
    RemoteError,
    TidelogError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.errors import as_exception
from tidelog.rpc.grpc.methods import Method, method_named
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.world.clock import Clock

_METADATA = method_named("Cluster", "Metadata")
NOTHING_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED})
"""Errors of requests that were not started: even a change may be sent again."""

SLACK_MS = 500
"""A node gives up this much earlier than the client, so that its own error arrives in time."""
_HINT_S = 60.0
_CLUSTER = "cluster"
"""Outage key for all known addresses."""


class ClusterClient:
    """Used on one event loop. `close` ends its connections."""

    def __init__(
        self,
        bootstrap: Sequence[str],
        connections: Connections,
        *,
        random: Random,
        clock: Clock,
        config: ClientConfig | None = None,
    ) -> None:
        assert bootstrap, "at least one bootstrap address"
        self.bootstrap = tuple(bootstrap)
        self.connections = connections
        self.random = random
        self.clock = clock
        self.config = config or ClientConfig()
        self.view = ClusterView()
        self.stale_ms: int | None = None
        """Age of the last metadata, if the node that sent it has no contact to an active controller."""
        self.last_error: TidelogError | None = None
        """Why the last attempt of `call` failed; None once a node has answered."""
        self._age_read_s = float("-inf")
        self._answered = ""  # the address that answered last
        self._names: dict[str, None] = {}
        self._seen_topics: set[str] = set()  # topics that were known once; full, nothing is created any more
        self._refreshing: asyncio.Task[None] | None = None
        self._asked: frozenset[str] = frozenset()
        self._read_s = float("-inf")
        self._outages = OutageLog()

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await self.connections.close()

    def backoff(self) -> Backoff:
        return Backoff(self.config, self.random)

    @property
    def answered(self) -> str:
        """The bootstrap or broker address that answered last; empty before the first answer."""
        return self._answered

    # Anywhere.

    def _addresses(self) -> list[str]:
        brokers = [broker.address for _, broker in sorted(self.view.brokers.items())]
        first = [self._answered] if self._answered else []
        return list(dict.fromkeys([*first, *self.bootstrap, *brokers]))

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout_ms: int | None = None,
        attempt_ms: int | None = None,
        is_repeatable: bool = True,
        sets_timeout: bool = False,
    ) -> Any:
        """The response of any node. `is_repeatable=False` for a change that must not be made twice: an attempt with an
        unknown outcome is raised then, not repeated. `sets_timeout`: the request's `timeout_ms` becomes a little less
        than that of each attempt, so that the node's own error arrives in time.
        When time is up, it raises the error that says most: of a node that answered, then of one that was reached."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        end_s = start_s + (timeout_ms or self.config.request_timeout_ms) / 1000
        backoff = self.backoff()
        failure: TidelogError | None = None
        while True:
            reasons: list[str] = []
            wrong_apis = 0
            last: TidelogError | None = None
            addresses = self._addresses()
            for number, address in enumerate(addresses):
                left_ms = int((end_s - loop.time()) * 1000)
                if left_ms <= 0:
                    break
                # A silent node takes its share of the time and no more, so that the others are asked, too.
                share_ms = max(1, left_ms // (len(addresses) - number)) if is_repeatable else left_ms
                limit_ms = min(share_ms, attempt_ms or share_ms)
                if sets_timeout:
                    request.timeout_ms = server_timeout_ms(limit_ms)  # type: ignore[attr-defined]
                try:
                    answer = await self.call_at(address, method, request, timeout_ms=limit_ms)
                except UnreachableError as error:
                    self.last_error = error
                    reasons.append(str(error).removeprefix(f"{address}: "))
                    wrong_apis += isinstance(error, WrongApiError)
                    last = last or error  # an error of a node that was reached says more
                    continue
                except TransportError as error:
                    if not is_repeatable:
                        raise
                    last = self.last_error = error
                    continue
                except (RemoteError, OverloadedError) as error:  # of the node, or of gRPC itself
                    if not error.retriable or not (is_repeatable or error.code in NOTHING_DONE):
                        raise
                    last = self.last_error = error
                    break
                self._note_response(address)
                return answer
            pause_s = backoff.next_s()
            if len(reasons) == len(addresses):
                self._note_outage(addresses, reasons, loop.time() - start_s, wrong_apis)
            failure = _more_telling(failure, last)
            if loop.time() + pause_s >= end_s:
                raise _gave_up(failure, addresses, reasons, loop.time() - start_s, is_read=is_repeatable)
            await asyncio.sleep(pause_s)

    def _note_response(self, address: str) -> None:
        self._answered = address
        self.last_error = None
        self._outages.answered(address, key=_CLUSTER)

    def _note_outage(self, addresses: list[str], reasons: list[str], waited_s: float, wrong_apis: int) -> None:
        """No node is reachable. Raises NoClusterError if none ever was and more waiting does not help."""
        has_waited = waited_s >= self.config.bootstrap_wait_ms / 1000 or wrong_apis == len(addresses)
        if not self._answered and has_waited:
            raise NoClusterError(addresses, reasons)
        self._outages.failed(", ".join(addresses), "; ".join(dict.fromkeys(reasons)), key=_CLUSTER)

    async def call_at(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        """One attempt. An error of the node has the class of its code."""
        try:
            return await self.connections.call(address, method, request, timeout_ms=timeout_ms)
        except RemoteError as error:
            raise with_class(error) from None

    async def open(self, method: Method, request: Message | None = None) -> Exchange:
        """A stream to the address that answered last; call `refresh` first."""
        return await self.connections.open(self._answered or self.bootstrap[0], method, request)

    # Metadata.

    async def refresh(self, *names: str) -> None:
        """Refresh the metadata of these topics and of all requested before. Raises as `call` does."""
        missing = [name for name in names if name not in self._names]
        if len(self._names) + len(missing) > self.config.topics_max:
            raise InvalidRequestError(f"more than {self.config.topics_max} topics in one client")
        self._names.update(dict.fromkeys(missing))
        while self._refreshing is not None and not self._asked.issuperset(names):
            await asyncio.wait([self._refreshing])
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(_retrieve_error)
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            backoff = self.backoff()
            for _ in range(5):
                self._asked = frozenset(self._names)
                request = pb.MetadataRequest(topics=list(self._names), listener=self.config.listener)
                answer = await self.call(_METADATA, request, attempt_ms=self.config.attempt_timeout_ms)
                self.note_age(answer)
                if self.view.take(answer):
                    self._forget_unknown(answer)
                    break
                # This node lags behind; another one may not.
                self.ask_another()
                await asyncio.sleep(backoff.next_s())
            self._read_s = asyncio.get_running_loop().time()
        finally:
            self._refreshing = None

    def _forget_unknown(self, answer: pb.MetadataResponse) -> None:
        """Drop topics that do not exist from later refreshes."""
        for topic in answer.topics:
            error = error_in(topic)
            if error is not None and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self._names.pop(topic.name, None)

    def ask_another(self) -> None:
        """Send the next request for any node to another one first: a broker that is cut off has old metadata."""
        brokers = [broker.address for _, broker in sorted(self.view.brokers.items())]
        addresses = list(dict.fromkeys([*self.bootstrap, *brokers]))
        if self._answered in addresses:
            self._answered = addresses[(addresses.index(self._answered) + 1) % len(addresses)]

    async def refresh_quietly(self, *names: str) -> TidelogError | None:
        """As `refresh`, but returns the error: for callers that retry anyway."""
        try:
            await self.refresh(*names)
        except TidelogError as error:
            return error
        return None

    def _is_old(self) -> bool:
        return asyncio.get_running_loop().time() - self._read_s > self.config.metadata_max_age_ms / 1000

    def _known(self, name: str) -> TopicInfo | None:
        found = self.view.topics.get(name)
        if found is not None and len(self._seen_topics) < self.config.topics_max:
            self._seen_topics.add(name)
        return found

    async def topic(self, name: str, *, may_create: bool = False) -> TopicInfo:
        """Raises `UnknownTopicError` if the topic does not exist, also after a short wait. `may_create`: create it if
        this client has not known it before and the cluster allows it. Raises the error of a creation that is rejected,
        LEADER_NOT_AVAILABLE if the topic does not appear in time, and TOPIC_AUTHORIZATION_FAILED if this client may not
        describe it."""
        topic = self._known(name)
        if topic is not None and not self._is_old():
            return topic
        is_creating = may_create and name not in self._seen_topics and len(self._seen_topics) < self.config.topics_max
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        end_s = start_s + self.config.unknown_topic_wait_ms / 1000
        backoff = self.backoff()
        error: TidelogError = UnknownTopicError(name)
        while True:
            await self.refresh(name)
            if name in self.view.denials:
                self._names.pop(name, None)
                raise RemoteError(self.view.denials.pop(name), code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            if is_creating and self._known(name) is None:
                refusal = await self._create(name)
                is_creating = refusal is not None
                error = refusal or UnknownTopicError(name)
                if is_creating:
                    end_s = start_s + self.config.request_timeout_ms / 1000
            topic = self._known(name)
            if topic is not None:
                return topic
            pause_s = backoff.next_s()
            if loop.time() + pause_s >= end_s:
                self._names.pop(name, None)
                raise error
            await asyncio.sleep(pause_s)

    async def _create(self, name: str) -> TidelogError | None:
        """Request a topic that may be created. Returns an error if it is not there yet; None if it exists, or if the
        cluster creates no topics. Raises a rejection."""
        request = pb.MetadataRequest(topics=[name], listener=self.config.listener, may_create=True)
        answer = await self.call(_METADATA, request, attempt_ms=self.config.attempt_timeout_ms)
        (row,) = answer.topics
        error = error_in(row)
        if error is None:
            self.view.take(answer)
        elif error.code is ErrorCode.LEADER_NOT_AVAILABLE:
            return error
        elif error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            self._names.pop(name, None)
            raise error
        return None

    async def all_topics(self) -> list[TopicInfo]:
        """All topics by name, with their leaders. Raises as `call` does, and CallTimeoutError if every node lags
        behind the known metadata."""
        request = pb.MetadataRequest(all_topics=True, listener=self.config.listener)
        backoff = self.backoff()
        for _ in range(5):
            answer = await self.call(_METADATA, request, attempt_ms=self.config.attempt_timeout_ms)
            if self.view.take(answer):
                break
            self.ask_another()
            await asyncio.sleep(backoff.next_s())
        else:
            raise CallTimeoutError("metadata: every broker that answered lags behind the known metadata")
        self.note_age(answer)
        known = [self.view.topics.get(topic.name) for topic in answer.topics]
        return sorted((topic for topic in known if topic is not None), key=lambda topic: topic.name)

    def note_age(self, answer: Any) -> None:
        """Take `stale_ms` from the response of any node."""
        self.stale_ms = answer.stale_ms if answer.HasField("stale_ms") else None
        self._age_read_s = asyncio.get_running_loop().time()

    def controller_hint(self) -> str:
        """The end of an error message: that no active controller is known to answer, if a node said so lately."""
        age_s = asyncio.get_running_loop().time() - self._age_read_s
        is_stale = self.stale_ms is not None and age_s < _HINT_S
        return f"; {self._answered} has no contact with an active controller" if is_stale else ""

    def reason_text(self) -> str:
        """The end of an error message about a timeout: why the last attempt failed, as far as that is known."""
        return ("" if self.last_error is None else f": {self.last_error}") + self.controller_hint()

    def leader(self, partition: PartitionId) -> LeaderInfo | None:
        """The leader, if it and its address are known."""
        leader = self.view.leader(partition)
        return leader if leader is not None and leader.node in self.view.brokers else None

    def learn_leader(self, partition: PartitionId, leader: int, epoch: int) -> bool:
        """Learn a leader from a response. True: it is new, and its address is known."""
        return leader >= 0 and self.view.learn_leader(partition, leader, epoch) and leader in self.view.brokers

    # A broker.

    def address(self, node: int) -> str:
        broker = self.view.brokers.get(node)
        if broker is None:
            source = self._answered or "the last metadata"
            raise UnreachableError(f"broker {node} is not live according to {source}", node=node)
        return broker.address

    def unreachable(self, node: int, error: UnreachableError) -> UnreachableError:
        """The same error, with both addresses. Logs the outage."""
        broker = self.view.brokers.get(node)
        if broker is not None and not isinstance(error, AdvertisedAddressError):
            self._outages.failed(f"broker {node}", str(error))
        if broker is None or isinstance(error, AdvertisedAddressError) or broker.address == self._answered:
            return error
        reason = str(error).removeprefix(f"{broker.address}: ")
        return AdvertisedAddressError(
            broker=node, advertised=broker.address, bootstrap=self._answered or self.bootstrap[0], reason=reason
        )

    async def call_node(self, node: int, method: Method, request: Message, *, timeout_ms: int) -> Any:
        """One attempt."""
        try:
            answer = await self.call_at(self.address(node), method, request, timeout_ms=timeout_ms)
        except UnreachableError as error:
            raise self.unreachable(node, error) from error
        self.reached(node)
        return answer

    async def open_node(self, node: int, method: Method, request: Message | None = None) -> Exchange:
        try:
            return await self.connections.open(self.address(node), method, request)
        except UnreachableError as error:
            raise self.unreachable(node, error) from error

    def reached(self, node: int) -> None:
        """The broker answers: its outage is over."""
        if self._outages:
            self._outages.answered(f"broker {node}")

    # Leaders.

    async def ask_leaders(
        self,
        name: str,
        items: Mapping[PartitionId, Any],
        request_of: Callable[[list[Any]], Message],
        *,
        topics: Sequence[str],
        timeout_ms: int | None = None,
    ) -> dict[PartitionId, Any]:
        """The row of each partition, from its leader, by the method `Log.<name>`. Retries. Rows contain errors that
        are not retriable, and retriable ones that lasted until the timeout.

        `items` are the partitions' parts of the request, `topics` the names to refresh when leaders are unknown.
        """
        method = method_named("Log", name)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (timeout_ms or self.config.request_timeout_ms) / 1000
        rows: dict[PartitionId, Any] = {}
        left = list(items)
        backoff = self.backoff()
        while left:
            by_leader: dict[int, list[PartitionId]] = {}
            for partition in left:
                leader = self.leader(partition)
                by_leader.setdefault(-1 if leader is None else leader.node, []).append(partition)
            leaderless = by_leader.pop(-1, [])
            failures: list[TidelogError] = []
            if leaderless:
                failures.append(LeaderNotAvailableError("the partition has no leader"))
            answers = await asyncio.gather(
                *(
                    self._ask(node, method, places, request_of([items[place] for place in places]), end_s)
                    for node, places in sorted(by_leader.items())
                )
            )
            for answer in answers:
                if isinstance(answer, TidelogError):
                    failures.append(answer)
                else:
                    rows.update(answer)
            left = [place for place in left if place not in rows or _may_pass(rows[place])]
            if not left:
                break
            pause_s = backoff.next_s()
            if loop.time() + pause_s >= end_s:
                if all(place in rows for place in left):
                    break
                raise failures[0] if failures else CallTimeoutError(f"{name}: no answer in time")
            await asyncio.sleep(pause_s)
            await self.refresh_quietly(*topics)
        return rows

    async def _ask(
        self, node: int, method: Method, places: list[PartitionId], request: Message, end_s: float
    ) -> dict[PartitionId, Any] | TidelogError:
        left_ms = int((end_s - asyncio.get_running_loop().time()) * 1000)
        try:
            call = partial(self.call_node, node, method, timeout_ms=max(1, left_ms))
            answer = await call_in_parts(method, request, call)
        except TidelogError as error:
            if not error.retriable:
                raise
            return error
        return dict(zip(places, answer.partitions, strict=True))


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Its caller may be cancelled; the next refresh reports the error again."""
    if not task.cancelled():
        task.exception()


def server_timeout_ms(attempt_ms: int) -> int:
    """The time for the node, so that its error arrives before that of the client."""
    return max(1, attempt_ms - min(SLACK_MS, attempt_ms // 4))


def _gave_up(
    failure: TidelogError | None, addresses: list[str], reasons: list[str], waited_s: float, *, is_read: bool
) -> TidelogError:
    """The error of a call whose time is up."""
    if failure is None or isinstance(failure, UnreachableError):
        return NoClusterError(addresses, [*reasons, *["no time left"] * (len(addresses) - len(reasons))])
    failure = as_read_error(failure) if is_read else failure
    failure.args = (f"gave up after {waited_s:.1f} s; the last answer: {failure}", *failure.args[1:])
    return failure


def _more_telling(former: TidelogError | None, latter: TidelogError | None) -> TidelogError | None:
    """The later error, unless the former one is of a node that was reached, or that answered, and the later is not."""
    if former is None or latter is None:
        return former or latter
    return former if _rank(former) > _rank(latter) else latter


def _rank(error: TidelogError) -> int:
    if isinstance(error, UnreachableError):
        return 0
    return 1 if isinstance(error, TransportError) else 2


def _may_pass(row: Any) -> bool:
    return bool(row.HasField("error") and row.error.retriable)


def error_in(row: Any) -> TidelogError | None:
    """The error of one row of a response, as an exception."""
    if not row.HasField("error"):
        return None
    message: common.Error = row.error
    return with_class(as_exception(message))
