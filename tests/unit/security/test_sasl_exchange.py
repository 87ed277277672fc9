"""Limits of exchanges, and that no failure says more than another."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from support.security.logins import ALL, PLAIN, SHA256, SHA512, Users, log_in, pass_frame, server_of

from tidelog.model.admin_errors import UnsupportedSaslMechanismError
from tidelog.security.credentials import Credentials, ScramCredential
from tidelog.security.sasl.exchange import FAILURE_TEXT, Done, Exchange, Failed, Outcome, Reason, Reply
from tidelog.security.sasl.mechanisms import MECHANISMS, begin


class Endless:
    frame_bytes_max = 4

    def step(self, frame: bytes) -> Outcome:
        return Reply(frame)

    def derived(self, keys: tuple[bytes, ...]) -> Outcome:
        raise AssertionError("it has asked for none")


def test_an_exchange_has_a_bounded_number_of_frames() -> None:
    exchange = Exchange(Endless())
    assert [exchange.step(b"x") for _ in range(Exchange.FRAMES_MAX)] == [Reply(b"x")] * Exchange.FRAMES_MAX
    assert exchange.step(b"x") == Failed(Reason.MALFORMED)
    assert exchange.is_over


def test_a_frame_has_a_bounded_size() -> None:
    exchange = Exchange(Endless())
    assert exchange.step(b"1234") == Reply(b"1234")
    assert exchange.step(b"12345") == Failed(Reason.TOO_LONG)


def test_keys_that_nobody_asked_for_end_an_exchange() -> None:
    exchange = Exchange(Endless())
    assert exchange.derived((b"",)) == Failed(Reason.OVER)
    assert exchange.step(b"x") == Failed(Reason.OVER)


@pytest.mark.parametrize("mechanism", ALL)
@pytest.mark.parametrize("password", ["secret", "wrong"])
def test_nothing_follows_the_end(mechanism: str, password: str) -> None:
    server = server_of(Users(("alice", SHA256, "secret")), mechanism)
    first = log_in(server, mechanism, "alice", password)
    for frame in (b"", b"\0alice\0secret", b"n,,n=alice,r=abc"):
        assert pass_frame(server, frame) == Failed(Reason.OVER)
    assert isinstance(first, Done) == (password == "secret" and mechanism in (PLAIN, SHA256))


def test_a_listener_has_only_its_mechanisms() -> None:
    credentials = Users().credentials
    for mechanism in (*MECHANISMS, "GSSAPI", "scram-sha-256", "", "x" * 1000):
        with pytest.raises(UnsupportedSaslMechanismError) as raised:
            begin(mechanism, [], credentials, Random(1))
        assert len(str(raised.value)) < 200
    with pytest.raises(UnsupportedSaslMechanismError, match="this listener has SCRAM-SHA-256"):
        begin(PLAIN, [SHA256], credentials, Random(1))


def test_the_text_of_failures_names_neither_users_nor_reasons() -> None:
    assert not any(reason.value in FAILURE_TEXT for reason in Reason)
    assert "{" not in FAILURE_TEXT


@pytest.mark.parametrize("mechanism", ALL)
def test_a_decoy_whose_password_is_known_logs_nobody_in(mechanism: str) -> None:
    class KnownDecoys(Credentials):
        def scram(self, user: str, mechanism: str) -> ScramCredential:
            return dataclasses.replace(super().scram(user, mechanism), is_real=False)

    users = Users(("alice", SHA256, "secret"), ("alice", SHA512, "secret"))
    users.credentials = KnownDecoys(lambda: users.image, secret=bytes(16))
    assert log_in(server_of(users, mechanism), mechanism, "alice", "secret") == Failed(Reason.REJECTED, "alice")
