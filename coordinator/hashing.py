"""The partition of a coordinator's topic that a group or a transactional id belongs to. Pure."""

from __future__ import annotations


def java_hash(text: str) -> int:
    """Java's `String.hashCode`, over UTF-16: every Kafka client finds a coordinator's partition with it."""
    value = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        value = (31 * value + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    return value


def partition_for(name: str, partitions: int) -> int:
    return (java_hash(name) & 0x7FFFFFFF) % partitions
