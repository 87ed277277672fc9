"""Subjects of certificates as RFC 2253 writes them, and Kafka's rules that map them to users."""

from __future__ import annotations

import warnings

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tidelog.model.principals import Principal
from tidelog.security.principals import MappingRulesError, NoPrincipalError, PrincipalMapping, subject_name

DUKE = "CN=Duke,OU=ServiceUsers,O=Org,C=US"


def name_of(*attributes: tuple[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])


class TestNames:
    """What is expected was printed by Java's `X500Principal.getName()`, 17."""

    def test_the_last_attribute_comes_first(self) -> None:
        name = name_of(
            (NameOID.COMMON_NAME, "#x"),
            (NameOID.DOMAIN_COMPONENT, "org"),
            (NameOID.USER_ID, "u1"),
            (NameOID.STREET_ADDRESS, "s"),
            (NameOID.LOCALITY_NAME, "l"),
            (NameOID.STATE_OR_PROVINCE_NAME, "st"),
        )
        assert subject_name(name) == r"ST=st,L=l,STREET=s,UID=u1,DC=org,CN=\#x"

    def test_special_characters_are_escaped_and_unknown_attributes_are_hexadecimal(self) -> None:
        name = name_of(
            (NameOID.COUNTRY_NAME, "US"),
            (NameOID.ORGANIZATION_NAME, 'A, B+C "q" <x>;#=\\'),
            (NameOID.EMAIL_ADDRESS, "a@b.c"),
            (NameOID.SERIAL_NUMBER, "12"),
            (NameOID.COMMON_NAME, " sp é "),
        )
        assert subject_name(name) == (
            r"CN=\ sp é\ ,2.5.4.5=#13023132,1.2.840.113549.1.9.1=#16056140622e63,"
            r"O=A\, B\+C \"q\" \<x\>\;\#\=\\,C=US"
        )

    def test_outer_spaces_are_escaped_one_by_one(self) -> None:
        name = name_of((NameOID.COMMON_NAME, " "), (NameOID.ORGANIZATION_NAME, "  two  words  "))
        assert subject_name(name) == r"O=\ \ two  words\ \ ,CN=\ "

    def test_a_long_value_has_a_length_of_more_bytes(self) -> None:
        assert subject_name(name_of((NameOID.TITLE, "t" * 200))) == "2.5.4.12=#0c81c8" + "74" * 200

    def test_attributes_of_one_level_are_joined_with_a_plus(self) -> None:
        level = x509.RelativeDistinguishedName(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, "a"),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "b"),
            ]
        )
        top = x509.RelativeDistinguishedName([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "x\0y")])
        assert subject_name(x509.Name([level, top])) == r"O=x\00y,CN=a+OU=b"

    def test_a_value_cannot_pretend_to_be_another_attribute(self) -> None:
        forged = name_of((NameOID.ORGANIZATION_NAME, "x"), (NameOID.COMMON_NAME, "evil,CN=admin"))
        assert subject_name(forged) == r"CN=evil\,CN\=admin,O=x"
        mapping = PrincipalMapping("RULE:^CN=([^,\\\\=]+),O=x$/$1/")
        with pytest.raises(NoPrincipalError):
            mapping.user(subject_name(forged))


