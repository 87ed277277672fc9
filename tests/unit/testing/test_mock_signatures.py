"""A mock that cannot stand in for the real thing would let a program pass that does not run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tidelog.client.admin.threaded import Admin
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.producer.threaded import Producer
from tidelog.testing import MockAdmin, MockConsumer, MockProducer

PAIRS: list[tuple[type[Any], type[Any]]] = [(Producer, MockProducer), (Consumer, MockConsumer), (Admin, MockAdmin)]
SPECIAL = {"__enter__", "__exit__", "__iter__"}


def methods(kind: type[Any]) -> set[str]:
    return {
        name
        for name in dir(kind)
        if (not name.startswith("_") or (name in SPECIAL and name in dir(kind))) and callable(getattr(kind, name))
    }


@pytest.mark.parametrize(("real", "mock"), PAIRS, ids=lambda kind: kind.__name__)
def test_a_mock_has_every_method_with_the_same_signature(real: type[Any], mock: type[Any]) -> None:
    assert len(methods(real)) >= 8
    missing = methods(real) - methods(mock)
    assert not missing
    differ = {
        name: (str(inspect.signature(getattr(real, name))), str(inspect.signature(getattr(mock, name))))
        for name in methods(real)
        if inspect.signature(getattr(real, name)) != inspect.signature(getattr(mock, name))
    }
    assert not differ


@pytest.mark.parametrize(("real", "mock"), PAIRS, ids=lambda kind: kind.__name__)
def test_a_mock_takes_what_the_real_one_is_made_with(real: type[Any], mock: type[Any]) -> None:
    ours = inspect.signature(mock.__init__).parameters
    for name, parameter in inspect.signature(real.__init__).parameters.items():
        assert ours[name].kind is parameter.kind
    made = mock("localhost:9292", client_id="me")
    made.close()
    with pytest.raises(ValueError, match="no_such_option"):
        mock("localhost:9292", no_such_option=1)
