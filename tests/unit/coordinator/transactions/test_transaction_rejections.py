"""What the coordinator tells the program that it rejects: whose fault it is, and what follows."""

from __future__ import annotations

import re

import pytest
from support.transactions.machine import ID, TIMEOUT_MS, Coordinator

from tidelog.model.errors import TidelogError
from tidelog.model.transaction_errors import ProducerFencedError, TransactionAbortableError


def opened() -> Coordinator:
    coordinator = Coordinator()
    coordinator.init()
    coordinator.add(0)
    return coordinator


def rejects(coordinator: Coordinator, request: object, kind: type[TidelogError], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        coordinator.submit(request)


def test_a_fenced_owner_learns_that_a_newer_instance_has_its_id() -> None:
    coordinator = opened()
    request = coordinator.end_request()
    coordinator.init()
    text = (
        f"transactional id '{ID}': a newer instance uses it (producer 10, epoch 1; this one has producer 10, epoch 0)"
    )
    rejects(coordinator, request, ProducerFencedError, text)


def test_an_owner_learns_who_has_aborted_its_transaction() -> None:
    coordinator = opened()
    end, add = coordinator.end_request(), coordinator.add_request(1)
    assert coordinator.time_out()
    text = f"was aborted by its timeout ({TIMEOUT_MS} ms; transaction.prepared.timeout.ms if it was prepared)"
    for request in (end, add):
        rejects(coordinator, request, TransactionAbortableError, text)
    coordinator = opened()
    end, add = coordinator.end_request(), coordinator.add_request(1)
    coordinator.operator_aborts()
    for request in (end, add):
        rejects(
            coordinator, request, TransactionAbortableError, "the transaction of epoch 0 was aborted by an operator"
        )


def test_an_owner_learns_which_member_is_not_in_its_transaction() -> None:
    coordinator = Coordinator()
    coordinator.init()
    text = f"transactional id '{ID}': 55 is no member of this transaction: it has joined an earlier one, or none"
    rejects(coordinator, coordinator.end_request(members=(55,)), TransactionAbortableError, text)
    coordinator.add(0)
    rejects(coordinator, coordinator.end_request(members=(55,)), TransactionAbortableError, text)
