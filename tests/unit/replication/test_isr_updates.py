"""Answers to changes of in-sync sets that do not say what became of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.brokers.cluster import NodeId, orders_cluster

from tidelog.metadata.partitions import AlterPartition
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    RemoteError,
    StreamBrokenError,
    TidelogError,
    UnsupportedVersionError,
)
from tidelog.replication.leader_replica import LeaderReplica


def remote(code: ErrorCode) -> RemoteError:
    return RemoteError("an error after the decision, or before it", code=code)


@pytest.mark.parametrize(
    ("error", "may_be_done"),
    [
        (remote(ErrorCode.UNKNOWN_SERVER_ERROR), True),
        (remote(ErrorCode.REQUEST_TIMED_OUT), True),
        (remote(ErrorCode.STORAGE_ERROR), True),
        (StreamBrokenError("the connection is gone"), True),
        (InvalidRequestError("the reply cannot be read"), True),
        (UnsupportedVersionError("the reply has a field that this version does not know"), True),
        (remote(ErrorCode.STALE_BROKER_EPOCH), False),
        (remote(ErrorCode.BROKER_ID_NOT_REGISTERED), False),
        (remote(ErrorCode.UNSUPPORTED_VERSION), False),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.code.name}" if isinstance(value, TidelogError) else "",
)
def test_a_change_counts_as_not_done_only_if_the_controller_says_so(
    error: TidelogError, may_be_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[bool] = []
    failed = LeaderReplica.failed

    def record(self: LeaderReplica, *, may_be_done: bool) -> None:
        failures.append(may_be_done)
        failed(self, may_be_done=may_be_done)

    monkeypatch.setattr(LeaderReplica, "failed", record)
    with orders_cluster(419, b"0") as (cluster, orders):
        client = cluster.brokers[NodeId(11)].agent.client
        call, answers = client.call, [error]

        async def call_and_fail(request: object, *, is_repeatable: bool = False) -> Any:
            if isinstance(request, AlterPartition) and answers:
                if may_be_done:
                    await call(request, is_repeatable=is_repeatable)
                raise answers.pop()
            return await call(request, is_repeatable=is_repeatable)

        client.call = call_and_fail  # type: ignore[method-assign]
        cluster.kill(NodeId(13))
        cluster.until(lambda: cluster.leading(orders).state.isr == {11, 12})
        cluster.write(orders, b"1")
        cluster.start_brokers(13)
        cluster.until(lambda: not answers and cluster.leading(orders).state.isr == {11, 12, 13})
        assert failures[0] is may_be_done
        assert cluster.failures == []
