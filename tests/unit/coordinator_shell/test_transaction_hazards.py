"""What would keep a transaction open for ever, or tear it, and does not: settings, internal topics, lost markers."""

from __future__ import annotations

from support.brokers.cluster import RunningBroker
from support.brokers.transactions import append_open, transactional
from support.transactions.cluster import TransactionCluster

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.services.context import INTERNAL
from tidelog.services.transaction_requests import AddPartitionsToTransaction, EndTransaction, HangingTransaction


def test_a_partition_of_an_internal_topic_is_no_part_of_a_transaction() -> None:
    with TransactionCluster(seed=41, orders=1) as cluster:
        app = cluster.owner("app")
        owner = {"transactional_id": "app", "producer_id": app.producer_id, "epoch": app.epoch}

        def add(*names: str) -> list[ErrorCode | None]:
            request = AddPartitionsToTransaction(**owner, partitions=[(name, 0) for name in names])  # type: ignore[arg-type]
            errors: list[TidelogError | None] = cluster.ask_owner(
                "app", lambda service: service.add_partitions(INTERNAL, request)
            )
            return [None if error is None else error.code for error in errors]

        assert add("orders", "__transaction_state") == [ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.INVALID_TOPIC]
        assert not cluster.state_of("app").is_open
        assert add("orders") == [None]
        end = EndTransaction(**owner, is_commit=True, version=1)  # type: ignore[arg-type]
        cluster.ask_owner("app", lambda service: service.end(INTERNAL, end))
        cluster.until_idle("app")


def test_an_open_transaction_ends_although_its_record_is_over_the_limit_of_topics_by_now() -> None:
    with TransactionCluster(seed=42, orders=1) as cluster:
        app = cluster.owner("app")
        app.send(("orders", 0), b"one")
        cluster.set_cluster("message.max.bytes", "600")
        app.end(token=b"t" * 1_000)
        cluster.until_idle("app")
        assert cluster.committed_values(("orders", 0)) == [b"one"]
        assert cluster.state_of("app").last_token == b"t" * 1_000


def test_an_operators_marker_does_not_fence_the_coordinator() -> None:
    """With the coordinator epoch of the request in the log, no marker of the coordinator would be taken any more."""
    with TransactionCluster(seed=43, orders=1) as cluster:
        app, place = cluster.owner("app"), ("orders", 0)
        partition = cluster.partition_id(*place)
        leader = cluster.leading(partition)

        async def hang(_: RunningBroker) -> None:
            append_open(leader, transactional(b"lost", app.producer_id, app.epoch), app.producer_id, app.epoch)

        cluster.on_broker(cluster.leader(partition), hang)
        hanging = HangingTransaction(
            partition=place, producer_id=app.producer_id, epoch=app.epoch, coordinator_epoch=(1 << 31) - 1
        )
        assert cluster.call(cluster.leader(partition), lambda service: service.abort_hanging(INTERNAL, [hanging])) == [
            None
        ]
        app.init()
        app.send(place, b"one")
        app.end()
        cluster.until_idle("app")
        assert cluster.last_stable(place) == (4, 4)
