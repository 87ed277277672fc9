"""Ids in the form that Kafka prints: 16 bytes as 22 characters of base64url, without padding."""

from __future__ import annotations

import base64
import binascii
import re
from random import Random
from uuid import UUID

_FORM = re.compile(r"[A-Za-z0-9_-]{22}")
RESERVED = (UUID(int=0), UUID(int=1))
"""None, and the metadata log's own."""


def to_text(value: UUID) -> str:
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def from_text(text: str) -> UUID | None:
    """The id; None if the text is none, or the id is a reserved one."""
    if not _FORM.fullmatch(text):
        return None
    try:
        value = UUID(bytes=base64.b64decode(text + "==", altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return None
    return None if value in RESERVED or to_text(value) != text else value


def random_uuid(random: Random) -> UUID:
    """A new id; none that begins with a dash, which a command would take for an option."""
    while True:
        value = UUID(int=random.getrandbits(128), version=4)
        if not to_text(value).startswith("-"):
            return value
