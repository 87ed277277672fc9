"""Topics that are made because somebody looked for them (`auto.create.topics.enable`).

Of the names in a metadata request that may create:

    name                                             its row
    known here                                       the topic
    the setting is off; one of the cluster's own     UNKNOWN_TOPIC_OR_PARTITION, as without the field
    no name of a topic                               INVALID_TOPIC
    created, or made by somebody else meanwhile      the topic; LEADER_NOT_AVAILABLE if this node does not hear in time
    refused by the controller                        its refusal
    no controller answers in time                    LEADER_NOT_AVAILABLE: it may be created yet
    more than `NAMES_MAX`                            LEADER_NOT_AVAILABLE: those of the next request are created then

LEADER_NOT_AVAILABLE is what Kafka answers here, so that every client knows what it means: ask again soon. The setting
is read from this node's copy, the numbers of partitions and replicas are the controller's to fill in.

A name that is known here is never created, and one that is created stands in the metadata log once: two requests for
the same name are two requests to the controller, which refuses the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tidelog.metadata import configs
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
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.errors import as_message, coded
from tidelog.rpc.v1 import common_pb2 as common

NAMES_MAX = 100
"""Created by one request."""
CREATE_MS = 1_000
"""For the controller. A client passes over a node that does not answer for 2 s, so both together are less."""
HEAR_MS = 500
"""For this node to hear of it."""
_OWN = frozenset({*INTERNAL_TOPICS, METADATA_TOPIC})


class AutoCreate:
    def __init__(self, link: QuorumLink) -> None:
        self._link = link

    async def create(self, names: Iterable[str]) -> dict[str, common.Error]:
        """Create those that are not there, and wait a moment until this node knows them. What to say of a name that
        is unknown here after it; a name that is not in it is unknown for the usual reason."""
        image = self._link.image
        unknown = [name for name in dict.fromkeys(names) if name not in image.topic_ids and name not in _OWN]
        if not unknown or not configs.cluster_bool(image, "auto.create.topics.enable"):
            return {}
        wanted, errors = _sorted_out(image, unknown)
        room = min(NAMES_MAX, max(1, PARTITIONS_PER_REQUEST_MAX // configs.cluster_int(image, "num.partitions")))
        errors |= {name: _not_yet(name, f"at most {room} topics are created at a time") for name in wanted[room:]}
        if not wanted:
            return errors
        made, refused = await self._ask(wanted[:room])
        errors |= refused
        await self._until_known(made)
        return errors | {name: _not_yet(name, "this node has not heard of it yet") for name in made}

    async def _ask(self, names: list[str]) -> tuple[list[str], dict[str, common.Error]]:
        """Those that are there now, and the errors of the others."""
        question = CreateTopics(topics=tuple(NewTopic(name=name) for name in names))
        try:
            reply = await self._link.ask(question, timeout_ms=CREATE_MS)
        except TidelogError as error:
            if error.retriable:
                return [], {name: _not_yet(name, str(error)) for name in names}
            return [], {name: as_message(error) for name in names}
        assert isinstance(reply, CreatedTopics), "the reply to its request"
        made, errors = [], {}
        for row in reply.topics:
            if row.error is None or row.error is ErrorCode.TOPIC_ALREADY_EXISTS:
                made.append(row.name)
            else:
                errors[row.name] = coded(row.error, row.message)
        return made, errors

    async def _until_known(self, names: list[str]) -> None:
        try:
            async with asyncio.timeout(HEAR_MS / 1000):
                await self._link.until(lambda image: all(name in image.topic_ids for name in names))
        except TimeoutError:
            return  # the answer says which are still missing


def _sorted_out(image: ClusterImage, names: list[str]) -> tuple[list[str], dict[str, common.Error]]:
    """Names that a topic can have, and what is wrong with the others."""
    good, errors = [], {}
    for name in names:
        try:
            check_name(image, name)
        except TidelogError as error:
            errors[name] = as_message(error)
        else:
            good.append(name)
    return good, errors


def _not_yet(name: str, why: str) -> common.Error:
    return coded(ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name} is being created: {why}")
