"""The numbers of the Kafka door."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.rpc.kafka.shared import Counts
from tidelog.server.metrics import Sample, counter, gauge


def kafka_samples(connections: int, counts: Counts) -> Iterable[Sample]:
    yield gauge("kafka_connections", connections, "Connections of Kafka clients.")
    yield counter("kafka_connections_accepted_total", counts.accepted, "Connections that were let in.")
    yield counter("kafka_connections_refused_total", counts.refused, "Connections past one of their limits.")
    yield counter("kafka_connections_slow_total", counts.ended_slow, "Ended: a request or an answer took too long.")
    yield counter("kafka_connections_idle_total", counts.ended_idle, "Ended: connections.max.idle.ms without a word.")
    yield counter("kafka_bytes_in_total", counts.bytes_in, "Bytes that Kafka clients have sent.")
    yield counter("kafka_bytes_out_total", counts.bytes_out, "Bytes that they were sent.")
    yield counter("kafka_malformed_total", counts.malformed, "Requests that were none, or are not served.")
    for speech, count in sorted(counts.strangers.items()):
        yield counter("kafka_strangers_total", count, "Connections that spoke something else.", speech=speech)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_requests_total", api.requests, "Requests that were answered.", api=name)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_request_errors_total", api.errors, "Answered with an error as a whole.", api=name)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_request_seconds_total", api.seconds, "From arrival to answer.", api=name)
