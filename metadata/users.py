"""SCRAM users: alters their credentials. `services/` authenticates against them. Pure.

The image holds of a password what SCRAM (RFC 5802) needs to check it: salt, iterations, stored key and server key. The
client salts the password, which is the expensive part; the controller derives the two keys.
"""

import hashlib
import hmac
from dataclasses import dataclass

from tidelog.metadata.decision import Context, Decision, Draft, Outcomes, each
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import SetUser
from tidelog.model.admin_errors import (
    DuplicateResourceError,
    ResourceNotFoundError,
    UnacceptableCredentialError,
    UnsupportedSaslMechanismError,
)

MECHANISMS: dict[str, str] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16_384
NAME_LENGTH_MAX = 512
SALT_BYTES_MIN, SALT_BYTES_MAX = 12, 1024
"""The library of clients and brokers rejects shorter salts, so that nobody could log in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChange:
    user: str
    mechanism: str
    salt: bytes = b""
    """Empty removes the credential."""
    salted_password: bytes = b""
    """PBKDF2 of password, salt and iterations."""
    iterations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterUsers:
    changes: tuple[UserChange, ...]
    validate_only: bool = False


def scram_keys(mechanism: str, salted_password: bytes) -> tuple[bytes, bytes]:
    """Returns (stored key, server key) of RFC 5802, section 3."""
    digest = MECHANISMS[mechanism]
    client_key = hmac.new(salted_password, b"Client Key", digest).digest()
    return hashlib.new(digest, client_key).digest(), hmac.new(salted_password, b"Server Key", digest).digest()


def alter_users(image: ClusterImage, request: AlterUsers, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    outcomes = each(
        request.changes,
        lambda change: f"{change.user[:NAME_LENGTH_MAX]}:{change.mechanism[:40]}",
        lambda change: draft.add([_changed_user(draft.image, change)]),
        key=lambda change: (change.user, change.mechanism),
        duplicate=DuplicateResourceError,
    )
    return draft.decide(outcomes)


def _changed_user(image: ClusterImage, change: UserChange) -> SetUser:
    if not 0 < len(change.user) <= NAME_LENGTH_MAX or not change.user.isprintable():
        raise UnacceptableCredentialError(f"a user's name has 1 to {NAME_LENGTH_MAX} printable characters")
    if change.mechanism not in MECHANISMS:
        raise UnsupportedSaslMechanismError(f"mechanism {change.mechanism[:40]!r}: {' or '.join(MECHANISMS)}")
    if not change.salt:
        if change.salted_password or change.iterations:
            raise UnacceptableCredentialError(f"user {change.user}: a credential needs a salt")
        if (change.user, change.mechanism) not in image.users:
            raise ResourceNotFoundError(f"user {change.user} has no {change.mechanism} credential")
        return SetUser(user=change.user, mechanism=change.mechanism)
    if not ITERATIONS_MIN <= change.iterations <= ITERATIONS_MAX:
        raise UnacceptableCredentialError(
            f"user {change.user}: {change.iterations} iterations; from {ITERATIONS_MIN} to {ITERATIONS_MAX}"
        )
    if not SALT_BYTES_MIN <= len(change.salt) <= SALT_BYTES_MAX:
        raise UnacceptableCredentialError(
            f"user {change.user}: a salt of {len(change.salt)} bytes; from {SALT_BYTES_MIN} to {SALT_BYTES_MAX}"
        )
    size = hashlib.new(MECHANISMS[change.mechanism]).digest_size
    if len(change.salted_password) != size:
        raise UnacceptableCredentialError(
            f"user {change.user}: the salted password has {len(change.salted_password)} bytes, not {size}"
        )
    stored, server = scram_keys(change.mechanism, change.salted_password)
    return SetUser(
        user=change.user,
        mechanism=change.mechanism,
        salt=change.salt,
        stored_key=stored,
        server_key=server,
        iterations=change.iterations,
    )
