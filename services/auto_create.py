"""Creates topics that a metadata request names (`auto.create.topics.enable`).

What a metadata response says of a name:

    name                                             its row
    known to this node                               the topic
    the setting is off, or an internal topic         UNKNOWN_TOPIC_OR_PARTITION, as without auto-creation
    no valid topic name                              INVALID_TOPIC
    created now, or by another client meanwhile      the topic; LEADER_NOT_AVAILABLE while this node does not see it
    rejected by the controller                       the controller's error
    no controller answers in time                    LEADER_NOT_AVAILABLE: the topic may still be created
    past the first `NAMES_MAX`                       LEADER_NOT_AVAILABLE: the next request creates it

Kafka returns LEADER_NOT_AVAILABLE here, so that every client retries. This node's copy of the metadata decides whether
auto-creation is on; the controller fills in the numbers of partitions and replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.metadata import configs
from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import (
    INTERNAL_TOPICS,
    METADATA_TOPIC,
    PARTITIONS_PER_REQUEST_MAX,
    CreatedTopics,
    CreateTopics,
    NewTopic,
    check_name,
)
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.forwarding import Forwarder
from tidelog.services.metadata_cache import MetadataCache

NAMES_MAX = 100
"""Topics created by one request."""
CREATE_MS = 1_000
"""Timeout of the request to the controller. Together with `SEE_MS` it is below the 2 s after which a client tries
another node."""
_INTERNAL = frozenset({*INTERNAL_TOPICS, METADATA_TOPIC})


class AutoCreation:
    def __init__(self, cache: MetadataCache, forwarder: Forwarder) -> None:
        self._cache = cache
        self._forwarder = forwarder

    async def create(self, context: RequestContext, names: Iterable[str], deadline: Deadline) -> dict[str, Outcome]:
        """Create the topics that this node does not know, and wait a moment until it sees them.

        Return an error for each name that is still unknown and has a reason of its own.
        """
        image = self._cache.image
        unknown = [name for name in dict.fromkeys(names) if name not in image.topic_ids and name not in _INTERNAL]
        if not unknown or not configs.cluster_bool(image, "auto.create.topics.enable"):
            return {}
        valid, errors = _validated(image, unknown)
        count_max = min(NAMES_MAX, max(1, PARTITIONS_PER_REQUEST_MAX // configs.cluster_int(image, "num.partitions")))
        for name in valid[count_max:]:
            errors[name] = _pending(name, f"one request creates at most {count_max} topics")
        if not valid:
            return errors
        created, rejected = await self._create(context, valid[:count_max], deadline)
        await self._cache.until_seen(lambda image: all(name in image.topic_ids for name in created), deadline)
        return errors | rejected | {name: _pending(name, "this node has not seen it yet") for name in created}

    async def _create(
        self, context: RequestContext, names: list[str], deadline: Deadline
    ) -> tuple[list[str], dict[str, Outcome]]:
        """Return the names that exist now, and the errors of the others."""
        request = CreateTopics(topics=tuple(NewTopic(name=name) for name in names))
        try:
            reply = await self._forwarder.ask(context, request, timeout_ms=deadline.left_ms(CREATE_MS))
        except TidelogError as error:
            if error.retriable:
                return [], {name: _pending(name, str(error)) for name in names}
            return [], {name: Outcome(name, error.code, str(error)) for name in names}
        assert isinstance(reply, CreatedTopics), "the reply to its request"
        created, errors = [], {}
        for row in reply.topics:
            if row.error is None or row.error is ErrorCode.TOPIC_ALREADY_EXISTS:
                created.append(row.name)
            else:
                errors[row.name] = Outcome(row.name, row.error, row.message)
        return created, errors


def _validated(image: ClusterImage, names: list[str]) -> tuple[list[str], dict[str, Outcome]]:
    """Split names into valid ones and errors."""
    valid, errors = [], {}
    for name in names:
        try:
            check_name(image, name)
        except TidelogError as error:
            errors[name] = Outcome(name, error.code, str(error))
        else:
            valid.append(name)
    return valid, errors


def _pending(name: str, reason: str) -> Outcome:
    return Outcome(name, ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name} is being created: {reason}")
