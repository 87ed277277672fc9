"""Creates the `ClusterClient` of a producer, consumer or admin client from its options."""

from __future__ import annotations

from random import Random

from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.io_thread import IoThread
from tidelog.client.option_table import CommonConfig
from tidelog.world.real.clock import SystemClock


def client_config(options: CommonConfig) -> ClientConfig:
    return ClientConfig(
        request_timeout_ms=options.request_timeout_ms,
        retry_backoff_ms=options.retry_backoff_ms,
        retry_backoff_max_ms=options.retry_backoff_max_ms,
        metadata_max_age_ms=options.metadata_max_age_ms,
        bootstrap_wait_ms=options.bootstrap_wait_ms,
    )


def new_cluster(host: IoThread, options: CommonConfig) -> ClusterClient:
    """On the IO thread."""
    return ClusterClient(
        options.bootstrap,
        host.connections(options.bootstrap),
        random=Random(),
        clock=SystemClock(),
        config=client_config(options),
    )
