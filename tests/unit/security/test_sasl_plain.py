"""PLAIN: one frame, checked against SCRAM credentials with equal work for every outcome."""

from __future__ import annotations

import hashlib
import pickle
from random import Random

import pytest
from support.security.logins import PLAIN, SHA256, SHA512, Users, log_in, pass_frame, server_of, stored

from tidelog.model.admin_errors import SaslAuthenticationError
from tidelog.model.principals import Principal
from tidelog.security.sasl.client import begin_as_client
from tidelog.security.sasl.exchange import Derive, Done, Failed, Reason
from tidelog.security.secrets import Secret


def users() -> Users:
    return Users(
        ("alice", SHA256, "secret"), ("bob", SHA512, "sécret"), ("carol", SHA256, "one"), ("carol", SHA512, "two")
    )


@pytest.mark.parametrize(
    ("user", "password"), [("alice", "secret"), ("bob", "sécret"), ("carol", "one"), ("carol", "two")]
)
def test_a_password_of_any_credential_logs_in(user: str, password: str) -> None:
    outcome = log_in(server_of(users(), PLAIN), PLAIN, user, password)
    assert outcome == Done(Principal("User", user), b"", None)


@pytest.mark.parametrize(
    ("user", "password"), [("alice", "Secret"), ("mallory", "secret"), ("alice", "sécret"), ("alice", "bell\a")]
)
def test_a_wrong_password_and_an_unknown_user_fail_alike(user: str, password: str) -> None:
    assert log_in(server_of(users(), PLAIN), PLAIN, user, password) == Failed(Reason.REJECTED, user)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"alice",
        b"alice\0secret",
        b"\0alice\0",
        b"\0\0secret",
        b"\0alice\0secret\0",
        b"\0alice\0sec\xffret",
        b"bob\0alice\0secret",
        b"\0" + b"x" * 513 + b"\0secret",
        b"\0alice\0" + b"x" * 2049,
        b"\0alice\0" + "\ufdfa".encode() * 114,
    ],
)
def test_a_malformed_frame_fails_before_any_work(frame: bytes) -> None:
    assert server_of(users(), PLAIN).step(frame) == Failed(Reason.MALFORMED)


def test_the_user_may_be_repeated_as_authorization_identity() -> None:
    assert isinstance(pass_frame(server_of(users(), PLAIN), b"alice\0alice\0secret"), Done)


def test_a_long_frame_is_not_looked_at() -> None:
    assert server_of(users(), PLAIN).step(b"\0alice\0" + b"x" * 3072) == Failed(Reason.TOO_LONG)


def test_the_work_is_the_same_for_every_user(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = users()
    everybody.replace({("dave", SHA256): stored(SHA256, "x", iterations=12_000)})
    done: list[tuple[str, int]] = []
    derive = hashlib.pbkdf2_hmac

    def counted(digest: str, password: bytes, salt: bytes, iterations: int) -> bytes:
        done.append((digest, iterations))
        return derive(digest, password, salt, iterations)

    monkeypatch.setattr("hashlib.pbkdf2_hmac", counted)
    work = {}
    for user in ("alice", "bob", "carol", "dave", "mallory"):
        done.clear()
        pass_frame(server_of(everybody, PLAIN), f"\0{user}\0wrong".encode())
        work[user] = {name: sum(count for digest, count in done if digest == name) for name in ("sha256", "sha512")}
    assert set(map(str, work.values())) == {str({"sha256": 12_000, "sha512": 4096})}


def test_the_work_can_be_done_in_another_process_and_shows_no_password() -> None:
    server = server_of(users(), PLAIN)
    work = server.step(b"\0alice\0secret")
    assert isinstance(work, Derive)
    assert "secret" not in repr(work)
    function, arguments = pickle.loads(pickle.dumps((work.function, work.arguments)))
    assert isinstance(server.derived(function(*arguments)), Done)


@pytest.mark.parametrize("new_password", [None, "other"])
def test_a_user_who_is_removed_or_changed_during_the_work_is_not_let_in(new_password: str | None) -> None:
    everybody = users()
    server = server_of(everybody, PLAIN)
    work = server.step(b"\0alice\0secret")
    assert isinstance(work, Derive)
    everybody.remove("alice", SHA256)
    if new_password:
        everybody.replace({("alice", SHA256): stored(SHA256, new_password)})
    assert server.derived(work.run()) == Failed(Reason.REJECTED, "alice")


def test_a_frame_during_the_work_ends_the_exchange() -> None:
    server = server_of(users(), PLAIN)
    work = server.step(b"\0alice\0secret")
    assert isinstance(work, Derive)
    assert server.step(b"\0alice\0secret") == Failed(Reason.MALFORMED)
    assert server.derived(work.run()) == Failed(Reason.OVER)


@pytest.mark.parametrize(("user", "password"), [("", "x"), ("a", ""), ("a\0", "x"), ("a", "x\0y")])
def test_the_client_sends_no_frame_that_means_something_else(user: str, password: str) -> None:
    with pytest.raises(SaslAuthenticationError):
        begin_as_client(PLAIN, user, Secret(password), Random(1))


def test_the_client_expects_nothing_from_the_server() -> None:
    client = begin_as_client(PLAIN, "alice", Secret("secret"), Random(1))
    assert client.first() == b"\0alice\0secret"
    with pytest.raises(SaslAuthenticationError):
        client.step(b"more")
    assert client.step(b"") is None
    assert client.is_complete
    with pytest.raises(SaslAuthenticationError):
        client.step(b"")
