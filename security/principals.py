"""Principals of certificates: the name of a subject, and the rules that map it to a user. Pure.

A subject is written as in RFC 2253, in the exact form of Java's `X500Principal.getName()`, so that ACLs of a Kafka
cluster mean the same principals here: `CN=duke,OU=Service\\, Users,O=Org,C=US`. An attribute without a keyword in
RFC 2253 is written with its number and the hexadecimal form of its value.

Rules are Kafka's (`ssl.principal.mapping.rules`), separated by commas; the first that matches the whole name counts:

    RULE:pattern/replacement/[LU]   `$1` is a group of the pattern; L and U change the case; `\\/` is a slash
    DEFAULT                         the name as it is

Patterns have the syntax of RE2, which is linear in the name: there are no look-arounds and no back-references.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import re2
from cryptography import x509
from cryptography.x509.oid import NameOID

from tidelog.model.principals import Principal

NAME_LENGTH_MAX = 4096
RULES_LENGTH_MAX = 64 << 10
PATTERN_MEMORY_BYTES_MAX = 1 << 20
_KEYWORDS = {
    NameOID.COMMON_NAME: "CN",
    NameOID.COUNTRY_NAME: "C",
    NameOID.LOCALITY_NAME: "L",
    NameOID.STATE_OR_PROVINCE_NAME: "ST",
    NameOID.ORGANIZATION_NAME: "O",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "OU",
    NameOID.STREET_ADDRESS: "STREET",
    NameOID.DOMAIN_COMPONENT: "DC",
    NameOID.USER_ID: "UID",
}
_ESCAPED = re.compile(r'[,=+<>#;"\\]')
_OUTER_SPACES = re.compile(r"^ +| +$")
_RULE = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)|DEFAULT", re.DOTALL)
_SEPARATOR = re.compile(r"[\s,]*", re.DOTALL)
_RULE_END = re.compile(r"\s*(?:,|$)")
_REPLACEMENT_PART = re.compile(r"\\(.)|\$([0-9]{1,4})|([^\\$]+)|(.)", re.DOTALL)


class MappingRulesError(ValueError):
    """`ssl.principal.mapping.rules` cannot be read."""


class NoPrincipalError(ValueError):
    """A certificate names nobody: no rule matches its subject, or there is no usable name."""


# Names.


def subject_name(name: x509.Name) -> str:
    """Return the name as RFC 2253 writes it: the last attribute first."""
    return ",".join("+".join(_attribute(part) for part in rdn) for rdn in reversed(name.rdns))


def _attribute(attribute: x509.NameAttribute[str | bytes]) -> str:
    keyword = _KEYWORDS.get(attribute.oid)
    if keyword is None or isinstance(attribute.value, bytes):
        return f"{attribute.oid.dotted_string}=#{_encoded_value(attribute).hex()}"
    return f"{keyword}={_escaped(attribute.value)}"


def _escaped(value: str) -> str:
    text = _ESCAPED.sub(lambda match: "\\" + match[0], value).replace("\0", "\\00")
    return _OUTER_SPACES.sub(lambda match: "\\ " * len(match[0]), text)


def _encoded_value(attribute: x509.NameAttribute[str | bytes]) -> bytes:
    """The DER of a value. A name of one attribute is SEQUENCE { SET { SEQUENCE { OBJECT IDENTIFIER, value } } }."""
    content = x509.Name([attribute]).public_bytes()
    for _ in range(3):
        content = content[_header_bytes(content) :]
    return content[_header_bytes(content) + content[1] :]


def _header_bytes(der: bytes) -> int:
    """Length of tag and length: the long form has the number of its bytes in the low bits of the first."""
    return 2 if der[1] < 0x80 else 2 + (der[1] & 0x7F)


# Rules.


@dataclass(frozen=True, slots=True)
class _Rule:
    source: str
    """As in the configuration."""
    apply: Callable[[str], str | None]
    """Returns the user of a name; None if the rule does not match."""


class PrincipalMapping:
    """The rules of a listener."""

    def __init__(self, rules: str = "DEFAULT") -> None:
        """Raises `MappingRulesError`."""
        if len(rules) > RULES_LENGTH_MAX:
            raise MappingRulesError(f"the rules have {len(rules)} characters, at most {RULES_LENGTH_MAX} are allowed")
        self._rules = tuple(_parse(rules))

    def __repr__(self) -> str:
        return f"PrincipalMapping({', '.join(rule.source for rule in self._rules)!r})"

    def user(self, name: str) -> str:
        """Return the user of a subject's name. Raises `NoPrincipalError`."""
        if len(name) > NAME_LENGTH_MAX:
            raise NoPrincipalError(f"the subject has {len(name)} characters, at most {NAME_LENGTH_MAX} are allowed")
        for rule in self._rules:
            user = rule.apply(name)
            if user is not None:
                break
        else:
            raise NoPrincipalError(f"no rule of ssl.principal.mapping.rules matches {name!r}")
        if not user or not user.isprintable() or len(user) > NAME_LENGTH_MAX:
            raise NoPrincipalError(f"{name!r} gives no name of printable characters")
        return user

    def principal(self, certificate: bytes) -> Principal:
        """Return the principal of a verified certificate, in DER. Raises `NoPrincipalError`."""
        try:
            name = subject_name(x509.load_der_x509_certificate(certificate).subject)
        except (ValueError, x509.InvalidVersion) as error:
            raise NoPrincipalError(f"the certificate cannot be read: {error}") from None
        return Principal("User", self.user(name))


