"""Secrets stay out of every output, and references lead to them."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tidelog.security.secret_references import SECRET_BYTES_MAX, SecretReferenceError, read_secret
from tidelog.security.secrets import Secret

TEXT = "correct horse battery staple"


@dataclass(frozen=True)
class Holder:
    name: str
    password: Secret


def test_only_reveal_returns_the_text() -> None:
    secret = Secret(TEXT)
    assert secret.reveal() == TEXT
    holder = Holder("n", secret)
    outputs = (repr(secret), str(secret), f"{secret} {secret!r} {secret:>40}", "%s %r" % (secret, secret), repr(holder))  # noqa: UP031
    assert not [output for output in outputs if TEXT in output]
    assert "(hidden)" in repr(holder)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_cannot_be_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Holder("n", Secret(TEXT)), protocol)
    with pytest.raises(TypeError, match="no state"):
        Secret(TEXT).__getstate__()


def test_a_secret_is_in_no_json_and_has_no_attributes_to_walk() -> None:
    with pytest.raises(TypeError):
        json.dumps(Secret(TEXT))
    with pytest.raises(TypeError):
        vars(Secret(TEXT))


def test_a_copy_is_the_secret_itself() -> None:
    secret = Secret(TEXT)
    assert copy.copy(secret) is secret
    assert asdict(Holder("n", secret))["password"] is secret


def test_secrets_are_compared_by_text_and_are_no_keys() -> None:
    assert Secret(TEXT) == Secret(TEXT)
    assert Secret(TEXT) != Secret(TEXT + ".")
    assert Secret(TEXT) != TEXT
    assert Secret("\ud800") == Secret("\ud800"), "what os.environ makes of bytes that are not UTF-8"
    with pytest.raises(TypeError):
        hash(Secret(TEXT))


def test_a_log_line_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("tidelog.test").warning("password=%s holder=%r", Secret(TEXT), Holder("n", Secret(TEXT)))
    assert "password=(hidden)" in caplog.text
    assert TEXT not in caplog.text


def test_references_lead_to_variables_files_and_credentials(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(TEXT + "\r\n\n", encoding="utf-8")
    environ = {"PASSWORD": TEXT, "CREDENTIALS_DIRECTORY": str(tmp_path)}
    for reference in ("${env:PASSWORD}", f"${{file:{tmp_path}/password}}", "${credential:password}"):
        assert read_secret(reference, environ) == Secret(TEXT)
    assert read_secret("a ${env:PASSWORD} b", environ) == Secret(f"a {TEXT} b")
    assert read_secret("plain", environ) == Secret("plain")
    assert read_secret("${env:NESTED}", {"NESTED": "${env:PASSWORD}"}) == Secret("${env:PASSWORD}"), "once"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("${env:NONE}", "the variable is not set"),
        ("${file:/nowhere/at/all}", "No such file"),
        ("${file:/}", "Is a directory"),
        ("${file:a\0b}", "no path"),
        ("${credential:../x}", "not a path"),
        ("${credential:..}", "not a path"),
        ("${credential:}", "not a path"),
        ("${vault:x}", "there are env, file and credential"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(reference: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SecretReferenceError, match=reason):
        read_secret(reference, {"CREDENTIALS_DIRECTORY": str(tmp_path)})


def test_a_credential_needs_the_directory_of_systemd() -> None:
    with pytest.raises(SecretReferenceError, match="LoadCredential="):
        read_secret("${credential:password}", {})


@pytest.mark.parametrize(
    "content", [b"\xff" + TEXT.encode(), (TEXT * SECRET_BYTES_MAX).encode()], ids=["bytes", "long"]
)
def test_errors_do_not_contain_the_secret(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    with pytest.raises(SecretReferenceError) as raised:
        read_secret(f"${{file:{path}}}", {})
    shown = "".join(traceback.format_exception(raised.value))
    assert TEXT not in shown
    assert "0xff" not in shown
    assert raised.value.__context__ is None, "a UnicodeDecodeError carries the content"
