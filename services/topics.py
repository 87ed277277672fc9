"""Creates, deletes, describes and grows topics. The active controller decides; this node checks, splits and waits.

After a change the service waits up to SEE_MS until this node sees it: a client that creates a topic and then writes to
it through the same broker finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.queries import DescribedTopic, DescribedTopics, DescribeTopics
from tidelog.metadata.topics import AddPartitions, CreatedTopic, CreatedTopics, CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.services.authorization import CLUSTER, Operation
from tidelog.services.auto_create import AutoCreation
from tidelog.services.batches import change_in_batches, outcomes_of
from tidelog.services.context import RequestContext
from tidelog.services.node import NodeAccess, Reading, Rows
from tidelog.services.quotas import Charge
from tidelog.services.topic_lookup import topic_with_id
from tidelog.world.slicing import sliced

PARTITIONS_PER_QUESTION = 1_000
"""Partitions that the controller describes in one turn of its event loop: some 20 ms. A larger topic is one
question."""
NAMES_PER_SLICE = 1_000
_UNKNOWN_BY_ID = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
"""Errors of a name for which its id is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicQuery:
    """The topics to describe; rows are returned in the order names, ids, each once."""

    names: tuple[str, ...] = ()
    ids: tuple[UUID, ...] = ()
    all_topics: bool = False
    allow_stale: bool = False


class TopicService:
    def __init__(self, node: NodeAccess) -> None:
        self._node = node
        self._auto_creation = AutoCreation(node.cache, node.forwarder)

    async def create(self, context: RequestContext, request: CreateTopics) -> list[CreatedTopic]:
        """Return one row for each topic, in order."""
        node, deadline = self._node, self._node.deadline(context)
        may_create_all = node.guard.authorizer.authorize(context, Operation.CREATE, CLUSTER)
        rows = await change_in_batches(
            node,
            context,
            deadline,
            request.topics,
            name=lambda topic: topic.name,
            rejection=lambda topic: (
                None if may_create_all else node.guard.rejection(context, Operation.CREATE, topic.name)
            ),
            request=lambda topics: CreateTopics(topics=topics, validate_only=request.validate_only),
            rows=_created_rows,
            failed=lambda topic, error: CreatedTopic(name=topic.name, error=error.code, message=str(error)),
            mutations=_partition_count,
        )
        names = {row.name for row in rows if row.error is None}
        if names and not request.validate_only:
            await node.cache.until_seen(lambda image: all(name in image.topic_ids for name in names), deadline)
        return rows

    async def delete(self, context: RequestContext, request: DeleteTopics) -> list[Outcome]:
        """Return one outcome for each topic: names first, then ids."""
        node, image, deadline = self._node, self._node.cache.image, self._node.deadline(context)
        keys: list[str | UUID] = [*request.names, *request.ids]
        outcomes = await change_in_batches(
            node,
            context,
            deadline,
            keys,
            name=lambda key: _identity(image, key),
            rejection=lambda key: self._deletion_rejection(context, image, key),
            request=lambda some: _deletion(some, request),
            rows=outcomes_of,
            failed=lambda key, error: Outcome(str(key), error.code, str(error)),
        )
        deleted = {
            identity
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome.error is None and isinstance(identity := _identity(image, key), UUID)
        }
        if deleted and not request.validate_only:
            await node.cache.until_seen(lambda now: not any(topic_id in now.topics for topic_id in deleted), deadline)
        return outcomes

    def _deletion_rejection(self, context: RequestContext, image: ClusterImage, key: str | UUID) -> TidelogError | None:
        guard = self._node.guard
        if isinstance(key, str):
            return guard.rejection(context, Operation.DELETE, key)
        try:
            if key in image.topics or not guard.allows_all:
                guard.authorize_by_id(context, Operation.DELETE, topic_with_id(image, key))
        except TidelogError as error:
            return error
        return None  # the controller may know it already

    async def describe(self, context: RequestContext, query: TopicQuery) -> Rows[DescribedTopic]:
        """Return one row for each name and each id, in order, or for each topic that this node knows and the principal
        may describe. The controller answers in slices of `PARTITIONS_PER_QUESTION`."""
        node, image = self._node, self._node.cache.image
        ids = tuple(dict.fromkeys(query.ids))
        # A topic id that this node does not know is unknown; one of a topic deleted meanwhile is found unknown below.
        by_id = {topic_id: image.topics[topic_id].name for topic_id in ids if topic_id in image.topics}
        names = sorted(image.topic_ids) if query.all_topics else [*dict.fromkeys(query.names)]
        node.guard.charge(context)
        rows: dict[str, DescribedTopic] = {}
        allowed: list[str] = []
        async for name in sliced(dict.fromkeys((*names, *by_id.values())), NAMES_PER_SLICE):
            error = node.guard.rejection(context, Operation.DESCRIBE, name)
            if error is None:
                allowed.append(name)
            elif not query.all_topics:
                rows[name] = DescribedTopic(name=name, error=error.code, message=str(error))
        reading = Reading(node, context, allow_stale=query.allow_stale)
        async for some in sliced(_questions(image, allowed), 1):
            reply = await reading.ask(DescribeTopics(names=some))
            assert isinstance(reply, DescribedTopics), "the reply to its question"
            rows |= {row.name: row for row in reply.topics}
        if query.all_topics:
            return Rows(tuple(row for row in rows.values() if row.topic is not None), reading.stale_ms)
        found = [rows[name] for name in names]
        found += [_row_of_id(topic_id, rows.get(by_id.get(topic_id, ""))) for topic_id in ids]
        return Rows(tuple(found), reading.stale_ms)

    async def add_partitions(self, context: RequestContext, request: AddPartitions) -> list[Outcome]:
        """Return one outcome for each topic, in order."""
        node, topics, deadline = self._node, request.topics, self._node.deadline(context)
        outcomes = await change_in_batches(
            node,
            context,
            deadline,
            topics,
            name=lambda topic: topic.name,
            rejection=lambda topic: node.guard.rejection(context, Operation.ALTER, topic.name),
            request=lambda some: AddPartitions(topics=some, validate_only=request.validate_only),
            rows=outcomes_of,
            failed=lambda topic, error: Outcome(topic.name, error.code, str(error)),
        )
        totals = {topic.name: topic.total for topic, row in zip(topics, outcomes, strict=True) if row.error is None}
        if totals and not request.validate_only:
            await node.cache.until_seen(
                lambda image: all(_has_partitions(image, name, total) for name, total in totals.items()), deadline
            )
        return outcomes

    async def auto_create(self, context: RequestContext, names: Iterable[str]) -> dict[str, Outcome]:
        """Create unknown topics that a metadata request names; see `auto_create`."""
        guard, errors, allowed = self._node.guard, {}, []
        may_create_all = guard.authorizer.authorize(context, Operation.CREATE, CLUSTER)
        for name in dict.fromkeys(names):
            error = None if may_create_all else guard.rejection(context, Operation.CREATE, name)
            if error is None:
                allowed.append(name)
            else:
                errors[name] = Outcome(name, error.code, str(error))
        guard.charge(context, Charge.MUTATIONS, len(allowed))
        return errors | await self._auto_creation.create(context, allowed, self._node.deadline(context))


