"""Whole brokers of the simulator behind the data handlers of the Kafka API.

Each request and each answer passes through its encoder and its decoder, in the version that is asked for.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker
from tidelog.metadata.image import ClusterImage
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import fetch, offsets, produce, transactions
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.kafka.messages import FETCH, PRODUCE
from tidelog.rpc.kafka.messages.data import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse, Origin
from tidelog.services.data import DataServices
from tidelog.services.deadline import deadline_after
from tidelog.services.limits import RequestLimits, ResponseMemory
from tidelog.services.services import BrokerServices

BROKERS = (11, 12, 13)
LISTENER = "CLIENT"
HANDLERS: dict[int, Entry] = {**produce.HANDLERS, **fetch.HANDLERS, **offsets.HANDLERS, **transactions.HANDLERS}


class Services:
    """As far as the data handlers ask for them."""

    def __init__(self, broker: RunningBroker, data: DataServices, limits: RequestLimits) -> None:
        self._broker = broker
        self.data = data
        self.limits = limits

    @property
    def image(self) -> ClusterImage:
        return self._broker.tail.image


class DataWorld:
    """One cluster for a module; each test has topics of its own, which broker 11 leads."""

    def __init__(self, cluster: ReplicationCluster, limits: RequestLimits | None = None) -> None:
        self.cluster = cluster
        self.limits = limits or RequestLimits()
        self.responses = ResponseMemory(self.limits)
        self.sessions = FetchSessions(Random(1), slots_max=20)
        self._has_own_limits = limits is not None
        self._data: dict[RunningBroker, DataServices] = {}

    def topic(self, name: str, **more: Any) -> PartitionId:
        made = self.cluster.topic(name, BROKERS, **more)
        brokers = self.cluster.brokers.values()
        self.cluster.until(lambda: all(name in broker.tail.image.topic_ids for broker in brokers))
        return made

    def data(self, broker: RunningBroker) -> DataServices:
        """The broker's own services, or some over the same replicas within other limits."""
        if not self._has_own_limits:
            return broker.service
        return self._data.setdefault(broker, DataServices(broker.replicas, self.limits))

    def context(self, broker: RunningBroker, version: int, timeout_ms: int = 0) -> Context:
        services = cast(BrokerServices, Services(broker, self.data(broker), self.limits))
        memory = ConnectionMemory(self.responses, self.limits)
        origin = Origin(
            listener=LISTENER, peer="10.0.0.1:40000", host="10.0.0.1", memory=memory, fetch_sessions=self.sessions
        )
        return Context(services, origin, version, 7, "test", deadline_after(timeout_ms))

    async def begin(self, broker: RunningBroker, api: Api[Any, Any], version: int, request: object) -> Any:
        """What its handler returns."""
        data = b"".join(api.encode_request(version, request))
        message = api.decode_request(version, data)
        return await HANDLERS[api.key].handle(message, self.context(broker, version, getattr(message, "timeout_ms", 0)))

    async def answer(self, broker: RunningBroker, api: Api[Any, Any], version: int, request: object) -> Any:
        """The response as a client decodes it; None if there is none."""
        outcome = await self.begin(broker, api, version, request)
        if isinstance(outcome, DeferredResponse):
            later = outcome
            try:
                if later.taskless is None:
                    outcome = await later.respond()
                else:
                    is_over = asyncio.Event()
                    later.taskless.on_done(is_over.set)
                    await is_over.wait()
                    outcome = later.taskless.make()
            finally:
                later.abandon()
        if outcome is None:
            return None
        return api.decode_response(version, b"".join(api.encode_response(version, outcome)))

    def ask(self, api: Api[Any, Any], request: object, *, version: int | None = None, node: int = 11) -> Any:
        chosen = api.high if version is None else version
        return self.cluster.on_broker(node, lambda broker: self.answer(broker, api, chosen, request))

    # Produce.

    def produce(self, name: str, records: bytes | None, *, version: int = 12, **more: Any) -> PartitionProduceResponse:
        response = self.ask(PRODUCE, produce_request((name, 0, records), **more), version=version)
        assert isinstance(response, ProduceResponse)
        ((row,),) = [topic.partition_responses for topic in response.responses]
        return row

    # Fetch.

    def fetch(self, *wanted: FetchTopic, version: int = 12, node: int = 11, **more: Any) -> FetchResponse:
        response = self.ask(FETCH, fetch_request(*wanted, **more), version=version, node=node)
        assert isinstance(response, FetchResponse)
        return response

    def fetch_row(self, name: str, offset: int = 0, *, partition: int = 0, **more: Any) -> PartitionData:
        named = {key: more.pop(key) for key in ("current_leader_epoch", "last_fetched_epoch") if key in more}
        ((row,),) = [
            topic.partitions
            for topic in self.fetch(wanted(name, offset, partition=partition, **named), **more).responses
        ]
        return row

    def is_idle(self, node: int = 11) -> bool:
        """Nobody waits, nothing is counted."""
        broker = self.cluster.brokers[NodeId(node)]
        services = self.data(broker)
        return not (services.fetch.waiting_fetches or services.produce.queued_bytes or self.responses.used)


def produce_request(
    *named: tuple[str | bytes, int, bytes | None], acks: int = -1, timeout_ms: int = 5_000, **more: Any
) -> ProduceRequest:
    topics = []
    for topic, partition, records in named:
        data = [PartitionProduceData(index=partition, records=records)]
        topics.append(TopicProduceData(**_topic(topic, "name"), partition_data=data))
    return ProduceRequest(acks=acks, timeout_ms=timeout_ms, topic_data=topics, **more)


def wanted(
    topic: str | bytes, offset: int = 0, *, partition: int = 0, bytes_max: int = 1 << 20, **more: Any
) -> FetchTopic:
    one = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=bytes_max, **more)
    return FetchTopic(**_topic(topic), partitions=[one])


def forgotten(topic: str | bytes, *partitions: int) -> ForgottenTopic:
    return ForgottenTopic(**_topic(topic), partitions=list(partitions))


def fetch_request(*topics: FetchTopic, max_wait_ms: int = 0, min_bytes: int = 1, **more: Any) -> FetchRequest:
    return FetchRequest(topics=list(topics), max_wait_ms=max_wait_ms, min_bytes=min_bytes, **more)


def _topic(topic: str | bytes, name: str = "topic") -> dict[str, Any]:
    return {"topic_id": topic} if isinstance(topic, bytes) else {name: topic}


def rows_of(response: FetchResponse) -> dict[tuple[str | bytes, int], PartitionData]:
    return {(_named(topic), row.partition_index): row for topic in response.responses for row in topic.partitions}


def _named(topic: FetchableTopicResponse) -> str | bytes:
    return topic.topic or topic.topic_id
