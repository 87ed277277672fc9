"""Users with passwords, and whole logins between the two sides of a mechanism."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from random import Random

from tidelog.metadata.image import Credential
from tidelog.metadata.users import MECHANISMS, scram_keys
from tidelog.model.maps import Map
from tidelog.security.credentials import Credentials
from tidelog.security.sasl.client import begin_as_client
from tidelog.security.sasl.exchange import Derive, Done, Exchange, Failed, Outcome, Reply
from tidelog.security.sasl.mechanisms import begin
from tidelog.security.secrets import Secret

SHA256, SHA512, PLAIN = "SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"
ALL = (PLAIN, SHA256, SHA512)
SALT = bytes(range(16))


def stored(mechanism: str, password: str, *, salt: bytes = SALT, iterations: int = 4096) -> Credential:
    """The credential that the controller stores of a password."""
    salted = hashlib.pbkdf2_hmac(MECHANISMS[mechanism], password.encode(), salt, iterations)
    return Credential(salt, *scram_keys(mechanism, salted), iterations)


class Users:
    """The users of an image that a test replaces."""

    def __init__(self, *entries: tuple[str, str, str]) -> None:
        """(user, mechanism, password)"""
        self.image: Map[tuple[str, str], Credential] = Map(
            {(user, mechanism): stored(mechanism, password) for user, mechanism, password in entries}
        )
        self.credentials = Credentials(lambda: self.image, secret=b"a secret of this cluster")

    def remove(self, user: str, mechanism: str) -> None:
        self.image = self.image.delete((user, mechanism))

    def replace(self, changes: Mapping[tuple[str, str], Credential]) -> None:
        self.image = self.image.update(changes)


def server_of(users: Users, mechanism: str, *, seed: int = 1) -> Exchange:
    return begin(mechanism, ALL, users.credentials, Random(seed))


def pass_frame(server: Exchange, frame: bytes) -> Reply | Done | Failed:
    """Pass a frame, and do the work that the exchange asks for."""
    outcome: Outcome = server.step(frame)
    if isinstance(outcome, Derive):
        outcome = server.derived(outcome.run())
    assert not isinstance(outcome, Derive)
    return outcome


def log_in(server: Exchange, mechanism: str, user: str, password: str, *, seed: int = 2) -> Done | Failed:
    """Run a login to its end; a client that gets Done has verified the server."""
    client = begin_as_client(mechanism, user, Secret(password), Random(seed))
    frame: bytes | None = client.first()
    while frame is not None:
        outcome = pass_frame(server, frame)
        if isinstance(outcome, Failed):
            return outcome
        frame = client.step(outcome.frame)
        if isinstance(outcome, Done):
            assert frame is None
            assert client.is_complete
            return outcome
    raise AssertionError("the client is done before the server")
