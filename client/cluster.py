"""`ClusterClient`: finds the cluster, knows who leads what, and brings requests where they belong.

A request without a place (metadata, admin) goes to the address that answered last, then to the other bootstrap
addresses, then to the brokers that were told. A request for partitions goes to their leaders (`ask_leaders`).

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

One refresh of the metadata is under way at a time, and asks for all topics that were asked for before.

A topic that is to be written to is created by looking for it, where the cluster allows that (`topic(may_create=True)`).
Only by the first look-up: a name that this client has known is never created again, as whoever deleted the topic would
find it back. A refresh creates nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.message import Message

from tidelog.client.config import Backoff, ClientConfig
from tidelog.client.connections import Connections, Exchange
from tidelog.client.errors import (
    AdvertisedAddressError,
    NoClusterError,
    UnknownTopicError,
    WrongApiError,
    as_read_error,
)
from tidelog.client.metadata import ClusterView, LeaderInfo, TopicInfo
from tidelog.client.outage_log import OutageLog
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequestError,
    RemoteError,
    TidelogError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import Method, method_named
from tidelog.rpc.errors import as_exception
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.world.clock import Clock

_METADATA = method_named("Cluster", "Metadata")
NOTHING_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED})
"""Errors that mean the request was not begun, so that even a change may be sent again."""

_CLUSTER = "cluster"
"""Key of an outage of every address that is known."""


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
        assert bootstrap, "an address to begin with"
        self.bootstrap = tuple(bootstrap)
        self.connections = connections
        self.random = random
        self.clock = clock
        self.config = config or ClientConfig()
        self.view = ClusterView()
        self.stale_ms: int | None = None
        """Age of the last metadata, if the node that sent them did not hear from an active controller."""
        self._answered = ""  # the address that answered last
        self._names: dict[str, None] = {}
        self._had: set[str] = set()  # topics that were known once; full, nothing is created any more
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
        told = [broker.address for _, broker in sorted(self.view.brokers.items())]
        first = [self._answered] if self._answered else []
        return list(dict.fromkeys([*first, *self.bootstrap, *told]))

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout_ms: int | None = None,
        attempt_ms: int | None = None,
        is_repeatable: bool = True,
    ) -> Any:
        """The answer of any node. `is_repeatable=False` for a change that must not be made twice: then an attempt
        whose outcome is unknown is told as such, and not repeated."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        end_s = start_s + (timeout_ms or self.config.request_timeout_ms) / 1000
        backoff = self.backoff()
        while True:
            reasons: list[str] = []
            wrong_apis = 0
            last: TidelogError | None = None
            addresses = self._addresses()
            for number, address in enumerate(addresses):
                left_ms = int((end_s - loop.time()) * 1000)
                if left_ms <= 0:
                    break
                # Who is silent takes its share of the time and no more, so that the others are asked, too.
                share_ms = max(1, left_ms // (len(addresses) - number)) if is_repeatable else left_ms
                try:
                    answer = await self.connections.call(
                        address, method, request, timeout_ms=min(share_ms, attempt_ms or share_ms)
                    )
                except UnreachableError as error:
                    reasons.append(str(error).removeprefix(f"{address}: "))
                    wrong_apis += isinstance(error, WrongApiError)
                    last = last or error  # one that was reached says more, though it gave no answer
                    continue
                except TransportError as error:
                    if not is_repeatable:
                        raise
                    last = error
                    continue
                except RemoteError as error:
                    if not error.retriable or not (is_repeatable or error.code in NOTHING_DONE):
                        raise
                    last = error
                    break
                self._answered = address
                self._outages.answered(address, key=_CLUSTER)
                return answer
            pause_s = backoff.next_s()
            has_waited = loop.time() - start_s >= self.config.bootstrap_wait_ms / 1000 or wrong_apis == len(addresses)
            if not self._answered and len(reasons) == len(addresses) and has_waited:
                raise NoClusterError(addresses, reasons)
            if len(reasons) == len(addresses):
                self._outages.failed(", ".join(addresses), "; ".join(dict.fromkeys(reasons)), key=_CLUSTER)
            if loop.time() + pause_s >= end_s:
                if last is None or isinstance(last, UnreachableError):
                    raise NoClusterError(addresses, [*reasons, *["no time left"] * (len(addresses) - len(reasons))])
                raise as_read_error(last) if is_repeatable else last
            await asyncio.sleep(pause_s)

    async def open(self, method: Method, request: Message | None = None) -> Exchange:
        """A stream to the address that answered last. `refresh` first, so that there is one."""
        return await self.connections.open(self._answered or self.bootstrap[0], method, request)

    # Metadata.

    async def refresh(self, *names: str) -> None:
        """Fresh metadata of these topics and of all that were asked for before. Raises what `call` raises."""
        missing = [name for name in names if name not in self._names]
        if len(self._names) + len(missing) > self.config.topics_max:
            raise InvalidRequestError(f"more than {self.config.topics_max} topics in one client")
        self._names.update(dict.fromkeys(missing))
        while self._refreshing is not None and not self._asked.issuperset(names):
            await asyncio.wait([self._refreshing])
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(_looked_at)
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            backoff = self.backoff()
            for _ in range(5):
                self._asked = frozenset(self._names)
                request = pb.MetadataRequest(topics=list(self._names), listener=self.config.listener)
                answer = await self.call(_METADATA, request, attempt_ms=self.config.attempt_timeout_ms)
                if self.view.take(answer):
                    self._forget_unknown(answer)
                    break
                # It is behind what we know; another node may not be.
                self.ask_another()
                await asyncio.sleep(backoff.next_s())
            self._read_s = asyncio.get_running_loop().time()
        finally:
            self._refreshing = None

    def _forget_unknown(self, answer: pb.MetadataResponse) -> None:
        """What is not there is asked for only by who names it again: topics come and go."""
        for topic in answer.topics:
            error = error_in(topic)
            if error is not None and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self._names.pop(topic.name, None)

    def ask_another(self) -> None:
        """The next request without a place goes to another node first. A broker that is cut off from the cluster tells
        what it knew then: who looks again and again asks each in turn."""
        told = [broker.address for _, broker in sorted(self.view.brokers.items())]
        addresses = list(dict.fromkeys([*self.bootstrap, *told]))
        if self._answered in addresses:
            self._answered = addresses[(addresses.index(self._answered) + 1) % len(addresses)]

    async def refresh_quietly(self, *names: str) -> TidelogError | None:
        """As `refresh`, for who tries again anyway: the error is returned."""
        try:
            await self.refresh(*names)
        except TidelogError as error:
            return error
        return None

    def _is_old(self) -> bool:
        return asyncio.get_running_loop().time() - self._read_s > self.config.metadata_max_age_ms / 1000

    def _known(self, name: str) -> TopicInfo | None:
        found = self.view.topics.get(name)
        if found is not None and len(self._had) < self.config.topics_max:
            self._had.add(name)
        return found

    async def topic(self, name: str, *, may_create: bool = False) -> TopicInfo:
        """Raises `UnknownTopicError` if it is not there, also after a short wait. `may_create`: it is created if this
        client has not known it before and the cluster allows it; raises the refusal if it cannot be created, and
        LEADER_NOT_AVAILABLE if it is not there when time is up."""
        found = self._known(name)
        if found is not None and not self._is_old():
            return found
        is_creating = may_create and name not in self._had and len(self._had) < self.config.topics_max
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        end_s = start_s + self.config.unknown_topic_wait_ms / 1000
        backoff = self.backoff()
        error: TidelogError = UnknownTopicError(name)
        while True:
            await self.refresh(name)
            if is_creating and self._known(name) is None:
                refusal = await self._create(name)
                is_creating = refusal is not None
                error = refusal or UnknownTopicError(name)
                if is_creating:
                    end_s = start_s + self.config.request_timeout_ms / 1000
            found = self._known(name)
            if found is not None:
                return found
            pause_s = backoff.next_s()
            if loop.time() + pause_s >= end_s:
                self._names.pop(name, None)
                raise error
            await asyncio.sleep(pause_s)

    async def _create(self, name: str) -> TidelogError | None:
        """Ask for a topic that may be created. An error: it is not there yet, ask again. None: it is there, or the
        cluster creates nothing. Raises a refusal."""
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
        """By name; the leaders of all are known after it. Raises what `call` raises, and CallTimeoutError if every node
        is behind what is known: what is not in such an answer may be there."""
        request = pb.MetadataRequest(all_topics=True, listener=self.config.listener)
        backoff = self.backoff()
        for _ in range(5):
            answer = await self.call(_METADATA, request, attempt_ms=self.config.attempt_timeout_ms)
            if self.view.take(answer):
                break
            self.ask_another()
            await asyncio.sleep(backoff.next_s())
        else:
            raise CallTimeoutError("metadata: every broker that answered is behind what was told before")
        self.stale_ms = answer.stale_ms if answer.HasField("stale_ms") else None
        known = [self.view.topics.get(topic.name) for topic in answer.topics]
        return sorted((topic for topic in known if topic is not None), key=lambda topic: topic.name)

    def leader(self, partition: PartitionId) -> LeaderInfo | None:
        """Who leads it, if that is known and where that broker is."""
        found = self.view.leader(partition)
        return found if found is not None and found.node in self.view.brokers else None

    def heard(self, partition: PartitionId, leader: int, epoch: int) -> bool:
        """A hint in a broker's answer; whether it is news that can be followed without asking."""
        return leader >= 0 and self.view.heard(partition, leader, epoch) and leader in self.view.brokers

    # A broker.

    def address(self, node: int) -> str:
        broker = self.view.brokers.get(node)
        if broker is None:
            raise UnreachableError(
                f"broker {node} is not live, as far as {self._answered or 'anybody'} knows", node=node
            )
        return broker.address

    def unreachable(self, node: int, error: UnreachableError) -> UnreachableError:
        """The same error, with both addresses in it. The outage is logged."""
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
            answer = await self.connections.call(self.address(node), method, request, timeout_ms=timeout_ms)
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
        """The broker answers: an outage of it is over."""
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
        """The row of each partition, from its leader, by the method `Log.<name>`. A request may be repeated. Errors
        that will not pass, and those that did not until time was up, stand in the rows.

        `items` are the partitions' parts of the request, `topics` the names to ask for when leaders are unknown.
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
                failures.append(RemoteError("nobody leads it", code=ErrorCode.LEADER_NOT_AVAILABLE))
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
            answer = await self.call_node(node, method, request, timeout_ms=max(1, left_ms))
        except TidelogError as error:
            if not error.retriable:
                raise
            return error
        return dict(zip(places, answer.partitions, strict=True))


def _looked_at(task: asyncio.Task[None]) -> None:
    """Whoever waited may be gone; its error is told to the next who asks."""
    if not task.cancelled():
        task.exception()


def _may_pass(row: Any) -> bool:
    return bool(row.HasField("error") and row.error.retriable)


def error_in(row: Any) -> TidelogError | None:
    """The error of one item of an answer, as an exception."""
    if not row.HasField("error"):
        return None
    message: common.Error = row.error
    return as_exception(message)
