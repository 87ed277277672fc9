"""References to secrets, inside of the value of a setting.

    ${env:NAME}          a variable of the environment
    ${file:PATH}         the content of a file, without line breaks at its end
    ${credential:NAME}   a file in the directory that systemd passes to the unit (LoadCredential=)

Errors name the reference and never contain what it led to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tidelog.security.secrets import Secret

SECRET_BYTES_MAX = 64 << 10
_REFERENCE = re.compile(r"\$\{(?P<kind>[a-z]+):(?P<what>[^}]*)\}")


class SecretReferenceError(ValueError):
    """A reference that leads to no secret."""


def read_secret(text: str, environ: Mapping[str, str]) -> Secret:
    """Return the value of a setting with its references replaced; raises `SecretReferenceError`."""
    return Secret(resolve(text, environ)[0])


def resolve(text: str, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the value with its references replaced, and whether it had any; raises `SecretReferenceError`."""

    def one(match: re.Match[str]) -> str:
        return _referenced(match[0], match["kind"], match["what"], environ)

    return _REFERENCE.sub(one, text), _REFERENCE.search(text) is not None


def _referenced(reference: str, kind: str, what: str, environ: Mapping[str, str]) -> str:
    match kind:
        case "env":
            if what not in environ:
                raise SecretReferenceError(f"{reference}: the variable is not set")
            return environ[what]
        case "file":
            return _content(reference, what)
        case "credential":
            directory = environ.get("CREDENTIALS_DIRECTORY")
            if directory is None:
                raise SecretReferenceError(
                    f"{reference}: CREDENTIALS_DIRECTORY is not set; the unit needs LoadCredential="
                )
            if os.sep in what or what in ("", ".", ".."):
                raise SecretReferenceError(f"{reference}: a credential has a name, not a path")
            return _content(reference, os.path.join(directory, what))
        case _:
            raise SecretReferenceError(f"{reference}: there are env, file and credential")


def _content(reference: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or "no path of a file"
        raise SecretReferenceError(f"{reference}: {reason}") from None
    if len(content) > SECRET_BYTES_MAX:
        raise SecretReferenceError(f"{reference}: more than {SECRET_BYTES_MAX} bytes")
    text = _decoded(content)
    if text is None:
        raise SecretReferenceError(f"{reference}: it is not text in UTF-8")
    return text.rstrip("\r\n")


def _decoded(content: bytes) -> str | None:
    """None instead of a UnicodeDecodeError, which carries the content and would be the context of the next error."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