def _parse(rules: str) -> list[_Rule]:
    found: list[_Rule] = []
    at = _SEPARATOR.match(rules).end()  # type: ignore[union-attr]  # it matches the empty text, too
    while at < len(rules):
        match = _RULE.match(rules, at)
        end = _RULE_END.match(rules, match.end()) if match else None
        if match is None or end is None:
            raise MappingRulesError(
                f"ssl.principal.mapping.rules: {rules[at : at + 100]!r} is no rule: write DEFAULT, or"
                " RULE:pattern/replacement/ and maybe L or U for the case"
            )
        found.append(_rule(match))
        at = _SEPARATOR.match(rules, end.end()).end()  # type: ignore[union-attr]
    return found


def _rule(match: re.Match[str]) -> _Rule:
    source = match[0]
    if source == "DEFAULT":
        return _Rule(source, lambda name: name)
    pattern = _compiled(match[1])
    parts = _replacement(match[2], pattern.groups, source)
    convert: Callable[[str], str] = {"L": str.lower, "U": str.upper}.get(match[3], str)

    def expand(found: Any) -> str:
        return "".join(part if isinstance(part, str) else found.group(part) or "" for part in parts)

    def apply(name: str) -> str | None:
        # As in Kafka, every match is replaced in a name that matches as a whole.
        return convert(pattern.sub(expand, name)) if pattern.fullmatch(name) else None

    return _Rule(source, apply)


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_MEMORY_BYTES_MAX
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise MappingRulesError(
            f"ssl.principal.mapping.rules: {pattern!r} is no RE2 regular expression: {text}"
        ) from None


def _replacement(text: str, groups: int, source: str) -> tuple[str | int, ...]:
    """Literal text and numbers of groups. `$12` is group 1 and a 2 in a pattern with fewer than 12 groups; a group that
    the pattern does not have is literal text."""
    parts: list[str | int] = []
    for escaped, number, literal, wrong in _REPLACEMENT_PART.findall(text):
        if wrong:
            raise MappingRulesError(
                f"ssl.principal.mapping.rules: {source!r}: write \\$ for a dollar sign, $1 for the first group"
            )
        if not number:
            parts.append(escaped or literal)
            continue
        digits = next((number[:size] for size in range(len(number), 0, -1) if int(number[:size]) <= groups), None)
        parts += ["$" + number] if digits is None else [int(digits), number[len(digits) :]]
    return tuple(parts)
