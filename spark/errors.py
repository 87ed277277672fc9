"""Errors for data that a query can no longer read. Pure.

    TopicRecreatedError   the topic was deleted and created again: another topic with the same name
    TopicDeletedError     the topic was deleted
    NotSubscribedError    the options no longer name a topic that the query has read
    TruncationError       the log no longer holds records that were read, or holds others at their offsets
    ExpiredRangeError     retention or DeleteRecords removed records before the query read them

With `failOnDataLoss=true` they end the query. Otherwise they are logged, and the query goes on as each `remedy` says.
"""

from __future__ import annotations

from tidelog.model.errors import ErrorCode, TidelogError

_CHOICE = "or set failOnDataLoss=false to go on"


class DataLossError(TidelogError):
    """Records that the query has read, or should read, are gone. `topic` and `partition` name where."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE
    remedy = ""
    """What failOnDataLoss=false does instead."""

    def __init__(self, message: str, *, topic: str, partition: int = -1) -> None:
        super().__init__(f"{message}; {_CHOICE} {self.remedy}")
        self.topic = topic
        self.partition = partition


class TopicRecreatedError(DataLossError):
    code = ErrorCode.UNKNOWN_TOPIC_ID
    remedy = "with the new topic from its beginning"

    def __init__(self, topic: str, *, known_id: str, found_id: str) -> None:
        super().__init__(
            f"topic '{topic}' was deleted and created again: the checkpoint has id {known_id}, the cluster has "
            f"id {found_id}; use a new checkpoint",
            topic=topic,
        )
        self.known_id = known_id
        self.found_id = found_id


class TopicDeletedError(DataLossError):
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    remedy = "without it"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic '{topic}', which the query has read, was deleted; use a new checkpoint", topic=topic)


class NotSubscribedError(DataLossError):
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    remedy = "without it"

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic '{topic}', which the query has read, is not subscribed any more; subscribe it again, use a new "
            "checkpoint",
            topic=topic,
        )


class TruncationError(DataLossError):
    remedy = "from the offset where the log diverges"

    def __init__(self, topic: str, partition: int, *, offset: int, diverges: int) -> None:
        super().__init__(
            f"{topic}-{partition} was truncated: the query has read, or planned, up to offset {offset}, but the log "
            f"has other records, or none, from offset {diverges} on (an unclean election?); use a new checkpoint",
            topic=topic,
            partition=partition,
        )
        self.offset = offset
        self.diverges = diverges


class ExpiredRangeError(DataLossError):
    remedy = "from the first record that is left"

    def __init__(self, topic: str, partition: int, *, offset: int, start: int) -> None:
        super().__init__(
            f"{topic}-{partition}: offsets {offset} to {start - 1} expired before the query read them (retention, or "
            f"deleted records); the log begins at {start}; use a new checkpoint",
            topic=topic,
            partition=partition,
        )
        self.offset = offset
        self.start = start
