"""Limits the replication rate of replicas that are moved or catch up. Pure: time is an argument.

`leader.replication.throttled.replicas` and `follower.replication.throttled.replicas` of a topic name replicas
(`partition:broker`, or `*`); `leader.replication.throttled.rate` and `follower.replication.throttled.rate` of a broker
are bytes per second for all of its named replicas together. In-sync replicas are never throttled: that would slow down
producers. A leader delays its pushes; a follower delays its acks, and with them the leader's credit.
"""

from tidelog.metadata import configs
from tidelog.metadata.image import ClusterImage

LEADER, FOLLOWER = "leader", "follower"
NO_LIMIT = (1 << 63) - 1


class Bucket:
    """A token bucket, refilled with `rate` bytes per second up to one second's worth. One push may make it negative.

    Invariant: `level` <= `rate`. Time never goes back.
    """

    __slots__ = ("_level", "_now_s", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._now_s = now_s

    def set_rate(self, rate: int, now_s: float) -> None:
        self._fill(now_s)
        self.rate = rate
        self._level = min(self._level, float(rate))

    def wait_s(self, now_s: float) -> float:
        """Return the wait until bytes may be spent; 0 if they may be now. At most an hour: rates change."""
        if self.rate >= NO_LIMIT:
            return 0.0
        self._fill(now_s)
        if self._level > 0:
            return 0.0
        # One byte more than the debt: a wait until exactly zero would end at zero.
        return min((1.0 - self._level) / self.rate, 3600.0) if self.rate else 3600.0

    def room(self, now_s: float) -> int:
        """Return the bytes that may be spent now; a single batch may be larger."""
        if self.rate >= NO_LIMIT:
            return NO_LIMIT
        self._fill(now_s)
        return max(0, int(self._level))

    def spend(self, size: int, now_s: float) -> None:
        if self.rate < NO_LIMIT:
            self._fill(now_s)
            self._level -= size

    def _fill(self, now_s: float) -> None:
        self._level = min(float(self.rate), self._level + (now_s - self._now_s) * self.rate)
        self._now_s = now_s


def rate_of(image: ClusterImage, side: str, broker: int) -> int:
    """Bytes a second for the throttled replicas of a broker."""
    value = configs.broker_config(image, f"{side}.replication.throttled.rate", broker).value
    assert isinstance(value, int), "a rate is an integer"
    return value


def is_named(image: ClusterImage, side: str, topic: str, partition: int, broker: int) -> bool:
    """Return whether the topic's list of throttled replicas names this one."""
    value = configs.topic_config(image, topic, f"{side}.replication.throttled.replicas").value
    return isinstance(value, tuple) and (value == ("*",) or f"{partition}:{broker}" in value)
