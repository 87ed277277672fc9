"""Reads what clients have written, by our own consumer."""

from __future__ import annotations

from typing import Literal

import tidelog
from support.clusters.waiting import until
from tidelog.testing import LocalCluster

Isolation = Literal["read_committed", "read_uncommitted"]

READ_S = 60.0


def read_values(
    cluster: LocalCluster, topic: str, partitions: int, *, isolation: Isolation = "read_committed"
) -> dict[int, list[bytes]]:
    """The values of each partition in their order, up to the end that the isolation level shows."""
    places = [(topic, number) for number in range(partitions)]
    rows: dict[int, list[bytes]] = {number: [] for number in range(partitions)}
    with tidelog.Consumer(cluster.bootstrap, isolation=isolation, auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        ends = {place.partition: end for place, end in consumer.end_offsets(*places).items()}

        def is_read() -> bool:
            for record in consumer.poll(0.5):
                assert record.value is not None
                rows[record.partition].append(record.value)
            return all(consumer.position((topic, number)) >= ends[number] for number in range(partitions))

        until(is_read, f"the end of {topic}", timeout_s=READ_S)
    return rows
