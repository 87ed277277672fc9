"""A small client of the Kafka API for the simulator: real frames over byte connections, and the rules of real clients.

    KafkaClient    what one client knows: versions, leaders with their epochs, coordinators; its connections
    BrokerLink     a connection: requests leave in order, responses come in the same order, or the connection ends

Every request passes through the project's encoder and decoder, in a version that the client has drawn from those that
the broker advertises. As Java and librdkafka do, a client breaks a connection whose response is late, looks for a
leader or a coordinator again after the errors in `REFRESHES` and `REFINDS`, and never goes back to metadata of an older
leader epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulation.broker_checker import Fail
from simulation.cluster import Context
from simulation.groups_node import node_at
from tidelog.model.errors import ErrorCode, StreamBrokenError, StreamClosedError, TidelogError, TransportError
from tidelog.model.ids import NodeId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.headers import read_response_header, request_frame
from tidelog.rpc.kafka.messages import metadata as metadata_messages
from tidelog.rpc.kafka.messages.versions import ApiVersionsRequest
from tidelog.world.simulated.byte_streams import piece_bytes, service_of
from tidelog.world.simulated.streams import SimStream

LISTENER, PORT = "KAFKA", 9094
DATA, GROUP = "data", "group"
"""Channels of a client: a connection to each broker, and another one to a coordinator."""
REQUEST_S = 1.5
"""How long a client waits for a response before it breaks the connection."""
CONNECT_S = 1.0
BACKOFF_S = 0.03
REFRESH_S = 0.06
"""Between two requests for metadata."""

CODES = {error.value.code: error for error in ErrorCode}
_BY_REQUEST = {api.request: api for api in apis.APIS.values()}
VERSIONS: dict[int, tuple[int, ...]] = {
    apis.PRODUCE.key: (7, 9, 12, 13),
    apis.FETCH.key: (11, 12, 13, 16, 18),
    apis.LIST_OFFSETS.key: (5, 7, 11),
    apis.METADATA.key: (10, 12, 13),
    apis.FIND_COORDINATOR.key: (3, 4, 6),
    apis.JOIN_GROUP.key: (5, 7, 9),
    apis.SYNC_GROUP.key: (3, 5),
    apis.HEARTBEAT.key: (3, 4),
    apis.LEAVE_GROUP.key: (3, 5),
    apis.OFFSET_COMMIT.key: (7, 9, 10),
    apis.OFFSET_FETCH.key: (7, 8, 9, 10),
    apis.CONSUMER_GROUP_HEARTBEAT.key: (0, 1),
}
"""Versions that clients draw from. An API that is not named is used in its highest."""
REFRESHES = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.STORAGE_ERROR,
        ErrorCode.NETWORK_EXCEPTION,
    }
)
REFINDS = frozenset({ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE})
GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})


class LinkError(TransportError):
    """The connection ended before the response: the request may have been executed."""


@dataclass(slots=True)
class _Waiting:
    api: Api[Any, Any]
    version: int
    number: int
    answer: asyncio.Future[Any]


class BrokerLink:
    """One connection. `call` may be used by several tasks: requests are pipelined in the order of the calls."""

    def __init__(self, stream: SimStream, client_id: str, draw: Random, fail: Fail) -> None:
        self.versions: dict[int, tuple[int, int]] = {}
        """By API key: what the broker advertises."""
        self.is_over = False
        self._stream = stream
        self._client_id = client_id
        self._draw = draw
        self._fail = fail
        self._number = 0
        self._waiting: deque[_Waiting] = deque()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def send(self, api: Api[Any, Any], version: int, request: object) -> asyncio.Future[Any]:
        """Sends the request now. The future has the response, or a `LinkError`."""
        loop = asyncio.get_running_loop()
        self._number += 1
        waiting = _Waiting(api, version, self._number, loop.create_future())
        waiting.answer.add_done_callback(_retrieve)
        body = api.encode_request(version, request)
        data = b"".join(request_frame(api, version, self._number, self._client_id, body))
        if self.is_over:
            waiting.answer.set_exception(LinkError("the connection is closed"))
            return waiting.answer
        self._waiting.append(waiting)
        try:
            while data:
                size = piece_bytes(self._draw, len(data))
                if not self._stream.send_nowait(data[:size]):
                    raise LinkError("the broker reads nothing")
                data = data[size:]
        except TransportError as error:
            self._end(f"cannot send: {error}")
        return waiting.answer

    async def call(self, api: Api[Any, Any], version: int, request: object, *, timeout_s: float = REQUEST_S) -> Any:
        """Breaks the connection if the response is late."""
        answer = self.send(api, version, request)
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        if not done:
            self.close(f"no response to {api.name} in {timeout_s} s")
        return await answer

    async def _read(self) -> None:
        data = b""
        try:
            while not self.is_over:
                data += await self._stream.receive()
                while len(data) >= 4 and len(data) - 4 >= (size := int.from_bytes(data[:4], "big")):
                    self._received(data[4 : 4 + size])
                    data = data[4 + size :]
        except (StreamBrokenError, StreamClosedError) as error:
            self._end(str(error))

    def _received(self, data: bytes) -> None:
        if not self._waiting:
            self._fail(self._client_id, "a response comes to no request")
            return
        waiting = self._waiting.popleft()
        number, body = read_response_header(waiting.api, waiting.version, data)
        if number != waiting.number:
            what = f"response {number} comes where that to {waiting.api.name} {waiting.number} is due"
            self._fail(self._client_id, f"order: {what}")
        response = waiting.api.decode_response(waiting.version, data, body)
        if not waiting.answer.done():
            waiting.answer.set_result(response)

    def close(self, why: str) -> None:
        self._end(why)
        self._stream.close()
        self._reader.cancel()

    def _end(self, why: str) -> None:
        self.is_over = True
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                waiting.answer.set_exception(LinkError(why))


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """A caller that has given up does not retrieve the error."""
    if not answer.cancelled():
        answer.exception()


@dataclass(slots=True)
class KnownLeader:
    node: int = -1
    epoch: int = -1


@dataclass(slots=True)
class TopicMetadata:
    name: str
    topic_id: bytes = b""
    partitions: dict[int, KnownLeader] = field(default_factory=dict)


class KafkaClient:
    """What one client knows of the cluster, and its connections. Ends with its process."""

    def __init__(
        self, context: Context, brokers: Sequence[NodeId], draw: Random, fail: Fail, *, client_id: str, rack: str = ""
    ) -> None:
        self.context = context
        self.client_id = client_id
        self.rack = rack
        self.random = draw
        self.fail = fail
        self.topics: dict[str, TopicMetadata] = {}
        self.names: dict[bytes, str] = {}
        self.errors: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        """Responses by API and version."""
        self._brokers = [int(node) for node in brokers]
        self._links: dict[tuple[int, str], BrokerLink] = {}
        self._opening: dict[tuple[int, str], asyncio.Future[BrokerLink | None]] = {}
        self._coordinators: dict[str, int] = {}
        self._versions = {key: draw.choice(versions) for key, versions in VERSIONS.items()}
        self.is_stale = True
        """Whether the metadata are to be asked for before they are used again."""
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_s = 0.0

    # Connections.

    def version_of(self, api: Api[Any, Any]) -> int:
        return self._versions.get(api.key, api.high)

    async def link(self, node: int, channel: str = DATA) -> BrokerLink:
        """Raises `TransportError`. A response waits for those before it, so a channel has a connection of its own."""
        place = node, channel
        link = self._links.get(place)
        if link is not None and not link.is_over:
            return link
        opening = self._opening.get(place)
        if opening is None:
            opening = self._opening[place] = asyncio.get_running_loop().create_future()
            link = None
            try:
                link = self._links[place] = await self._open(node)
            except (TransportError, TimeoutError) as error:
                self.note(f"connect: {type(error).__name__}")
            finally:
                del self._opening[place]
                opening.set_result(link)
        else:
            link = await opening
        if link is None:
            raise LinkError(f"broker {node} cannot be reached")
        return link

    async def _open(self, node: int) -> BrokerLink:
        async with asyncio.timeout(CONNECT_S):
            stream = await self.context.transport.open_stream(NodeId(node), service_of(PORT))
        link = BrokerLink(stream, self.client_id, self.random, self.fail)
        request = ApiVersionsRequest(client_software_name="simulated", client_software_version="1")
        response = await link.call(apis.API_VERSIONS, apis.API_VERSIONS.high, request)
        link.versions = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        for key, version in self._versions.items():
            low, high = link.versions.get(key, (0, -1))
            if not low <= version <= high:
                self.fail(self.client_id, f"key {key}: version {version} is not in {low} to {high}")
        return link

    def disconnect(self) -> None:
        for link in self._links.values():
            link.close("the client closes it")
        self._links.clear()

    async def call(self, node: int, request: object, *, timeout_s: float = REQUEST_S, channel: str = DATA) -> Any:
        """Raises `TransportError` if there is no response."""
        api = _BY_REQUEST[type(request)]
        version = self.version_of(api)
        link = await self.link(node, channel)
        response = await link.call(api, version, request, timeout_s=timeout_s)
        name = f"{api.name}.{version}"
        self.requests[name] = self.requests.get(name, 0) + 1
        return response

    def note(self, error: ErrorCode | str) -> None:
        name = error if isinstance(error, str) else error.name
        self.errors[name] = self.errors.get(name, 0) + 1

    async def pause(self, least_s: float = BACKOFF_S) -> None:
        await asyncio.sleep(least_s + self.random.expovariate(1 / BACKOFF_S))

    # Metadata.

    def stale(self) -> None:
        """The metadata are asked for before they are used again."""
        self.is_stale = True

    async def refresh(self, names: Iterable[str]) -> None:
        """Asks a broker for these topics, once for all tasks that ask meanwhile."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh(sorted(set(names))))
        try:
            await asyncio.shield(self._refreshing)
        finally:
            if self._refreshing is not None and self._refreshing.done():
                self._refreshing = None

    async def _refresh(self, names: list[str]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._refreshed_s + REFRESH_S - loop.time())
        self._refreshed_s = loop.time()
        topics = [metadata_messages.MetadataRequestTopic(topic_id=bytes(16), name=name) for name in names]
        request = metadata_messages.MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        try:
            response = await self.call(self.any_broker(), request)
        except TransportError as error:
            self.note(error.code)
            await self.pause()
            return
        self._check_brokers(response.brokers)
        for row in response.topics:
            if row.error_code or row.name is None:
                self.note(CODES[row.error_code])
                continue
            topic = self.topics.setdefault(row.name, TopicMetadata(row.name))
            topic.topic_id = row.topic_id
            self.names[row.topic_id] = row.name
            for partition in row.partitions:
                self.learn(row.name, partition.partition_index, partition.leader_id, partition.leader_epoch)
        self.is_stale = False

    def _check_brokers(self, rows: Iterable[metadata_messages.MetadataResponseBroker]) -> None:
        for row in rows:
            if node_at(f"{row.host}:{row.port}") != row.node_id or row.port != PORT:
                self.fail(self.client_id, f"broker {row.node_id} is said to be at {row.host}:{row.port}")

    def learn(self, name: str, number: int, leader: int, epoch: int) -> None:
        """Takes a leader that is not older than what the client knows."""
        topic = self.topics.get(name)
        if topic is None:
            return
        known = topic.partitions.setdefault(number, KnownLeader())
        if epoch >= known.epoch:
            known.epoch, known.node = epoch, leader

    def leader(self, name: str, number: int) -> KnownLeader:
        topic = self.topics.get(name)
        return KnownLeader() if topic is None else topic.partitions.get(number, KnownLeader())

    async def ready(self, names: Sequence[str]) -> None:
        """Metadata of these topics that no error has shown as stale; tries once."""
        if self.is_stale or any(name not in self.topics for name in names):
            await self.refresh(names)

    def any_broker(self) -> int:
        return self.random.choice(self._brokers)

    # Coordinators.

    async def coordinator(self, group: str) -> int:
        """Raises `TidelogError` if it cannot be found now."""
        known = self._coordinators.get(group)
        if known is not None:
            return known
        request = metadata_messages.FindCoordinatorRequest(key=group, coordinator_keys=[group])
        response = await self.call(self.any_broker(), request)
        row = response.coordinators[0] if response.coordinators else response
        if row.error_code:
            error = CODES[row.error_code]
            self.note(error)
            raise LinkError(f"no coordinator of {group}: {error.name}")
        if node_at(f"{row.host}:{row.port}") != row.node_id:
            self.fail(self.client_id, f"coordinator {row.node_id} is said to be at {row.host}")
        self._coordinators[group] = row.node_id
        return int(row.node_id)

    def forget_coordinator(self, group: str) -> None:
        self._coordinators.pop(group, None)

    async def ask_coordinator(self, group: str, request: object, *, timeout_s: float = REQUEST_S) -> Any:
        """Raises `TransportError` after it has forgotten the coordinator."""
        try:
            return await self.call(await self.coordinator(group), request, timeout_s=timeout_s, channel=GROUP)
        except TidelogError as error:
            self.forget_coordinator(group)
            self.note(error.code)
            raise

    def check_code(self, group: str, code: int) -> ErrorCode | None:
        """The error of a response; forgets the coordinator where real clients do."""
        if not code:
            return None
        error = CODES[code]
        self.note(error)
        if error in REFINDS:
            self.forget_coordinator(group)
        return error
