"""Credentials of users, and decoys for names that are no users."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tidelog.metadata.image import Credential
from tidelog.model.maps import Map
from tidelog.security.credentials import SAMPLE_USERS_MAX, Credentials

SHA256, SHA512 = "SCRAM-SHA-256", "SCRAM-SHA-512"
SECRET = b"a secret of the cluster"


def credential(**more: Any) -> Credential:
    fields: dict[str, Any] = {"salt": bytes(20), "stored_key": b"k" * 32, "server_key": b"v" * 32, "iterations": 8192}
    return Credential(**{**fields, **more})


def credentials(users: dict[tuple[str, str], Credential], secret: bytes = SECRET) -> Credentials:
    image: Map[tuple[str, str], Credential] = Map(users)
    return Credentials(lambda: image, secret=secret)


def test_a_user_has_the_credential_of_the_image() -> None:
    found = credentials({("alice", SHA256): credential()}).scram("alice", SHA256)
    assert (found.salt, found.stored_key, found.server_key) == (bytes(20), b"k" * 32, b"v" * 32)
    assert (found.iterations, found.is_real) == (8192, True)


def test_keys_are_not_shown() -> None:
    shown = repr(credentials({("alice", SHA256): credential()}).scram("alice", SHA256))
    assert "kkk" not in shown
    assert "vvv" not in shown
    assert "True" not in shown


def test_an_unknown_user_has_a_decoy_that_stays() -> None:
    looked_up = credentials({("alice", SHA256): credential()})
    decoy = looked_up.scram("mallory", SHA256)
    assert not decoy.is_real
    assert decoy == looked_up.scram("mallory", SHA256)
    assert decoy == credentials({("alice", SHA256): credential()}).scram("mallory", SHA256), "on another node, too"
    others = [
        looked_up.scram("mallor", SHA256),
        looked_up.scram("mallory", SHA512),
        credentials({("alice", SHA256): credential()}, secret=SECRET + b"!").scram("mallory", SHA256),
    ]
    parts = [(entry.salt, entry.stored_key, entry.server_key) for entry in (decoy, *others)]
    assert len({part for entry in parts for part in entry}) == 12, "no two are equal"


def test_a_user_with_the_other_mechanism_gets_a_decoy() -> None:
    assert not credentials({("alice", SHA256): credential()}).scram("alice", SHA512).is_real


def test_decoys_look_like_most_credentials() -> None:
    users = {
        ("a", SHA256): credential(iterations=4096),
        ("b", SHA256): credential(iterations=16_384, salt=bytes(24)),
        ("c", SHA256): credential(iterations=16_384, salt=bytes(24)),
        ("d", SHA512): credential(salt=b"1p2q3r4s5t6u7v8w9x0yaz"),
    }
    looked_up = credentials(users)
    decoy = looked_up.scram("x", SHA256)
    assert (decoy.iterations, len(decoy.salt)) == (16_384, 24)
    assert looked_up.iterations_max(SHA256) == 16_384
    text = looked_up.scram("x", SHA512)
    assert re.fullmatch(rb"[0-9a-z]{22}", text.salt), "as those that Kafka's tools make"
    assert len(text.stored_key) == 64


def test_a_long_salt_has_a_long_decoy() -> None:
    decoy = credentials({("a", SHA256): credential(salt=bytes(100))}).scram("x", SHA256)
    assert len(decoy.salt) == 100
    assert decoy.salt[:32] != decoy.salt[32:64]


def test_without_users_there_are_decoys_of_a_common_shape() -> None:
    looked_up = credentials({})
    decoy = looked_up.scram("x", SHA512)
    assert (decoy.iterations, len(decoy.salt), looked_up.iterations_max(SHA512)) == (4096, 32, 4096)


def test_the_shape_follows_the_image() -> None:
    images: list[Map[tuple[str, str], Credential]] = [Map({("a", SHA256): credential(iterations=4096)})]
    looked_up = Credentials(lambda: images[-1], secret=SECRET)
    assert looked_up.scram("x", SHA256).iterations == 4096
    images.append(Map({("a", SHA256): credential(iterations=9999)}))
    assert looked_up.scram("x", SHA256).iterations == 9999


@pytest.mark.parametrize("wrong", [{"salt": bytes(11)}, {"iterations": 4095}])
def test_a_credential_that_no_exchange_can_use_is_none(wrong: dict[str, Any]) -> None:
    found = credentials({("a", SHA256): credential(**wrong)}).scram("a", SHA256)
    assert (found.is_real, len(found.salt), found.iterations) == (False, 32, 4096)


def test_many_users_are_sampled() -> None:
    class Counting(dict[tuple[str, str], Credential]):
        steps = 0

        def items(self) -> Any:
            for item in super().items():
                self.steps += 1
                yield item

    users = Counting({(f"u{number}", SHA256): credential() for number in range(SAMPLE_USERS_MAX * 2)})
    looked_up = Credentials(lambda: users, secret=SECRET)
    for _ in range(3):
        looked_up.scram("x", SHA256)
    assert users.steps == SAMPLE_USERS_MAX


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(AssertionError):
        Credentials(dict, secret=b"short")