def _partition_count(topic: NewTopic) -> int:
    return len(topic.assignment) or max(1, topic.partitions)


def _created_rows(reply: object) -> Sequence[CreatedTopic]:
    assert isinstance(reply, CreatedTopics), "the reply to its request"
    return reply.topics


def _questions(image: ClusterImage, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Split the topics: the controller answers a question in one turn of its event loop."""
    some: list[str] = []
    size = 0
    for name in names:
        topic = image.topic_named(name)
        partitions = 1 if topic is None else len(topic.partitions)
        if some and size + partitions > PARTITIONS_PER_QUESTION:
            yield tuple(some)
            some, size = [], 0
        some.append(name)
        size += partitions
    if some:
        yield tuple(some)


def _row_of_id(topic_id: UUID, row: DescribedTopic | None) -> DescribedTopic:
    is_this = row is not None and (row.topic is None or row.topic.topic_id == topic_id)
    if row is not None and is_this and row.error not in _UNKNOWN_BY_ID:
        return row
    return DescribedTopic(name="", error=ErrorCode.UNKNOWN_TOPIC_ID, message=f"there is no topic with id {topic_id}")


def _identity(image: ClusterImage, key: str | UUID) -> str | UUID:
    """A topic has one identity, whether its name or its id is given."""
    return key if isinstance(key, UUID) else image.topic_ids.get(key, key)


def _deletion(keys: Sequence[str | UUID], request: DeleteTopics) -> DeleteTopics:
    return DeleteTopics(
        names=tuple(key for key in keys if isinstance(key, str)),
        ids=tuple(key for key in keys if isinstance(key, UUID)),
        validate_only=request.validate_only,
    )


def _has_partitions(image: ClusterImage, name: str, total: int) -> bool:
    """Also true if the topic was deleted meanwhile."""
    topic = image.topic_named(name)
    return topic is None or len(topic.partitions) >= total