class TestRules:
    def test_the_first_rule_that_matches_counts(self) -> None:
        """The example of KIP-371."""
        mapping = PrincipalMapping(
            "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L, "
            "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L, "
            "RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U, "
            "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U, "
            "DEFAULT"
        )
        assert mapping.user(DUKE) == "duke"
        assert mapping.user("CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US") == "duke@sme"
        assert mapping.user("cn=duke,ou=sme,dc=mycp,dc=com") == "DUKE@SME"
        assert mapping.user("cN=duke,OU=JavaSoft,O=Sun Microsystems") == "DUKE"
        assert mapping.user("OU=JavaSoft,C=US") == "OU=JavaSoft,C=US"

    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            ("DEFAULT", ["DEFAULT"]),
            ("", []),
            (" ,  , ,", []),
            (",,RULE://,,,DEFAULT,,", ["RULE://", "DEFAULT"]),
            ("  RULE:   /     / ,  DEFAULT  ", ["RULE:   /     /", "DEFAULT"]),
            ("RULE:([A-Z]*)/$1/U   ,RULE:([a-z]+)/$1/", ["RULE:([A-Z]*)/$1/U", "RULE:([a-z]+)/$1/"]),
            (r"RULE:a\/b/\/\//,DEFAULT", [r"RULE:a\/b/\/\//", "DEFAULT"]),
            (
                "RULE:,RULE:,/L,RULE:,/L,RULE:, DEFAULT, /DEFAULT/",
                ["RULE:,RULE:,/L,RULE:,/L", "RULE:, DEFAULT, /DEFAULT/"],
            ),
        ],
    )
    def test_rules_are_separated_by_commas(self, rules: str, expected: list[str]) -> None:
        assert repr(PrincipalMapping(rules)) == f"PrincipalMapping({', '.join(expected)!r})"

    @pytest.mark.parametrize(
        "rules",
        [
            "default",
            "DEFAUL",
            "DEFAULT/L",
            "DEFAULTS",
            "RULE:CN=(.*?),OU=ServiceUsers.*/$1",
            "rule:^CN=(.*?)$/$1/",
            "RULE:^CN=(.*?)$/$1/L/U",
            "RULE:^CN=(.*?)$/L",
            "RULE:^CN=(.*?)$/$1/LU",
            "RULE:^CN=((.*?)$/$1/",
            "RULE:(?=x)/$1/",
            r"RULE:(a)\1/$1/",
            "RULE:(a)/${name}/",
            "RULE:(a)/$/",
            "RULE:\ud800/a/",
            "RULE:a/b/," * 10_000,
        ],
    )
    def test_what_is_no_rule_is_rejected(self, rules: str) -> None:
        with pytest.raises(MappingRulesError):
            PrincipalMapping(rules)

    @pytest.mark.parametrize(
        ("rule", "name", "user"),
        [
            ("RULE:^CN=(a)(b)?$/$1-$2/", "CN=a", "a-"),
            ("RULE:^CN=(a)$/$12/", "CN=a", "a2"),
            ("RULE:^CN=(a)$/$4/", "CN=a", "$4"),
            ("RULE:^CN=a$/$1/", "CN=a", "$1"),
            ("RULE:^CN=(a)$/$0!/", "CN=a", "CN=a!"),
            (r"RULE:^CN=(a)$/\$1\/\\/", "CN=a", "$1/\\"),
            ("RULE:.*/x/", "CN=a", "xx"),  # as Java's replaceAll: the empty rest of the name matches again
            (r"RULE:^CN=((\\, *|\w)+)(,.*|$)/$1/", r"CN=Tkac\, Adam,OU=ITZ", r"Tkac\, Adam"),
        ],
    )
    def test_replacements_are_those_of_kafka(self, rule: str, name: str, user: str) -> None:
        assert PrincipalMapping(rule).user(name) == user

    def test_a_pattern_matches_the_whole_name(self) -> None:
        with pytest.raises(NoPrincipalError, match="no rule"):
            PrincipalMapping("RULE:CN=Duke/admin/").user(DUKE)

    @pytest.mark.parametrize("rules", ["", "RULE:^.*$//", "RULE:^CN=(x)?.*$/$1/"])
    def test_a_name_that_becomes_nothing_is_nobody(self, rules: str) -> None:
        with pytest.raises(NoPrincipalError):
            PrincipalMapping(rules).user(DUKE)

    @pytest.mark.parametrize("name", ["", "CN=a\nb", "CN=" + "x" * 5000])
    def test_names_that_are_empty_long_or_not_printable_are_nobody(self, name: str) -> None:
        with pytest.raises(NoPrincipalError):
            PrincipalMapping().user(name)

    def test_a_pattern_that_takes_other_engines_years_takes_linear_time(self) -> None:
        mapping = PrincipalMapping("RULE:^CN=((a*)*)*b$/$1/,DEFAULT")
        name = "CN=" + "a" * 4000
        assert mapping.user(name) == name


class TestCertificates:
    def certificate(self, **names: str) -> bytes:
        issued = trustme.CA().issue_cert("client.example", **names)  # type: ignore[arg-type]
        return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).public_bytes(Encoding.DER)

    def test_the_principal_is_the_subject(self) -> None:
        der = self.certificate(common_name="duke", organization_name="Org", organization_unit_name="A, B")
        assert PrincipalMapping().principal(der) == Principal("User", r"CN=duke,OU=A\, B,O=Org")
        assert str(PrincipalMapping("RULE:^CN=([^,]+),.*$/$1/U").principal(der)) == "User:DUKE"

    def test_bytes_that_are_no_certificate_are_nobody(self) -> None:
        with pytest.raises(NoPrincipalError, match="cannot be read"):
            PrincipalMapping().principal(b"no certificate")

    def test_a_certificate_without_a_subject_is_nobody(self) -> None:
        name = x509.Name([])
        with warnings.catch_warnings(), pytest.raises(NoPrincipalError, match="gives no name"):
            PrincipalMapping().user(subject_name(name))
