"""UUIDs in the text form of Kafka: 16 bytes as 22 characters of base64url, without padding. Pure."""

import base64
import binascii
import re
from typing import Protocol
from uuid import UUID

_FORM = re.compile(r"[A-Za-z0-9_-]{22}")
RESERVED = (UUID(int=0), UUID(int=1))
"""The zero id, and the id of the metadata log."""


class RandomBits(Protocol):
    """A source of random bits, like `random.Random`."""

    def getrandbits(self, k: int, /) -> int: ...


def to_text(value: UUID) -> str:
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def from_text(text: str) -> UUID | None:
    """Returns None if the text is not an id, or the id is reserved."""
    if not _FORM.fullmatch(text):
        return None
    try:
        value = UUID(bytes=base64.b64decode(text + "==", altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return None
    return None if value in RESERVED or to_text(value) != text else value


def random_uuid(random: RandomBits) -> UUID:
    """Returns a new id. Its text never begins with a dash, which a command would read as an option."""
    while True:
        value = UUID(int=random.getrandbits(128), version=4)
        if not to_text(value).startswith("-"):
            return value
