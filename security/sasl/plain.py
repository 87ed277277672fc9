"""PLAIN (RFC 4616): one frame with the password, checked against the SCRAM credentials of the user. Pure.

    [authzid] NUL authcid NUL password

The server derives the keys of the password, which takes milliseconds, so the caller runs that elsewhere (`Derive`). It
derives the keys of every SCRAM mechanism, for unknown users from decoys, and each with the work of the user with the
most iterations: a refusal takes the same time for all. A password that matches one credential is enough.

An authorization identity may only repeat the user: nobody acts as somebody else.
"""

from __future__ import annotations

import hmac

from tidelog.model.principals import Principal
from tidelog.security.credentials import SCRAM_DIGESTS, Credentials, ScramCredential
from tidelog.security.sasl.exchange import Derive, Done, Failed, Outcome, Reason
from tidelog.security.sasl.scram import NAME_LENGTH_MAX, derive_stored_key, is_prepared_short

FRAME_BYTES_MAX = 3072
PASSWORD_LENGTH_MAX = 2048


class PlainExchange:
    """The server's side of one login."""

    frame_bytes_max = FRAME_BYTES_MAX

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._user = ""
        self._offered: dict[str, ScramCredential] = {}

    def step(self, frame: bytes) -> Outcome:
        parts = _parse(frame)
        if parts is None:
            return Failed(Reason.MALFORMED)
        self._user, password = parts
        self._offered = self._look_up()
        work = tuple(
            (mechanism, offered.salt, offered.iterations, self._credentials.iterations_max(mechanism))
            for mechanism, offered in self._offered.items()
        )
        return Derive(derive_keys, (password, work))

    def derived(self, keys: tuple[bytes, ...]) -> Outcome:
        is_proved = False
        current = self._look_up()
        for (mechanism, offered), key in zip(self._offered.items(), keys, strict=True):
            is_equal = hmac.compare_digest(key, offered.stored_key)
            is_proved |= is_equal & offered.is_real & (current[mechanism] == offered)
        return Done(Principal("User", self._user)) if is_proved else Failed(Reason.REJECTED, self._user)

    def _look_up(self) -> dict[str, ScramCredential]:
        return {mechanism: self._credentials.scram(self._user, mechanism) for mechanism in SCRAM_DIGESTS}


def derive_keys(password: str, work: tuple[tuple[str, bytes, int, int], ...]) -> tuple[bytes, ...]:
    """Return a stored key for each (mechanism, salt, iterations, iterations of the work)."""
    return tuple(
        derive_stored_key(mechanism, password, salt, iterations, iterations_max)
        for mechanism, salt, iterations, iterations_max in work
    )


def _parse(frame: bytes) -> tuple[str, str] | None:
    try:
        parts = frame.decode("utf-8").split("\0")
    except UnicodeDecodeError:
        return None
    if len(parts) != 3:
        return None
    identity, user, password = parts
    if not user or not password or identity not in ("", user):
        return None
    if len(user) > NAME_LENGTH_MAX or not is_prepared_short(password, PASSWORD_LENGTH_MAX):
        return None
    return user, password
