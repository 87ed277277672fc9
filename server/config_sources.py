"""Reads files and the environment as flat text: key -> (value, source). Checks only the form.

node.toml            tables, dotted and quoted keys mean the same: {"log": {"dirs": [..]}} is log.dirs
server.properties    Kafka's: `key=value`, continued with a backslash
TIDELOG_LOG_DIRS     overrides log.dirs
${env:NAME} ${file:PATH} ${credential:NAME}   inside of a value: see `security/secret_references.py`; not shown again
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PREFIX = "TIDELOG_"
NOT_SETTINGS = frozenset({"TIDELOG_BOOTSTRAP", "TIDELOG_PROFILE", "TIDELOG_TRACEBACK", "TIDELOG_PURE"})
"""Variables of the command itself."""
NAME_LENGTH_MAX = 100
_OF_KUBERNETES = re.compile(
    r"TIDELOG_(?:[A-Z0-9_]+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes sets for a service whose name begins with `tidelog`. No setting's variable has this form."""
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class SourceError(ValueError):
    """A file with invalid content."""


@dataclass(frozen=True, slots=True)
class RawSetting:
    """A value as text, and its source."""

    text: str
    source: str
    is_secret: bool = False


def read_file(path: str) -> tuple[dict[str, str], bool]:
    """Return (key -> text, whether it is a `.properties` file). Raises OSError or `SourceError`."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8")
        if path.endswith(".properties"):
            return read_properties(text), True
        return flatten(tomllib.loads(text)), False
    except UnicodeDecodeError as error:
        raise SourceError(f"it is not text in UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"it is not TOML: {error}") from error


def flatten(tables: Mapping[str, object]) -> dict[str, str]:
    """Keys of nested tables joined with dots; values as text, lists with commas."""
    found: dict[str, str] = {}
    for key, value in _leaves("", tables):
        if key in found:
            raise SourceError(f"{key} is there twice, once dotted or in a table and once in quotes")
        found[key] = as_text(key, value)
    return found


def _leaves(prefix: str, tables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def as_text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str):
        return str(value)
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        items = [as_text(key, item) for item in value]
        if any("," in item for item in items):
            raise SourceError(f"{key}: an item of a list has a comma in it")
        return ",".join(items)
    raise SourceError(f"{key}: a value is text, a number, true or false, or a list of these")


def read_properties(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _logical_lines(text):
        match = re.match(r"((?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(.*)", line, re.DOTALL)
        if match is None:
            raise SourceError(f"the line {line.strip()!r} has no key: write key=value")
        found[_unescaped(match[1])] = _unescaped(match[2]).rstrip()
    return found


def _logical_lines(text: str) -> Iterator[str]:
    whole = ""
    for line in text.splitlines():
        line = line.lstrip()
        if not whole and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            whole += line[:-1]
            continue
        whole += line
        if whole.strip():
            yield whole
        whole = ""
    if whole.strip():
        yield whole


def _unescaped(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9A-Fa-f]{4})|(.))", one, text)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").replace("-", "_").upper()


def unknown_variable(variable: str, known: Iterable[str]) -> str:
    """Return the warning about a variable that is no setting. It is never an error: the environment may have others, as
    Kubernetes sets them for every service of a namespace."""
    if _OF_KUBERNETES.fullmatch(variable):
        return f"the variable {variable} is ignored: it is no setting, Kubernetes sets it for a service"
    near = difflib.get_close_matches(variable, known, n=1, cutoff=0.6) if len(variable) < NAME_LENGTH_MAX else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"the variable {variable[:NAME_LENGTH_MAX]} is ignored: it is no setting{hint}"
