"""The mechanisms that a listener offers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.model.admin_errors import UnsupportedSaslMechanismError
from tidelog.security.credentials import SCRAM_DIGESTS, Credentials
from tidelog.security.sasl.exchange import Exchange
from tidelog.security.sasl.plain import PlainExchange
from tidelog.security.sasl.scram import ScramExchange, draw_nonce

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

PLAIN = "PLAIN"
MECHANISMS = (PLAIN, *SCRAM_DIGESTS)


def begin(mechanism: str, enabled: Collection[str], credentials: Credentials, random: Random) -> Exchange:
    """Begin a login by a mechanism that the client chose. Raises `UnsupportedSaslMechanismError`."""
    if mechanism not in enabled:
        raise UnsupportedSaslMechanismError(
            f"mechanism {mechanism[:40]!r}: this listener has {', '.join(sorted(enabled))}"
        )
    assert mechanism in MECHANISMS, "the configuration allows only these"
    if mechanism == PLAIN:
        return Exchange(PlainExchange(credentials))
    return Exchange(ScramExchange(mechanism, credentials, draw_nonce(random)))
