"""What a query that reads can lose, told apart. Pure.

    TopicMadeAnewError    the topic was deleted and created again: another topic under the same name
    TopicDeletedError     the topic is gone
    NotSubscribedError    the options have left out a topic that the query has read
    TruncationError       records that were read are not in the log any more, others stand in their place
    ExpiredRangeError     retention, or somebody who deleted records, was faster than the query

With `failOnDataLoss=true` they end the query; otherwise they are logged, and the query goes on as each of them says.
"""

from __future__ import annotations

from tidelog.model.errors import ErrorCode, TidelogError

_CHOICE = "or set failOnDataLoss=false to go on"


class DataLossError(TidelogError):
    """Something that the query should have read, or has read, is not there. `topic` says where."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE
    remedy = ""
    """What failOnDataLoss=false does about it."""

    def __init__(self, message: str, *, topic: str, partition: int = -1) -> None:
        super().__init__(f"{message}; {_CHOICE} {self.remedy}")
        self.topic = topic
        self.partition = partition


class TopicMadeAnewError(DataLossError):
    code = ErrorCode.UNKNOWN_TOPIC_ID
    remedy = "with the new topic from its beginning"

    def __init__(self, topic: str, *, known_id: str, found_id: str) -> None:
        super().__init__(
            f"topic '{topic}' was deleted and made anew: the checkpoint has offsets of id {known_id}, the cluster has "
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
    remedy = "from where the log departs from what was read"

    def __init__(self, topic: str, partition: int, *, offset: int, departs: int) -> None:
        super().__init__(
            f"{topic}-{partition} was truncated: the query has read, or planned, up to offset {offset}, but the log "
            f"has other records, or none, from offset {departs} on (an unclean election?); use a new checkpoint",
            topic=topic,
            partition=partition,
        )
        self.offset = offset
        self.departs = departs


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
