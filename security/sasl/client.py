"""The client's side of logins, as state machines without IO. Pure.

`first` is the first frame. `step` takes each frame of the server and returns the next one, or None at the end: then,
and only then, the server has proved what the mechanism lets it prove. Every error is a `SaslAuthenticationError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from scramp import ScramClient, ScramException

from tidelog.model.admin_errors import SaslAuthenticationError, UnsupportedSaslMechanismError
from tidelog.security.credentials import SCRAM_DIGESTS
from tidelog.security.sasl.mechanisms import MECHANISMS, PLAIN
from tidelog.security.sasl.scram import draw_nonce

if TYPE_CHECKING:
    from random import Random

    from tidelog.security.secrets import Secret

SERVER_FRAME_BYTES_MAX = 8192
ITERATIONS_MAX = 1_000_000
"""About a second of work: no server may ask for more."""


class ClientExchange(Protocol):
    @property
    def is_complete(self) -> bool: ...

    def first(self) -> bytes: ...

    def step(self, frame: bytes) -> bytes | None: ...


def begin_as_client(mechanism: str, user: str, password: Secret, random: Random) -> ClientExchange:
    """Raises `UnsupportedSaslMechanismError`, and `SaslAuthenticationError` for a user or password that the mechanism
    cannot send."""
    if mechanism == PLAIN:
        return PlainClient(user, password)
    if mechanism in SCRAM_DIGESTS:
        return ScramClientExchange(mechanism, user, password, draw_nonce(random))
    raise UnsupportedSaslMechanismError(f"mechanism {mechanism[:40]!r}: there are {', '.join(MECHANISMS)}")


class PlainClient:
    """RFC 4616. The server proves nothing: TLS has to."""

    def __init__(self, user: str, password: Secret) -> None:
        if not user or not password.reveal() or "\0" in user + password.reveal():
            raise SaslAuthenticationError("PLAIN needs a user and a password, without NUL characters")
        self._user = user
        self._password = password
        self.is_complete = False

    def first(self) -> bytes:
        return f"\0{self._user}\0{self._password.reveal()}".encode("utf-8", "surrogateescape")

    def step(self, frame: bytes) -> bytes | None:
        if frame or self.is_complete:
            raise SaslAuthenticationError("PLAIN: the server sent a message that the mechanism does not have")
        self.is_complete = True
        return None


class ScramClientExchange:
    """RFC 5802. `step` takes milliseconds for the server's first frame: it derives the keys of the password."""

    def __init__(self, mechanism: str, user: str, password: Secret, nonce: str) -> None:
        self._mechanism = mechanism
        self.is_complete = False
        self._has_sent_proof = False
        client = None
        try:
            client = ScramClient([mechanism], user, password.reveal(), c_nonce=nonce)
        except ScramException as error:
            reason = str(error)
        if client is None:  # outside of the handler: what `scramp` raises has the password in its frames
            raise SaslAuthenticationError(f"{mechanism}: the user or the password cannot be sent: {reason}")
        self._client = client

    def first(self) -> bytes:
        return str(self._client.get_client_first()).encode()

    def step(self, frame: bytes) -> bytes | None:
        if self.is_complete or len(frame) > SERVER_FRAME_BYTES_MAX:
            raise SaslAuthenticationError(f"{self._mechanism}: the server sent a message too many, or one too long")
        try:
            return self._step(frame.decode("utf-8"))
        except (UnicodeDecodeError, ScramException) as error:
            reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        raise SaslAuthenticationError(f"{self._mechanism}: {reason}")

    def _step(self, message: str) -> bytes | None:
        if self._has_sent_proof:
            self._client.set_server_final(message)
            self.is_complete = True
            return None
        self._client.set_server_first(message)
        if int(self._client.iterations) > ITERATIONS_MAX:
            raise SaslAuthenticationError(
                f"{self._mechanism}: the server wants {self._client.iterations} iterations, more than {ITERATIONS_MAX}"
            )
        self._has_sent_proof = True
        return str(self._client.get_client_final()).encode()
