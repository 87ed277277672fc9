"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, 7677), by `scramp`, without channel binding. Pure.

    client-first   n,,n=user,r=nonce               ->
                                                   <-  server-first   r=nonce+ours,s=salt,i=iterations
    client-final   c=biws,r=nonce+ours,p=proof     ->
                                                   <-  server-final   v=signature

`scramp` checks the form of messages (its errors are `ScramException`), the nonce, the proof in constant time, and the
order of calls. Replayed frames fail, because each exchange has its own nonce. The rest is here: UTF-8, sizes, the work
of SASLprep, the look-ups, and that each error looks the same.

The credential is looked up twice: its salt at the beginning, all of it at the end. A user who was removed or got
another password meanwhile cannot finish.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import TYPE_CHECKING

from scramp import ScramException, ScramMechanism

from tidelog.model.principals import Principal
from tidelog.security.credentials import SCRAM_DIGESTS, Credentials, ScramCredential
from tidelog.security.sasl.exchange import Done, Failed, Outcome, Reason, Reply

if TYPE_CHECKING:
    from random import Random

NONCE_BYTES = 24
FRAME_BYTES_MAX = 3072
"""The longest user name that metadata accept, escaped, and a nonce."""
NAME_LENGTH_MAX = 512
"""As in metadata."""


def is_prepared_short(text: str, length_max: int) -> bool:
    """Return whether SASLprep makes a short text of it. SASLprep takes microseconds for each character, and one
    character of the text can become 18, so it must not be called before."""
    return len(text) <= length_max and len(unicodedata.normalize("NFKC", text)) <= length_max


def draw_nonce(random: Random) -> str:
    """`random` is the node's, which nobody can predict in production."""
    return random.randbytes(NONCE_BYTES).hex()


class ScramExchange:
    """The server's side of one login."""

    frame_bytes_max = FRAME_BYTES_MAX

    def __init__(self, mechanism: str, credentials: Credentials, nonce: str) -> None:
        """The nonce is used for one exchange."""
        assert mechanism in SCRAM_DIGESTS, mechanism
        self._mechanism = mechanism
        self._credentials = credentials
        self._user = ""
        self._offered: ScramCredential | None = None
        self._server = ScramMechanism(mechanism).make_server(self._look_up, s_nonce=nonce)

    def step(self, frame: bytes) -> Outcome:
        try:
            message = frame.decode("utf-8")
        except UnicodeDecodeError:
            return self._failed(Reason.MALFORMED)
        try:
            return self._first(message) if self._offered is None else self._final(message)
        except ScramException as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, ValueError | ScramException):
                raise error.__cause__ from None  # a defect of ours inside the look-up is no failed login
            return self._failed(Reason.MALFORMED)

    def derived(self, keys: tuple[bytes, ...]) -> Outcome:
        raise AssertionError("the server derives no keys in SCRAM")

    def _look_up(self, user: str) -> tuple[bytes, bytes, bytes, int]:
        self._user = user
        found = self._offered = self._credentials.scram(user, self._mechanism)
        return found.salt, found.stored_key, found.server_key, found.iterations

    def _first(self, message: str) -> Outcome:
        fields = message.split(",", 3)
        name = fields[2].removeprefix("n=").replace("=2C", ",").replace("=3D", "=") if len(fields) > 2 else ""
        if not is_prepared_short(name, NAME_LENGTH_MAX):
            return Failed(Reason.TOO_LONG)
        self._server.set_client_first(message)
        return Reply(self._server.get_server_first().encode())

    def _final(self, message: str) -> Outcome:
        try:
            self._server.set_client_final(message)
            is_proved = True
            final = self._server.get_server_final().encode()
        except ScramException:
            is_proved, final = False, b""
        # At the end in any case, so that all refusals take the same work.
        current = self._credentials.scram(self._user, self._mechanism)
        if not (is_proved and current.is_real and current == self._offered):
            return self._failed(Reason.REJECTED)
        return Done(Principal("User", self._user), final)

    def _failed(self, reason: Reason) -> Failed:
        return Failed(reason, self._user)


def derive_stored_key(mechanism: str, password: str, salt: bytes, iterations: int, iterations_max: int) -> bytes:
    """Return the stored key of a password, after the work of `iterations_max`. Empty if SASLprep allows no such
    password. Takes milliseconds."""
    try:
        _, stored_key, _, _ = ScramMechanism(mechanism).make_auth_info(password, iterations, salt)
    except ScramException:
        return b""
    if iterations_max > iterations:
        hashlib.pbkdf2_hmac(SCRAM_DIGESTS[mechanism], password.encode(), salt, iterations_max - iterations)
    return bytes(stored_key)
