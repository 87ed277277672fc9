"""SCRAM on the side of the server and of the client, with the vectors of RFC 7677."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import traceback
import unicodedata
from random import Random
from typing import Never

import pytest
from support.security.logins import SHA256, SHA512, Users, log_in, server_of, stored

from tidelog.metadata.image import Credential
from tidelog.model.admin_errors import SaslAuthenticationError, UnsupportedSaslMechanismError
from tidelog.model.principals import Principal
from tidelog.security.credentials import Credentials
from tidelog.security.sasl.client import ITERATIONS_MAX, ScramClientExchange, begin_as_client
from tidelog.security.sasl.exchange import Done, Exchange, Failed, Reason, Reply
from tidelog.security.sasl.mechanisms import begin
from tidelog.security.sasl.scram import FRAME_BYTES_MAX, NAME_LENGTH_MAX, ScramExchange
from tidelog.security.secrets import Secret

CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def rfc_users() -> Users:
    users = Users(("user", SHA256, "pencil"), ("user", SHA512, "pencil"))
    users.replace({("user", mechanism): stored(mechanism, "pencil", salt=SALT) for mechanism in (SHA256, SHA512)})
    return users


def rfc_server(users: Users, mechanism: str = SHA256) -> Exchange:
    return Exchange(ScramExchange(mechanism, users.credentials, SERVER_NONCE))


def rfc_client(mechanism: str = SHA256, password: str = "pencil") -> ScramClientExchange:
    return ScramClientExchange(mechanism, "user", Secret(password), CLIENT_NONCE)


class TestVectors:
    def test_the_server_says_what_rfc_7677_says(self) -> None:
        server = rfc_server(rfc_users())
        assert server.step(FIRST) == Reply(SERVER_FIRST)
        assert server.step(FINAL) == Done(Principal("User", "user"), SERVER_FINAL)
        assert server.is_over

    def test_the_client_says_what_rfc_7677_says(self) -> None:
        client = rfc_client()
        assert client.first() == FIRST
        assert client.step(SERVER_FIRST) == FINAL
        assert not client.is_complete
        assert client.step(SERVER_FINAL) is None
        assert client.is_complete

    @pytest.mark.parametrize(("mechanism", "digest"), [(SHA256, "sha256"), (SHA512, "sha512")])
    def test_the_proof_is_that_of_rfc_5802_section_3(self, mechanism: str, digest: str) -> None:
        client = rfc_client(mechanism)
        assert client.first() == FIRST
        final = client.step(SERVER_FIRST)
        without_proof = FINAL.rpartition(b",p=")[0]
        salted = hashlib.pbkdf2_hmac(digest, b"pencil", SALT, 4096)
        client_key = hmac.digest(salted, b"Client Key", digest)
        message = b",".join((FIRST[3:], SERVER_FIRST, without_proof))
        signature = hmac.digest(hashlib.new(digest, client_key).digest(), message, digest)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        assert final == without_proof + b",p=" + base64.b64encode(proof)
        server = rfc_server(rfc_users(), mechanism)
        server.step(FIRST)
        outcome = server.step(final)
        verifier = hmac.digest(hmac.digest(salted, b"Server Key", digest), message, digest)
        assert outcome == Done(Principal("User", "user"), b"v=" + base64.b64encode(verifier))


class TestLogins:
    @pytest.mark.parametrize("mechanism", [SHA256, SHA512])
    @pytest.mark.parametrize("name", ["alice", "a,b=c", "Zoë", "用户", "x" * 512])
    def test_the_right_password_logs_in(self, mechanism: str, name: str) -> None:
        users = Users((name, mechanism, "pässword, =3D"))
        outcome = log_in(server_of(users, mechanism), mechanism, name, "pässword, =3D")
        assert isinstance(outcome, Done)
        assert (outcome.principal, outcome.lifetime_ms) == (Principal("User", name), None)

    @pytest.mark.parametrize(
        ("user", "password"), [("alice", "wrong"), ("mallory", "secret"), ("bob", "secret"), ("Alice", "secret")]
    )
    def test_a_wrong_password_and_an_unknown_user_fail_alike(self, user: str, password: str) -> None:
        users = Users(("alice", SHA256, "secret"), ("bob", SHA512, "secret"))
        assert log_in(server_of(users, SHA256), SHA256, user, password) == Failed(Reason.REJECTED, user)

    def test_replies_to_a_user_and_to_an_unknown_one_have_one_form(self) -> None:
        users = Users(("alice", SHA256, "secret"))
        replies = [server_of(users, SHA256).step(b"n,,n=%s,r=abc" % user) for user in (b"alice", b"mallory")]
        assert all(isinstance(reply, Reply) for reply in replies)
        known, unknown = [reply.frame.split(b",") for reply in replies if isinstance(reply, Reply)]
        assert (known[0], known[2]) == (unknown[0], unknown[2]), "nonce of one seed, iterations"
        assert len(known[1]) == len(unknown[1]), "the salt"

    def test_a_removed_user_cannot_finish(self) -> None:
        users = rfc_users()
        server = rfc_server(users)
        server.step(FIRST)
        users.remove("user", SHA256)
        assert server.step(FINAL) == Failed(Reason.REJECTED, "user")

    def test_a_changed_credential_cannot_finish(self) -> None:
        users = rfc_users()
        server = rfc_server(users)
        server.step(FIRST)
        before = users.image["user", SHA256]
        users.replace({("user", SHA256): dataclasses.replace(before, server_key=bytes(32))})
        assert server.step(FINAL) == Failed(Reason.REJECTED, "user")

    def test_a_user_who_is_added_meanwhile_has_to_begin_again(self) -> None:
        users = rfc_users()
        entry = users.image["user", SHA256]
        users.remove("user", SHA256)
        server = rfc_server(users)
        server.step(FIRST)
        users.replace({("user", SHA256): entry})
        assert isinstance(server.step(FINAL), Failed)

    def test_replayed_frames_fail_in_another_exchange(self) -> None:
        users = rfc_users()
        assert isinstance(rfc_server(users).step(FIRST), Reply)
        replay = Exchange(ScramExchange(SHA256, users.credentials, "another"))
        assert isinstance(replay.step(FIRST), Reply)
        assert replay.step(FINAL) == Failed(Reason.REJECTED, "user")

    def test_each_exchange_draws_a_nonce(self) -> None:
        users, random = Users(("alice", SHA256, "secret")), Random(5)
        replies = [begin(SHA256, [SHA256], users.credentials, random).step(b"n,,n=alice,r=abc") for _ in range(100)]
        assert len({reply.frame for reply in replies if isinstance(reply, Reply)}) == 100


class TestMalformedFrames:
    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\xff\xfe",
            b"n,,",
            b"n,,n=user",
            b"n,,r=abc,n=user",
            b"n,,n=,r=abc",
            b"n,,n=user,r=",
            b"n,,n=us=er,r=abc",
            b"n,,n=us\0er,r=abc",
            b"n,,n=user,r=a\tb",
            b"n,,n=user,r=abc,m=x",
            b"n,,n=user,n=user,r=abc",
            b"n,a=root,n=user,r=abc",
            b"p=tls-unique,,n=user,r=abc",
            b"p=tls-exporter,,n=user,r=abc",
            b"p=nothing,,n=user,r=abc",
            b"q,,n=user,r=abc",
            b"n,,n=\xcc\x88\xe2\x80\x8f,r=abc",
            b"n,,n=user,r=abc,tokenauth=true",
            FINAL,
        ],
    )
    def test_a_first_frame_that_is_malformed_fails(self, frame: bytes) -> None:
        server = rfc_server(rfc_users())
        outcome = server.step(frame)
        assert isinstance(outcome, Failed)
        assert outcome.reason is Reason.MALFORMED
        assert server.is_over

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\xff",
            FIRST,
            FINAL[:-1],
            FINAL[: -len(b"VQ=")],
            FINAL.replace(b"c=biws", b"c=eSws"),
            FINAL.replace(b"c=biws", b"c=b!ws"),
            FINAL.replace(b"%hv", b"%hw"),
            FINAL.replace(b"r=rOpr", b"r=rOpr,r=rOpr"),
            FINAL.rpartition(b",p=")[0],
            FINAL.rpartition(b",p=")[0] + b",p=" + base64.b64encode(bytes(31)),
            FINAL.rpartition(b",p=")[0] + b",p=" + base64.b64encode(bytes(32)),
            FINAL + b",x=y",
        ],
    )
    def test_a_last_frame_that_is_malformed_fails(self, frame: bytes) -> None:
        server = rfc_server(rfc_users())
        server.step(FIRST)
        outcome = server.step(frame)
        assert isinstance(outcome, Failed)
        assert outcome.user == "user"
        assert server.is_over

    def test_a_long_frame_is_not_looked_at(self) -> None:
        frame = b"n,,n=user,r=" + b"a" * FRAME_BYTES_MAX
        assert rfc_server(rfc_users()).step(frame) == Failed(Reason.TOO_LONG)

    @pytest.mark.parametrize("letter", ["x", "é", "\ufdfa"])
    def test_names_that_are_long_are_not_prepared(self, letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """U+FDFA becomes 18 characters: preparing a frame of them would take a sixth of a second."""
        prepared: list[str] = []

        def prepare(name: str) -> str:
            prepared.append(name)
            return name

        monkeypatch.setattr("scramp.core.saslprep", prepare)
        longest = NAME_LENGTH_MAX // len(unicodedata.normalize("NFKC", letter))
        for escaped in (letter * longest, "=2C" * NAME_LENGTH_MAX):
            assert isinstance(rfc_server(rfc_users()).step(f"n,,n={escaped},r=abc".encode()), Reply)
        assert len(prepared) == 2
        too_long = f"n,,n={letter * (longest + 1)},r=abc".encode()
        assert rfc_server(rfc_users()).step(too_long) == Failed(Reason.TOO_LONG)
        assert len(prepared) == 2

    def test_a_client_that_does_not_insist_on_channel_binding_is_served(self) -> None:
        assert isinstance(rfc_server(rfc_users()).step(FIRST.replace(b"n,,", b"y,,")), Reply)

    def test_a_defect_of_the_look_up_is_no_failed_login(self) -> None:
        class Broken(dict[tuple[str, str], Credential]):
            def get(self, *_: object) -> Never:
                raise RuntimeError("a defect")

        broken = Broken()
        credentials = Credentials(lambda: broken, secret=bytes(16))
        with pytest.raises(RuntimeError, match="a defect"):
            Exchange(ScramExchange(SHA256, credentials, SERVER_NONCE)).step(FIRST)


class TestClient:
    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\xff",
            SERVER_FIRST.replace(b"r=r", b"r=q"),
            b"r=rOprNGfwEbeRWgbNEkqO,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
            SERVER_FIRST.replace(b"4096", b"1"),
            SERVER_FIRST.replace(b"4096", b"%d" % (ITERATIONS_MAX + 1)),
            SERVER_FIRST.replace(b"4096", b"9" * 5000),
            SERVER_FIRST.replace(b"s=W22ZaJ0SNY7soEsUEjb6gQ==", b"s=AAAA"),
            SERVER_FINAL,
            b"e=unknown-user",
            b"e=whatever",
            SERVER_FIRST + b",x=" + b"y" * 9000,
        ],
    )
    def test_a_first_message_that_is_malformed_or_weak_is_rejected(self, frame: bytes) -> None:
        client = rfc_client()
        client.first()
        with pytest.raises(SaslAuthenticationError):
            client.step(frame)
        assert not client.is_complete

    @pytest.mark.parametrize("frame", [b"", b"v=", b"v=" + base64.b64encode(bytes(32)), b"e=invalid-proof", FIRST])
    def test_a_server_that_does_not_know_the_password_is_rejected(self, frame: bytes) -> None:
        client = rfc_client()
        client.first()
        client.step(SERVER_FIRST)
        with pytest.raises(SaslAuthenticationError):
            client.step(frame)
        assert not client.is_complete

    def test_nothing_follows_the_end(self) -> None:
        client = rfc_client()
        client.first()
        client.step(SERVER_FIRST)
        client.step(SERVER_FINAL)
        with pytest.raises(SaslAuthenticationError):
            client.step(SERVER_FINAL)

    @pytest.mark.parametrize(("user", "password"), [("a", "pw\nbell\a"), ("", "pw"), ("a\u200f", "pw")])
    def test_names_and_passwords_that_saslprep_forbids_are_reported_without_them(
        self, user: str, password: str
    ) -> None:
        with pytest.raises(SaslAuthenticationError) as raised:
            begin_as_client(SHA256, user, Secret(password), Random(1))
        assert password not in "".join(traceback.format_exception(raised.value))
        assert raised.value.__context__ is None

    def test_unknown_mechanisms_are_named(self) -> None:
        with pytest.raises(UnsupportedSaslMechanismError, match="GSSAPI"):
            begin_as_client("GSSAPI", "a", Secret("b"), Random(1))
