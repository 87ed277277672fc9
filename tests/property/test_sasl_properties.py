"""Logins with any bytes, names and passwords: only the right password logs in, and nothing raises."""

from __future__ import annotations

import base64
from functools import cache
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.security.logins import ALL, PLAIN, SHA256, SHA512, Users, log_in, pass_frame, server_of

from tidelog.model.admin_errors import SaslAuthenticationError
from tidelog.model.principals import Principal
from tidelog.security.principals import MappingRulesError, NoPrincipalError, PrincipalMapping
from tidelog.security.sasl.client import begin_as_client
from tidelog.security.sasl.exchange import Done, Failed, Reason, Reply
from tidelog.security.secrets import Secret

NAMES = st.text("abzAZ09 ,=-_./äéß用户", min_size=1, max_size=20)
"""Characters that SASLprep keeps."""
MECHANISM = st.sampled_from(ALL)
FRAMES = st.lists(
    st.binary(max_size=60)
    | st.text("n,y=rcpsi\0abcdef=ABC", max_size=60).map(str.encode)
    | st.sampled_from([b"n,,n=alice,r=abc", b"\0alice\0secret", b"c=biws,r=abc,p=AAAA"]),
    max_size=10,
)


@cache
def users() -> Users:
    return Users(("alice", SHA256, "a long password"), ("alice", SHA512, "a long password"))


@given(MECHANISM, FRAMES)
def test_any_frames_end_without_a_login(mechanism: str, frames: list[bytes]) -> None:
    server = server_of(users(), mechanism)
    for frame in frames:
        outcome = pass_frame(server, frame)
        assert isinstance(outcome, Reply | Failed)
        assert server.is_over == isinstance(outcome, Failed)
    again = server_of(users(), mechanism)
    assert [pass_frame(again, frame) for frame in frames][-1:] == ([outcome] if frames else []), "deterministic"


def is_same_proof(frame: bytes, original: bytes) -> bool:
    """Base64 has unused bits: another last letter may be the same proof."""
    (message, _, proof), (expected, _, expected_proof) = frame.rpartition(b",p="), original.rpartition(b",p=")
    return message == expected and base64.b64decode(proof) == base64.b64decode(expected_proof)


@given(MECHANISM, st.data())
def test_a_login_with_one_changed_byte_fails(mechanism: str, data: st.DataObject) -> None:
    server = server_of(users(), mechanism)
    client = begin_as_client(mechanism, "alice", Secret("a long password"), Random(4))
    frames = 1 if mechanism == PLAIN else 2
    changed = data.draw(st.integers(0, frames - 1))
    frame: bytes | None = client.first()
    for number in range(frames):
        assert frame is not None
        original = frame
        if number == changed:
            at = data.draw(st.integers(0, len(frame) - 1))
            frame = frame[:at] + bytes([frame[at] ^ data.draw(st.integers(1, 255))]) + frame[at + 1 :]
        outcome = pass_frame(server, frame)
        if isinstance(outcome, Failed):
            return
        if isinstance(outcome, Done):
            assert is_same_proof(frame, original)
            return
        try:
            frame = client.step(outcome.frame)
        except SaslAuthenticationError:
            return
    raise AssertionError("a changed login came to its end")


@settings(max_examples=30)
@given(MECHANISM, NAMES, NAMES, NAMES)
def test_the_right_password_and_no_other_logs_in(mechanism: str, user: str, password: str, other: str) -> None:
    everybody = Users((user, SHA256 if mechanism == PLAIN else mechanism, password))
    login = log_in(server_of(everybody, mechanism), mechanism, user, password)
    assert isinstance(login, Done)
    assert login.principal == Principal("User", user)
    if other != password:
        assert log_in(server_of(everybody, mechanism), mechanism, user, other) == Failed(Reason.REJECTED, user)
    if other != user:
        assert log_in(server_of(everybody, mechanism), mechanism, other, password) == Failed(Reason.REJECTED, other)


@given(st.text(max_size=60) | st.from_regex(r"\A\s*(RULE:[a-z.()*$,^=]*/[a-z$0-9@]*/[LU]?|DEFAULT)\s*,?\Z"), NAMES)
def test_any_rules_are_rejected_or_give_a_printable_name(rules: str, name: str) -> None:
    try:
        mapping = PrincipalMapping(rules)
        user = mapping.user(name)
    except (MappingRulesError, NoPrincipalError):
        return
    assert user
    assert user.isprintable()
