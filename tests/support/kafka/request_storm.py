"""Many clients at once that send strange and broken requests to a node, and what may come of it.

A request is followed at once by an ApiVersions of our own, so that it is known whether it was answered:

    answered   in the version that it was sent in, to its number; then the other one is
    silent     only a Produce with acks=0 may be: the other one is answered
    closed     the connection ends; nothing but whole answers came before
    left       the api may wait, and the client goes away

Meanwhile nothing is logged as an error, and a good client is served. A failure prints the seed and the last requests.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from contextlib import suppress
from random import Random
from typing import Any

from support.brokers.cluster import values_of
from support.kafka.invalid_requests import TOPICS, Strange, mutated
from support.kafka.node import SETTINGS, KafkaNode
from support.kafka.server import KafkaClient, api_versions
from tidelog.log.batch import Record, encode
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.headers import read_request_header, read_response_header
from tidelog.rpc.kafka.messages import (
    ALTER_CONFIGS,
    APIS,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_TOPICS,
    DELETE_TOPICS,
    FETCH,
    HEARTBEAT,
    JOIN_GROUP,
    METADATA,
    OFFSET_COMMIT,
    PRODUCE,
    SYNC_GROUP,
)
from tidelog.rpc.kafka.messages.configs import AlterableConfig, AlterConfigsRequest, AlterConfigsResource
from tidelog.rpc.kafka.messages.data import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.rpc.kafka.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest, DeleteTopicState
from tidelog.rpc.kafka.schema import FIELDS
from tidelog.rpc.kafka.wire import MalformedError

CONTROL = "control"
"""A topic that no strange request names."""
CLIENTS = 8
CHECK_EVERY = 500
PATIENCE_S = 0.3
"""For what may wait."""
DEADLINE_S = 30.0
"""For what may not."""
MAY_WAIT = frozenset({PRODUCE.key, FETCH.key, JOIN_GROUP.key, SYNC_GROUP.key})
OFTEN = {PRODUCE.key: 3, FETCH.key: 3, JOIN_GROUP.key: 4, SYNC_GROUP.key: 3, CONSUMER_GROUP_HEARTBEAT.key: 3,
         HEARTBEAT.key: 2, OFFSET_COMMIT.key: 2}  # fmt: skip
PROBE = 0x5EED5EED
PRODUCE_VERSION, FETCH_VERSION, METADATA_VERSION = 9, 12, 12


class Assault:
    def __init__(self, node: KafkaNode, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self.of_key: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        """Answered without an error, by key."""
        self._node = node
        self._seed = seed
        self._left = self._checked = 0
        self._recent: deque[bytes] = deque(maxlen=2 * CLIENTS)
        self._written: list[bytes] = []
        self._checking = asyncio.Lock()
        self._keys = [key for key in sorted(node.shared.table) for _ in range(OFTEN.get(key, 1))]

    async def run(self, count: int) -> None:
        self._left = self._checked = count
        await self.check()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(self._client(number))
        except* Exception as problems:
            reported = "\n".join(one.hex() for one in self._recent)
            raise AssertionError(
                f"seed {self._seed}: {problems.exceptions[0]!r}\nthe last requests:\n{reported}"
            ) from None
        await self.check()

    # Bad clients.

    async def _client(self, number: int) -> None:
        draw = Random(f"{self._seed}/{number}/{self._left}")
        strange = Strange(draw, self._topic_ids, f"own-{number}")
        client: KafkaClient | None = None
        while self._left > 0:
            self._left -= 1
            if self._checked - self._left >= CHECK_EVERY:
                self._checked = self._left
                await self.check()
            if client is None:
                client = await self._node.client()
            key = draw.choice(self._keys)
            served = self._node.shared.table[key]
            frame = strange.frame(key, draw.randint(served.low, served.high), draw.randrange(1 << 31))
            is_broken = draw.random() < 0.5
            if is_broken:
                frame = mutated(draw, frame)
            self._recent.append(frame)
            self.of_key[key] += 1
            outcome = await self._one(client, frame, strange, draw)
            self.seen[outcome] += 1
            self.seen["broken" if is_broken else "strange"] += 1
            assert not self._node.lines.wrong, f"{frame.hex()}\n{self._node.lines.wrong[0]}"
            if outcome not in ("answered", "silent") or draw.random() < 0.005:
                self._node.drop(client)
                client = None
        if client is not None:
            self._node.drop(client)

    def _topic_ids(self) -> list[bytes]:
        topics = self._node.shared.services.image.topics.values()
        return [one.topic_id.bytes for one in topics if one.name in TOPICS]

    async def _one(self, client: KafkaClient, frame: bytes, strange: Strange, draw: Random) -> str:
        (size,) = struct.unpack_from(">i", frame)
        if size != len(frame) - 4:
            client.writer.write(frame)
            with suppress(OSError):
                client.writer.write_eof()
            await client.rest()
            return "closed"
        client.writer.write(frame + api_versions(PROBE))
        key = struct.unpack_from(">h", frame, 4)[0] if size >= 2 else -1
        try:
            async with asyncio.timeout(PATIENCE_S if key in MAY_WAIT else DEADLINE_S):
                answer = await self._read(client)
                if answer is None:
                    return "closed"
                number = struct.unpack_from(">i", answer)[0]
                wanted, response = decoded(frame, answer)
                if number == PROBE != wanted:
                    assert is_silent(frame), f"no answer to {frame.hex()}"
                    return "silent"
                assert number == wanted, f"the answer to {number}, not to {wanted}: {frame.hex()}"
                strange.learn(response)
                strange.learn_member(request_of(frame), response)
                self.seen["refused" if says_error(response) else "done"] += 1
                self.done[key] += not says_error(response)
                return "answered" if await self._read(client) is not None else "closed"
        except TimeoutError:
            assert key in MAY_WAIT, f"no answer in {DEADLINE_S} s: {frame.hex()}"
            if draw.random() < 0.5:
                with suppress(OSError):
                    client.writer.write_eof()
            return "left"

    async def _read(self, client: KafkaClient) -> bytes | None:
        """None: it is closed."""
        try:
            size = int.from_bytes(await client.reader.readexactly(4), "big")
            assert 4 <= size < 64 << 20, size
            return await client.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        except ConnectionResetError:
            return None

    # A good one.

    async def ask(self, client: KafkaClient, api: Any, version: int, request: object) -> Any:
        client.send(api, version, 1, request)
        return (await client.response(api, version))[1]

    async def check(self) -> None:
        """Writes to a topic and reads it again, and puts right what strange requests may change."""
        async with self._checking:
            await self._check()

    async def _check(self) -> None:
        client = await self._node.client()
        try:
            await self._put_right(client)
            value = str(len(self._written)).encode()
            now_ms = self._node.groups.coordinator.now_ms()
            data = encode([Record(0, now_ms, None, value, ())])
            part = PartitionProduceData(index=0, records=data)
            request = ProduceRequest(acks=-1, topic_data=[TopicProduceData(name=CONTROL, partition_data=[part])])
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    made = await self.ask(client, PRODUCE, PRODUCE_VERSION, request)
                    row = made.responses[0].partition_responses[0]
                    if row.error_code != ErrorCode.LEADER_NOT_AVAILABLE.value.code:
                        break
                    await asyncio.sleep(0.01)
            assert (row.error_code, row.base_offset) == (0, len(self._written)), (row, len(self._written))
            self._written.append(value)
            start = max(0, len(self._written) - 5)
            wanted = FetchPartition(partition=0, fetch_offset=start, partition_max_bytes=1 << 20)
            fetch = FetchRequest(max_wait_ms=0, topics=[FetchTopic(topic=CONTROL, partitions=[wanted])])
            read = (await self.ask(client, FETCH, FETCH_VERSION, fetch)).responses[0].partitions[0]
            assert read.error_code == 0, read
            assert values_of(bytes(read.records)) == self._written[start:]
            reported = await self.ask(
                client, METADATA, METADATA_VERSION, MetadataRequest(topics=[MetadataRequestTopic(name=CONTROL)])
            )
            assert [(one.error_code, one.name, len(one.partitions)) for one in reported.topics] == [(0, CONTROL, 1)]
        finally:
            self._node.drop(client)

    async def _put_right(self, client: KafkaClient) -> None:
        settings = {**SETTINGS, "default.replication.factor": 1}
        configs = [AlterableConfig(name=key, value=str(value)) for key, value in settings.items()]
        resources = [
            AlterConfigsResource(resource_type=4, resource_name="", configs=configs),
            AlterConfigsResource(resource_type=4, resource_name="1", configs=[]),
        ]
        changed = await self.ask(client, ALTER_CONFIGS, 1, AlterConfigsRequest(resources=resources))
        assert [one.error_code for one in changed.responses] == [0, 0], changed
        image = self._node.shared.services.image
        large = [one for one in image.topics.values() if one.name in TOPICS and len(one.partitions) > 20]
        kept = {CONTROL, "__consumer_offsets", *TOPICS}
        gone = [
            DeleteTopicState(name=one.name) for one in [*image.topics.values()] if one.name not in kept or one in large
        ]
        if gone:
            await self.ask(client, DELETE_TOPICS, 6, DeleteTopicsRequest(topics=gone, timeout_ms=10_000))
        missing = [CreatableTopic(name=CONTROL, num_partitions=1, replication_factor=1)]
        missing += [CreatableTopic(name=name, num_partitions=2, replication_factor=1) for name in TOPICS]
        await self.ask(client, CREATE_TOPICS, 5, CreateTopicsRequest(topics=missing, timeout_ms=10_000))


def decoded(frame: bytes, answer: bytes) -> tuple[int, Any]:
    """The number of the request, and its answer if it is one to it."""
    key, version, wanted = struct.unpack_from(">hhi", frame, 4)
    number = struct.unpack_from(">i", answer)[0]
    if number != wanted:
        return wanted, None
    api = APIS[key]
    if api.key == 18 and not api.serves(version):
        version = 0
    _, body = read_response_header(api, version, answer)
    return wanted, api.decode_response(version, answer, body)


def request_of(frame: bytes) -> Any:
    """None if it is none."""
    try:
        header = read_request_header(frame[4:])
        return APIS[header.api_key].decode_request(header.api_version, frame[4:], header.body)
    except MalformedError:
        return None


def is_silent(frame: bytes) -> bool:
    request = request_of(frame)
    return isinstance(request, ProduceRequest) and request.acks == 0


def says_error(answer: Any) -> bool:
    if isinstance(answer, list):
        return any(map(says_error, answer))
    return type(answer) in FIELDS and any(
        bool(value) if one.name == "error_code" else one.struct is not None and says_error(value)
        for one in FIELDS[type(answer)]
        for value in [getattr(answer, one.name)]
    )
