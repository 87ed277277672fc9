"""What a login is checked against: SCRAM credentials of the users in the metadata image. Pure.

A mechanism asks for the credential of a name, whether or not there is such a user. An unknown user gets a decoy: the
same one for each question, of the shape that real credentials have, derived from a secret. So an exchange with an
unknown user has the same messages and does the same work as one with a wrong password, and nobody can log in with it:
its stored key is the hash of no known key.

The decoys of two nodes with different secrets differ. Who asks both of them, or one before and after it restarted with
a new secret, learns that the user does not exist; so the secret should be one of the cluster.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

SCRAM_DIGESTS: dict[str, str] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS_MIN = 4096
"""RFC 7677, section 4. Metadata accept no fewer."""
SALT_BYTES_MIN = 12
"""Shorter salts are no credential for a login: `scramp` rejects them, metadata accept none."""
SAMPLE_USERS_MAX = 1000
_DEFAULT_SALT_BYTES = 32
_TEXT_SALT = b"0123456789abcdefghijklmnopqrstuvwxyz"
"""Kafka's tools make salts of these characters."""


class StoredCredential(Protocol):
    """`metadata.image.Credential`."""

    @property
    def salt(self) -> bytes: ...
    @property
    def stored_key(self) -> bytes: ...
    @property
    def server_key(self) -> bytes: ...
    @property
    def iterations(self) -> int: ...


Users = Mapping[tuple[str, str], StoredCredential]
"""By (user, mechanism)."""


@dataclass(frozen=True, slots=True)
class ScramCredential:
    salt: bytes
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)
    iterations: int
    is_real: bool = field(repr=False)
    """Whether the user exists. Only the end of an exchange may look at it."""


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    """What credentials show before a login: most users of a cluster were made by one tool, and look alike."""

    iterations: int
    salt_bytes: int
    is_text: bool


class Credentials:
    """Looks credentials up in the users of the current image."""

    def __init__(self, users: Callable[[], Users], *, secret: bytes) -> None:
        assert len(secret) >= 16, "decoys that can be guessed are none"
        self._users = users
        self._secret = secret
        self._sampled: Users | None = None
        self._shapes: dict[str, _Shape] = {}
        self._iterations_max: dict[str, int] = {}

    def scram(self, user: str, mechanism: str) -> ScramCredential:
        """Return the credential of the user, or a decoy."""
        decoy = self._decoy(user, mechanism)  # always: it takes some microseconds
        stored = self._users().get((user, mechanism))
        if stored is None or not _is_usable(stored, mechanism):
            return decoy
        return ScramCredential(
            salt=stored.salt,
            stored_key=stored.stored_key,
            server_key=stored.server_key,
            iterations=stored.iterations,
            is_real=True,
        )

    def iterations_max(self, mechanism: str) -> int:
        """Return the highest number of iterations of a sample of users: an exchange that derives keys on the server
        does so much work for every user."""
        self._sample()
        return self._iterations_max[mechanism]

    def _decoy(self, user: str, mechanism: str) -> ScramCredential:
        self._sample()
        digest = SCRAM_DIGESTS[mechanism]
        shape = self._shapes[mechanism]
        name = f"{mechanism}\0{user}".encode("utf-8", "surrogatepass")

        def derive(purpose: bytes) -> bytes:
            return hmac.digest(self._secret, purpose + b"\0" + name, digest)

        blocks = -(-shape.salt_bytes // len(derive(b"")))
        salt = b"".join(derive(b"salt %d" % number) for number in range(blocks))[: shape.salt_bytes]
        if shape.is_text:
            salt = bytes(_TEXT_SALT[byte % len(_TEXT_SALT)] for byte in salt)
        return ScramCredential(
            salt=salt,
            stored_key=derive(b"stored key"),
            server_key=derive(b"server key"),
            iterations=shape.iterations,
            is_real=False,
        )

    def _sample(self) -> None:
        """Learn the most common shape of credentials. Images are values: another map has other users."""
        users = self._users()
        if users is self._sampled:
            return
        counts: dict[str, Counter[_Shape]] = {mechanism: Counter() for mechanism in SCRAM_DIGESTS}
        for (_, mechanism), stored in islice(users.items(), SAMPLE_USERS_MAX):
            if mechanism in counts and _is_usable(stored, mechanism):
                is_text = not stored.salt.strip(_TEXT_SALT)
                counts[mechanism][_Shape(stored.iterations, len(stored.salt), is_text)] += 1
        default = _Shape(ITERATIONS_MIN, _DEFAULT_SALT_BYTES, False)
        for mechanism, shapes in counts.items():
            # Ties have one winner: the order of the map differs between processes.
            self._shapes[mechanism] = max(shapes, key=lambda shape: (shapes[shape], shape), default=default)
            self._iterations_max[mechanism] = max((shape.iterations for shape in shapes), default=ITERATIONS_MIN)
        self._sampled = users


def _is_usable(stored: StoredCredential, mechanism: str) -> bool:
    return len(stored.salt) >= SALT_BYTES_MIN and stored.iterations >= ITERATIONS_MIN and mechanism in SCRAM_DIGESTS
